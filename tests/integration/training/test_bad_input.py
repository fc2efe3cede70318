"""A user's mistake: one clear line, exit code 2, no device started, nothing written."""

import contextlib
import importlib.util
import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import run_vit_training
from gpu_fsdp import resolve_gpu
from tests.support.archives import write_tar
from tests.support.cli import DIGITS, ROOT, TINY_MODEL, need_xla, run_program
from tests.support.resolved import on_gpus
from tests.support.usage_error import told_in_one_line
from torch_fsdp.devices import Cpu
from training.data import open_images
from training.errors import UsageError
from training.evaluation.features import open_plainly
from training.evaluation.frozen import open_frozen


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("torch_fsdp.devices.choose", lambda backend: Cpu())


def complaint(capsys, ckpt_dir, *flags):
    """The one line that the program ends with, and nothing written."""
    before = sorted(ckpt_dir.rglob("*")) if ckpt_dir.exists() else None
    source = ["--data_dir", DIGITS, *TINY_MODEL, "--batch_size", "16", "--ckpt_dir", ckpt_dir]
    line = told_in_one_line(capsys, *source, *flags)
    assert (sorted(ckpt_dir.rglob("*")) if ckpt_dir.exists() else None) == before
    return line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--compile_only", "--compile_only requires --tpu_topology, such as v5e:4x4; shapes by"),
        ("--compile_only --tpu_topology v9:4x4", "--tpu_topology v9:4x4: unknown kind of TPU"),
        ("--compile_only --tpu_topology v5p:4x4", "v5p:4x4 must be v5p:AxBxC, the number of"),
        ("--compile_only --tpu_topology v5e:3x5", "v5e:3x5 does not exist (for several"),
        ("--compile_only --tpu_topology v5e:1000x1000", "v5e:1000x1000 does not exist"),
        (
            "--compile_only --tpu_topology tpu7x:2x2x1 --tpu_compiler installed",
            "tpu7x:2x2x1 requires --tpu_compiler 0.0.52: the installed libtpu 0.0.21 does not",
        ),
        ("--compile_only --tpu_topology v5e:2x2 --tpu_compiler 0.0.1", "invalid choice: '0.0.1'"),
        ("--compile_only --tpu_topology v5e:4x4 --hlo_dir setup.cfg", "--hlo_dir setup.cfg is a f"),
        (
            "--compile_only --tpu_topology v5e:4x2 --mark_step_after_forward --no_grad_ckpt",
            "--compile_only with a broken graph requires --grad_ckpt full",
        ),
        (
            "--compile_only --tpu_topology v5e:2x4 --grad_ckpt offload --no-scan_blocks",
            "does not have (--no-scan_blocks): use --grad_ckpt full",
        ),
        ("--grad_ckpt offload --mark_step_after_forward", "--grad_ckpt offload is incompatible"),
        ("--backend cuda --fsdp fsdp2 --grad_ckpt offload", "--grad_ckpt offload requires --backe"),
        ("--scan_blocks --xla_fsdp nested", "--scan_blocks is incompatible with --xla_fsdp nested"),
        ("--batch_size 15 --cpu_devices 2", "--batch_size 15 (global) is not a multiple of the 2"),
        ("--batch_size 2000", "1438 training images, fewer than one batch"),
        ("--image_size 17", "--image_size 17 is not a multiple of --patch_size 4"),
        ("--num_heads 5", "--embed_dim 32 is not a multiple of --num_heads 5"),
        ("--model vit_11b", "unknown model vit_11b; did you mean vit_10b"),
        ("--global_pool token", "--global_pool token requires --class_token"),
        ("--patch_drop_rate 0.99", "drops every patch"),
        ("--data_dir /does/not/exist", "/does/not/exist/train does not exist"),
        ("--num_classes 9", "10 classes, but --num_classes is 9"),
        (
            f"@{ROOT}/recipes/deit3_large.args --fake_data",
            "--aug_repeats 3, --aa 3a, --color_jitter 0.3 have no effect with --data_source fake: "
            "drop them, or append --aug_repeats 1 --aa none --color_jitter 0.0",
        ),
        (
            f"@{ROOT}/recipes/deit3_at_224.args --backend cuda",
            "--init_from FIRST_STAGE: no such checkpoint, folder or file",
        ),
        (
            "--train_interpolation box --fake_data",
            "--train_interpolation box has no effect with --data_source fake: drop it",
        ),
        ("--resume /does/not/exist", "no such checkpoint folder"),
        (
            f"--resume {__file__}",
            f"--resume {__file__} contains only weights: use --init_from instead",
        ),
        ("--resume_epoch 3", "no checkpoint from the end of that epoch"),
        ("--scale 0.9 0.1", "--scale 0.9 0.1"),
        ("--scale 0 0", "--scale 0 0: the maximum must be above 0"),
        ("--backend cuda --cpu_devices 2", "--cpu_devices requires --backend xla, not cuda"),
        ("--backend xla --dp_outer 2", "--mesh_fsdp 1 x --mesh_tensor 1 is 2, not the 1"),
        ("--precision fp16", "--precision fp16 requires --backend cuda"),
        ("--profile 3", "'3' is not FIRST:LAST"),
        ("--zero_dp_strategy 4", "'4' is not one of 0, 1, 2, 3, no_shard, optim"),
        (
            "--xla_fsdp nested --cpu_devices 2",
            "--xla_fsdp nested is incompatible with --cpu_devices 2",
        ),
        ("--mesh_tensor 4 --cpu_devices 4", "--mesh_tensor 4 does not divide --num_heads 2"),
        ("--mesh_tensor 2 --cpu_devices 2 --mlp_ratio 1.05", "--mesh_tensor 2 does not divide"),
        ("--mesh_tensor 2 --cpu_devices 8 --batch_size 10", "--batch_size 10 (global) is not a"),
        ("--mesh_dcn 2 --xla_fsdp nested", "--mesh_dcn requires --xla_fsdp spmd"),
        ("--backend cuda --mesh_tensor 2", "--mesh_tensor 2 requires --fsdp simple or --backend"),
        ("--mesh_dcn 0", "must be at least 1 and at most 1000000000 (or slices)"),
        ("--mesh_dcn slice", "'slice' is not a whole number (or slices)"),
        (
            "--compile_only --tpu_topology v5e:2x2 --mesh_dcn slices",
            "--mesh_dcn slices requires attached TPU",
        ),
        ("--lr x", "'x' is not a number"),
        ("--lr -1", "must be at least 0"),
        (f"--seed {10**20}", "must be at least 0 and at most 9223372036854775807"),
        ("--lr inf", "'inf' is not a finite number"),
        ("--mean 123 117 104", "123 must be at least 0 and at most 1"),
        (f"--max_steps {'9' * 5000}", f"'{'9' * 40}...' is not a whole number"),
        ("--in_chans 2", "have 1 band"),
        ("--embed_dim 32 --mlp_ratio 0.01", "--mlp_ratio 0.01 gives an MLP of width 0"),
        ("--data_dir=", "argument --data_dir: must not be empty (is a shell variable unset?)"),
        ("--batch 16", "unknown flag --batch: did you mean --batch_size?"),
    ],
)
def test_flags(flags, words, capsys, tmp_path, monkeypatch):
    others = ("--mesh_fsdp 2", "--precision fp16", "--plan --mesh_dcn slices")
    if "--tpu_topology" in flags or flags in others:
        need_xla()  # where another backend says it in other words
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").touch()
    assert words in complaint(capsys, tmp_path / "ckpt", *flags.split())


