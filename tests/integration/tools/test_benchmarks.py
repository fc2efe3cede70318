"""The benchmarks still measure: one short run of each form. What they measure is for docs/."""

import csv
import itertools
import json
import math

import pytest
from PIL import Image

from benchmarks import domain_parallel
from benchmarks.domain_parallel_rows import COLUMNS, OOM, TRAIN, Row, compare_with_one_device
from benchmarks.domain_parallel_rows import tables as tables_of_rows
from benchmarks.native_resolution import write_images
from tests.support.cli import TINY_MODEL, run_program
from training.errors import UsageError


@pytest.mark.long
def test_xla_step():
    forms = ["spmd", "unrolled", "wrapper", "nested", "plain", "fsdp2"]
    done = run_program(
        *"benchmarks/xla_step.py --devices 1 --steps 1 --repeats 1 --forms".split(),
        *forms,
        *TINY_MODEL,
        "--batch_size",
        "4",
        "--model",
        "vit_tiny_patch16_224",
        warm=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[-len(forms) :]]
    assert [row[0] for row in rows] == forms
    for _, _, seconds, *_ in rows[4:]:
        assert float(seconds) > 0
    for _, _, seconds, _, trace, compiling, executions, compilations in rows[:4]:
        assert 0 < float(trace) < float(seconds)
        assert float(compiling) > 0
        assert (executions, compilations) == ("1", "0")


TINY = "--num_warmup 1 --num_iterations 1 --image_size_start 32 --set num_blocks=1 num_classes=10 "
TINY = f"{TINY} embed_dim=32 num_heads=2 patch_size=8".split()
PARAMETERS = (3 * 8 * 8 + 1) * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32 + 32 * 10 + 10
"""Of that model: patches, positions, one block, the last norm, the head."""