def test_a_flag_of_another_backend_beside_the_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    flags = ["--backend", "cuda", "--cpu_devices", "4"]
    words = complaint(capsys, tmp_path / "ckpt", *flags)
    assert words.startswith("--cpu_devices requires --backend xla, not cuda")
    words = complaint(capsys, tmp_path / "ckpt", *flags[:2], "--lr", "1", "--min_lr", "2")
    assert words.startswith("--min_lr 2 is above --lr 1")


def test_xla_without_torch_xla(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    words = complaint(capsys, tmp_path / "ckpt", "--backend", "xla")
    assert words.startswith("--backend xla requires the package torch_xla: python3 -m pip install")


@pytest.mark.parametrize("package", ["torch_xla", "libtpu", "jaxlib"])
def test_compile_only_without(package, capsys, tmp_path, monkeypatch):
    need_xla()
    monkeypatch.setitem(sys.modules, package, None)
    words = complaint(capsys, tmp_path / "ckpt", "--compile_only", "--tpu_topology", "v5e:2x2")
    missing = f"requires the package {package}: python3 -m pip install -r requirements-tpu"
    assert f"--compile_only {missing}" in words
    words = complaint(capsys, tmp_path / "ckpt", "--plan")
    assert f"--plan {missing}" in words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero_dp_strategy 1", "--fsdp fsdp2 does not support --zero_dp_strategy 1"),
        (
            "--zero_dp_strategy 0 --dp_outer 2",
            "--mesh_dcn is incompatible with --zero_dp_strategy 0",
        ),
        ("--run_without_fsdp --zero_dp_strategy 3", "means --zero_dp_strategy 0, not 3"),
        ("--outer_dp_sharding_strategy 2", "must be 0 (no_shard) or 1 (optim), not 2"),
        ("--no-meta_init", "requires --fsdp megatron, not fsdp2"),
        ("--fsdp megatron", "--fsdp megatron requires CUDA: on the CPU use --fsdp fsdp2"),
        ("--cpu_offload", "--cpu_offload requires CUDA"),
        ("--precision fp16", "--precision fp16 requires CUDA"),
        ("--reduce_dtype fp16", "--reduce_dtype fp16 requires --precision fp16"),
        ("--tf32", "--tf32 requires CUDA"),
        ("--block te", "TransformerEngine is not installed: run launch/install_"),
    ],
)
def test_gpu_flags(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert words in complaint(capsys, tmp_path / "ckpt", "--backend", "cuda", *flags.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero_dp_strategy 0 --meta_init", "--meta_init requires --zero_dp_strategy 1, 2 or 3"),
        ("--reduce_dtype bf16 --dp_outer 4", "requires --mesh_fsdp 2 or more"),
        (
            "--no_preserve_fp32_weights --precision bf16 --reduce_dtype bf16 --objective dino",
            "is incompatible with --objective dino, whose teacher is an fp32 average",
        ),
    ],
)
def test_megatron_flags(flags, words, capsys, tmp_path, monkeypatch):
    """As if it could run here, to reach what it refuses for other reasons."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(resolve_gpu, "check_megatron_runs_here", lambda: None)
    flags = f"--backend cuda --fsdp megatron {flags}"
    assert words in complaint(capsys, tmp_path / "ckpt", *flags.split())


def test_neither_cuda_nor_gloo(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    line = complaint(capsys, tmp_path / "ckpt", "--backend", "cuda")
    assert "no CUDA device found, and this PyTorch lacks gloo" in line


def test_wandb_is_not_installed(capsys, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wandb" else find(name)
    )
    line = complaint(capsys, tmp_path / "ckpt", "--wandb", "p")
    assert "--wandb requires the package wandb: python3 -m pip install wandb" in line


@pytest.mark.parametrize("mistake", ["--image_size 15", "--batch_size none"])
@pytest.mark.parametrize(("local_rank", "lines"), [("1", 0), ("0", 1)])
def test_only_the_first_process_of_a_node_complains(
    local_rank, lines, mistake, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("training.command_line.time.sleep", lambda seconds: None)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with contextlib.suppress(SystemExit):
        assert run_vit_training.main([*mistake.split(), "--ckpt_dir", str(tmp_path / "x")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_ckpt_dir_is_a_file(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "is a file, not a folder" in complaint(capsys, tmp_path / "file")


def test_local_checkpoints_in_the_runs_own_folder(capsys, tmp_path):
    local = tmp_path / ".." / tmp_path.name
    told = told_in_one_line(
        capsys, "--fake_data", "--ckpt_dir", tmp_path, "--local_ckpt_dir", local
    )
    assert "is the same folder as --ckpt_dir: use another" in told


def test_bad_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "two")
    assert "'two' is not a whole number" in complaint(capsys, tmp_path / "ckpt")


def test_data_folders(capsys, tmp_path):
    def image(split, name):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / split / name / "image.png")

    def said():
        return complaint(capsys, tmp_path / "ckpt", "--data_dir", tmp_path, "--batch_size", 1)

    (tmp_path / "train").mkdir()
    assert "train contains no class folders" in said()
    image("train", "a")
    assert "val does not exist" in said()
    image("val", "a")
    image("val", "b")
    assert "train and val differ" in said()
    assert "only val has b" in said()
    (tmp_path / "train" / "b").mkdir()
    assert "b" in said()  # a class without images


def png(value=0):
    content = io.BytesIO()
    Image.new("L", (16, 16), value).save(content, "png")
    return content.getvalue()


def write_one_class(root, source):
    """Images of one class, four for training and two for validation; the flags to read them."""
    for split, count in (("train", 4), ("val", 2)):
        images = [png(number) for number in range(count)]
        if source in ("folder", "one level too many"):
            middle = "cat" if source == "folder" else "images"
            for number, image in enumerate(images):
                name = f"{number}.png" if source == "folder" else f"{'ab'[number % 2]}/{number}.png"
                path = root / split / middle / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image)
        elif source.startswith("shards"):
            label = b"7" if source == "shards" else b"cat"
            files = {
                f"{n}.{end}": x
                for n, image in enumerate(images)
                for end, x in (("png", image), ("cls", label))
            }
            write_tar(root / split / "0.tar", files)
        elif source == "parquet":
            columns = {"image": [{"bytes": image} for image in images], "label": [3] * count}
            root.mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), root / f"{split}.parquet")
        else:
            (root / split / "cat").mkdir(parents=True)
            for number in range(count):
                np.save(root / split / "cat" / f"{number}.npy", np.zeros((16, 16), np.uint8))
    if source == "volumes, listed":
        rows = [f"{path.relative_to(root)},sick,{path.parts[-3]}" for path in root.rglob("*.npy")]
        (root / "labels.csv").write_text("\n".join(["path,label,split", *rows]))
        return ["--data_source", "volumes", "--labels", root / "labels.csv", "--in_chans", "1"]
    kind = source.partition(",")[0]
    return {
        "shards": ["--data_source", "webdataset"],
        "parquet": ["--data_source", "parquet"],
        "volumes": ["--data_source", "volumes", "--in_chans", "1"],
    }.get(kind, [])


REQUIRE_TWO = "classification, k-NN and probes require at least two classes (other values of "


@pytest.mark.parametrize(
    ("source", "flags", "words"),
    [
        ("folder", "", "ages: all 4 training images have the same label, cat: " + REQUIRE_TWO),
        ("folder", "--self_check", "the same label, cat: " + REQUIRE_TWO),
        ("folder", "--objective mae --class_token --knn_every 2", "the same label, cat: "),
        ("folder", "--native_resolution", "the same label, cat: "),
        (
            "one level too many",
            "",
            "images/train/images is the only class folder and contains folders: move these to ",
        ),
        ("shards", "", "all 4 training images have the same label, 7: "),
        ("shards, named", "", "all 4 training images have the same label, cat: "),
        ("parquet", "", "all 4 training images have the same label, 3: "),
        ("volumes", "", "all 4 training images have the same label, cat: "),
        ("volumes, listed", "", "all 4 training images have the same label, sick: "),
    ],
)
def test_one_class(source, flags, words, capsys, tmp_path):
    """Whatever is trained, it would be right about all images."""
    given = write_one_class(tmp_path / "images", source)
    where = ["--data_dir", tmp_path / "images", "--batch_size", 1, "--backend", "cuda"]
    said = complaint(capsys, tmp_path / "ckpt", *where, *given, "--max_steps", 1, *flags.split())
    assert words in said


def test_one_class_where_labels_are_not_used(tmp_path):
    """Nor where they are only written down, or nothing is read."""
    write_one_class(tmp_path / "images", "folder")
    sizes = [*TINY_MODEL, "--batch_size", "1", "--data_dir", str(tmp_path / "images")]
    run = on_gpus([*sizes, "--objective", "mae"])
    assert open_images(run).train_length == 4
    assert open_frozen(run, ["rank"]).images.train_length == 4
    plain = on_gpus(sizes)
    assert open_plainly(plain).classes == ["cat"]  # as --features does
    with pytest.raises(UsageError, match="the same label, cat"):
        open_frozen(run, ["knn"])
    assert open_images(plain, with_train=False).val_length == 2  # the model may be wrong
    alone = on_gpus([*sizes, "--num_classes", "1"])
    with pytest.raises(UsageError, match="a model with --num_classes 1 has an accuracy of 100 %"):
        open_images(alone, with_train=False)
    assert open_images(on_gpus([*sizes, "--fake_data"])).train_length > 10**6


def test_as_a_program(tmp_path):
    flags = ["--image_size", "15", "--ckpt_dir", str(tmp_path / "x")]
    done = run_program("run_vit_training.py", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "run_vit_training.py: error: --image_size 15 is not a multiple of --patch_size 14\n"
    )
    assert not (tmp_path / "x").exists()