def domain_parallel_rows(folder, *flags):
    """The CSV's rows of a run in a folder, which must succeed and print the same."""
    found = folder / "rows.csv"
    command = ["benchmarks/domain_parallel.py", *TINY, "--csv", str(found), *flags]
    done = run_program(*command, warm=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with found.open(newline="") as file:
        rows = list(csv.DictReader(file))
    printed, _, after = done.stdout.partition("\n\n")
    assert sum(line.startswith("| ") for line in printed.splitlines()) == 1 + len(rows)
    assert tuple(rows[0]) == COLUMNS
    return rows, tables_of(after)


def tables_of(text):
    """The tables of a text: their cells by title, then by the first cells and the column."""
    found = {}
    parts = text.strip().split("\n\n")
    for title, table in zip(parts[::2], parts[1::2], strict=True):
        head, _, *body = (line.strip("| ").split(" | ") for line in table.splitlines())
        cells = {}
        for line in body:
            values = dict(itertools.zip_longest(head, line, fillvalue=""))
            mesh = tuple(int(values[name]) for name in ("devices", "ddp", "domain"))
            cells |= {(*mesh, name): values[name] for name in head[3:]}
        found[title] = cells
    return found


def check_measured(row, batch, devices):
    assert int(row["parameters"]) == PARAMETERS
    assert float(row["inference GB"]) > 0
    pace = batch / float(row["train s"] or row["forward s"])
    assert float(row["samples/s"]) == pytest.approx(pace)
    assert float(row["samples/s/device"]) == pytest.approx(pace / devices)


@pytest.mark.long
def test_domain_parallel_on_two_processes(tmp_path):
    """One image on one process and over two, gloo: passes both ways, tables, and a picture."""
    picture = tmp_path / "rows.png"
    sweep = "--domain_sizes 1 2 --batch_size 1 2 --plot".split()
    rows, tables = domain_parallel_rows(tmp_path, *sweep, str(picture))
    assert [(int(row["domain"]), int(row["batch"])) for row in rows] == [
        *((1, 1), (1, 2)),
        *((2, 1), (2, 2)),
    ]
    pace, saved = (
        tables[f"{title}: train, 32x32, CPU"]
        for title in ("images/s", "memory saved per device, % of one device")
    )
    for row in rows:
        assert (row["on"], row["ddp"], row["size"], row["note"]) == ("cuda", "1", "32x32", "CPU")
        devices, batch = int(row["domain"]), int(row["batch"])
        check_measured(row, batch=batch, devices=devices)
        cell = (devices, 1, devices, f"batch {batch}")
        assert float(pace[cell]) == pytest.approx(batch / float(row["train s"]), rel=1e-3)
        alone = float(rows[batch - 1]["train GB"])
        less = 100 * (alone - float(row["train GB"])) / alone
        if devices == 2:
            assert float(row["train saved %"]) == pytest.approx(less)
            assert float(saved[cell]) == pytest.approx(less, rel=1e-3)
        else:
            assert saved[cell] == row["train saved %"] == ""
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_domain_parallel_out_of_memory(tmp_path):
    """A real limit: a layer of 64 MB does not fit into 10 MB. The row says so, and the run ends."""
    large = "--processes 1 --inference_only --memory_limit_gb 0.01 --set embed_dim=2048".split()
    (row,), tables = domain_parallel_rows(
        tmp_path, *large, "num_heads=2", "num_blocks=1", "patch_size=8"
    )
    assert row["forward s"] == OOM
    assert row["samples/s"] == row["inference GB"] == row["note"] == ""
    assert tables["images/s: forward, 32x32, cuda"] == {(1, 1, 1, "batch 1"): OOM}


@pytest.mark.long
def test_domain_parallel_by_the_compiler(tmp_path):
    (row,), _ = domain_parallel_rows(tmp_path, "--tpu_topology", "v5e:1x1", "--use_mixed_precision")
    assert row["on"] == "v5e:1x1"
    assert row["forward s"] == row["inference GB"] == ""
    assert 0 < float(row["train s"]) < 1
    assert float(row["samples/s"]) == pytest.approx(1 / float(row["train s"]))
    assert "expected MFU" in row["note"]


def test_domain_parallel_combinations(monkeypatch):
    """Of several slices and domain sizes, those that are the slice and divide the batch."""

    def ways(flags):
        monkeypatch.setattr("sys.argv", ["domain_parallel.py", *flags.split()])
        rows = domain_parallel.rows_of(domain_parallel.parse())
        return [(row.on, row.ddp, row.domain, row.size) for row in rows]

    slices = "--tpu_topology v5e:1x1 v5e:2x2 --domain_sizes 1 2 4"
    assert ways(slices) == [("v5e:1x1", 1, 1, 1024), ("v5e:2x2", 1, 4, 1024)]
    assert len(ways(f"{slices} --batch_size 4")) == 4
    batches = "--processes 4 --domain_sizes 1 2 4 --batch_size 1 2 4"
    assert [way[1:3] for way in ways(batches)] == [(4, 1), (2, 2), (2, 2), *3 * [(1, 4)]]
    assert ways("--processes 6 --domain_size 3 --batch_size 2") == [("cuda", 2, 3, 1024)]
    assert [size for *_, size in ways("--image_size_stop 1280")] == [1024, 1152, 1280]
    sizes = "--image_size_start 64 --image_size_stop 160 --image_size_step 32"
    assert [size for *_, size in ways(sizes)] == [64, 96, 128, 160]
    for wrong in ("--processes 3 --domain_size 2", "--processes 2", f"{sizes} --image_size_stop 1"):
        with pytest.raises(UsageError):
            ways(wrong)


def test_domain_parallel_as_the_tutorial(monkeypatch):
    """The passes of the tutorial, and the number format of its torch.autocast on GPUs."""

    def parsed(flags):
        monkeypatch.setattr("sys.argv", ["domain_parallel.py", *flags.split()])
        options = domain_parallel.parse()
        (row,) = domain_parallel.rows_of(options)
        flags = domain_parallel.flags_of(row, options)
        return options, flags[flags.index("--precision") + 1]

    options, precision = parsed("")
    assert (options.num_warmup, options.num_iterations, precision) == (5, 10, "fp32")
    assert parsed("--use_mixed_precision")[1] == "bf16"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert parsed("")[1] == "fp32"
    assert parsed("--use_mixed_precision")[1] == "fp16"
    assert parsed("--use_mixed_precision --backend xla")[1] == "bf16"
    assert parsed("--use_mixed_precision --tpu_topology v5e:1x1")[1] == "bf16"


def test_domain_parallel_tables():
    """Of figures that are given: of several meshes, with what did not fit."""

    def row(ddp, domain, batch, seconds, memory_gb, size=64):
        found = Row("cuda", ddp, domain, 3, size, batch)
        if seconds is None:
            found.out_of_memory.add(TRAIN)
        else:
            found.seconds[TRAIN], found.memory_gb[TRAIN] = seconds, memory_gb
        return found

    rows = [row(1, 1, 2, 4.0, 8.0), row(1, 1, 4, None, None), row(1, 1, 2, 9.0, 9.0, size=96)]
    rows += [row(2, 1, 2, 2.0, 6.0), row(1, 2, 2, 2.5, 4.4), row(1, 2, 4, 5.0, 8.8)]
    compare_with_one_device(rows)
    tables = tables_of("\n".join(tables_of_rows(rows)))
    expected = {
        (1, 1, 1): ("0.5", OOM),
        (2, 2, 1): ("1", ""),
        (2, 1, 2): ("0.8", "0.8"),
    }
    assert tables["images/s: train, 64x64x64, cuda"] == by_batch(expected)
    expected = {(1, 1, 1): ("", OOM), (2, 2, 1): ("25", ""), (2, 1, 2): ("45", "")}
    title = "memory saved per device, % of one device: train, 64x64x64, cuda"
    assert tables[title] == by_batch(expected)
    assert len(tables) == 3  # there is nothing to compare 96 with


def by_batch(cells):
    return {
        (*mesh, name): value
        for mesh, values in cells.items()
        for name, value in zip(("batch 2", "batch 4"), values, strict=True)
    }


NATIVE = "--seeds 1 --epochs 4 --copies 1 --digits 128 --steps 1 --repeats 1 --backends fsdp2"


@pytest.mark.long
def test_native_resolution(tmp_path):
    """Two short trainings and steps: the table has the figures of the JSON, and what it says of
    tokens holds for the images."""
    rows, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    command = ["benchmarks/native_resolution.py", *NATIVE.split(), "--images", "strips"]
    done = run_program(*command, "--json", str(rows), "--plot", str(picture), warm=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(rows.read_text())
    runs = {run["way"]: run for run in figures["runs"]}
    assert [*runs] == ["native", "squash", "crop"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    write_images(tmp_path / "strips", "strips", 1, 128)
    patches = [
        math.prod(round(side / 4) for side in Image.open(path).size)
        for path in (tmp_path / "strips" / "train").rglob("*.png")
    ]
    assert len(patches) == 128
    # Those of a batch, which is a part of them.
    assert runs["native"]["tokens_an_image"] == pytest.approx(sum(patches) / 128, rel=0.3)
    assert 0 <= runs["native"]["padding"] < 0.2
    assert runs["squash"]["tokens_an_image"] == math.ceil((sum(patches) / 128) ** 0.5) ** 2
    for name, run in runs.items():
        assert f"| strips | {name} | {run['top1']:.1f} | " in done.stdout
    for step in figures["steps"]:
        (native,), (square,) = step["native"], step["square"]
        row = f"| fsdp2 | {step['tokens']} | {native:.3f} | {square:.3f} | {native / square:.2f} |"
        assert row in done.stdout


@pytest.mark.long
def test_image_text(tmp_path):
    """One epoch of both ways: the table has the figures of the JSON, captions are learned, and
    nothing in bags of words tells twins apart."""
    rows = tmp_path / "rows.json"
    command = "benchmarks/image_text.py --seeds 1 --epochs 1 --json".split()
    done = run_program(*command, str(rows), warm=False)
    assert done.returncode == 0, done.stderr
    captions, bags = json.loads(rows.read_text())["runs"]
    assert [captions["way"], bags["way"]] == ["captions", "bags of words"]
    for name in ("image_to_text", "text_to_image", "image_to_any_text"):
        assert captions[name] == sorted(captions[name])
    assert captions["image_to_text"][2] > 50 < bags["image_to_text"][2]
    assert captions["image_to_text"][0] >= captions["image_to_any_text"][0]
    assert bags["twins_of_place"] == bags["twins_of_count"] == 50
    table = {line.split(" | ")[0].strip("| "): line for line in done.stdout.splitlines()}
    # 70 of the 88 are in a pair with the same words, which is held out whole.
    best = f"{100 * (18 + 70 / 2) / 88:.1f}, 100.0, 100.0"
    assert table["image to 88 texts, recall@1/5/10"].endswith(f"{best} | 1.1, 5.7, 11.4 |")
    assert table["image to 670 texts, recall@1/5/10"].endswith(f"{best} | 0.1, 0.7, 1.5 |")
    shown = {
        "zero_shot": "zero-shot, 88 classes, top-1",
        "twins_of_place": "right one of two twins, place (44 images)",
        "twins_of_count": "right one of two twins, count (26 images)",
    }
    for name, row in shown.items():
        assert f"| {captions[name]:.1f} ({captions[name]:.1f} to " in table[row]
