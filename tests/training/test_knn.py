"""k-NN on features: --eval_only --knn and --knn_every, against the plain vote over all images."""

import json
import multiprocessing
import re
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import run_vit_training
from tests.cli import DIGITS, need_xla, run_program, train_tiny, train_tiny_gpu
from tests.marks import long
from tests.training.test_features import (
    FLAGS,
    FORMS,
    LOADER,
    TRAIN,
    backbone,
    images,  # noqa: F401 - a fixture
    read,
    tokens_of,
    weights,  # noqa: F401 - a fixture
)
from tests.usage_error import told_in_one_line
from training import knn as of_knn
from training.knn import knn

KS = (10, 20, 100, 200)


def plain_knn(bank, labels, queries, query_labels, k):
    """The percentage of queries that DINO's weighted vote names right, in NumPy, one by one."""
    bank, queries = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (bank, queries))
    right = 0
    for query, label in zip(queries, query_labels, strict=True):
        similarities = bank @ query
        votes = np.zeros(1 + labels.max())
        for place in np.argsort(-similarities)[:k]:
            votes[labels[place]] += np.exp(similarities[place] / 0.07)
        right += int(votes.argmax() == label)
    return 100 * right / len(queries)


def made(count, classes, seed, spread=1.0):
    """Features around a direction for each class, in fp32, and their labels."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(classes, 24))
    labels = random.integers(classes, size=count)
    return (centres[labels] + spread * random.normal(size=(count, 24))).astype(np.float32), labels


def labelled(features, labels):
    return F.normalize(torch.from_numpy(features), dim=1), torch.from_numpy(labels)


def measured(bank, queries):
    return knn(labelled(*bank), labelled(*queries))


def test_vote_is_the_plain_one(monkeypatch):
    """In parts of any number of queries."""
    bank, queries = made(300, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    expected = {k: plain_knn(*bank, *queries, k) for k in KS}
    assert 20 < min(expected.values()) < max(expected.values()) < 95
    for similarities in (2**25, 300 * 8, 1):
        monkeypatch.setattr(of_knn, "_SIMILARITIES", similarities)
        found = measured(bank, queries)
        assert found.top1 == pytest.approx(expected)
        assert (found.images, found.bank) == (90, 300)


def test_clusters_and_noise():
    """Far clusters are all named right; features that know nothing are right by chance."""
    near = measured(made(400, 10, 1, spread=0.01), made(100, 10, 2, spread=0.01))
    assert near.top1[10] == near.top1[20] == 100
    noise = np.random.default_rng(5).normal(size=(2, 2000, 24)).astype(np.float32)
    labels = np.random.default_rng(6).integers(10, size=(2, 2000))
    chance = measured((noise[0], labels[0]), (noise[1], labels[1]))
    assert all(abs(top1 - 10) < 3 for top1 in chance.top1.values())  # 4.5 standard deviations


def test_edges():
    """Fewer images than neighbors, one class, a class with one image, nothing at all."""
    bank, queries = made(15, 3, 1), made(9, 3, 2)
    found = measured(bank, queries).top1
    assert found == {k: pytest.approx(plain_knn(*bank, *queries, k)) for k in (10, 15)}
    one = measured((bank[0], np.zeros(15, np.int64)), (queries[0], np.zeros(9, np.int64)))
    assert set(one.top1.values()) == {100}
    alone = np.concatenate([bank[0][:1], -bank[0][:1]])
    near = measured((alone, np.array([0, 1])), (alone[1:] * 3, np.array([1])))
    assert near.top1 == {2: 100}
    unknown = measured((bank[0], np.zeros(15, np.int64)), (queries[0], np.full(9, 2)))
    assert set(unknown.top1.values()) == {0}  # a class that training images do not have
    assert measured((bank[0][:0], bank[1][:0]), queries).top1 == {}


def _one_of(rank, port, found):
    """A process's part: sizes differ, and one has no image of the bank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=3)
    bank, queries = made(300, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    of_bank, of_queries = ((0, 50), (50, 300), (300, 300)), ((0, 7), (7, 7), (7, 90))
    of_knn._SIMILARITIES = 250 * 16
    parts = (
        tuple(each[slice(*where[rank])] for each in whole)
        for whole, where in ((bank, of_bank), (queries, of_queries))
    )
    found.put(measured(*parts).top1)
    dist.destroy_process_group()


@pytest.mark.long
def test_vote_over_processes():
    """Three of them, each with other images, find what one finds."""
    bank, queries = made(300, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    with socket.socket() as opened:
        opened.bind(("", 0))
        port = opened.getsockname()[1]
    start = multiprocessing.get_context("spawn")
    found = start.Queue()
    processes = [start.Process(target=_one_of, args=(rank, port, found)) for rank in range(3)]
    for process in processes:
        process.start()
    results = [found.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    for result in results:
        assert result == pytest.approx({k: plain_knn(*bank, *queries, k) for k in KS})


# -- the program ---------------------------------------------------------------------------


def expected_of(root):
    """The accuracy by timm's class tokens of the folder, for each k; of the images to read."""
    of_split = {}
    for split in ("train", "val"):
        paths = sorted(path for path in (root / split).glob("*/*") if path.stem != "broken")
        tokens = tokens_of(backbone(), paths)[:, 0].numpy()
        of_split[split] = tokens, np.array([int(path.parent.name) for path in paths])
    ks = dict.fromkeys(min(k, TRAIN) for k in KS)
    return {k: plain_knn(*of_split["train"], *of_split["val"], k) for k in ks}


@pytest.mark.parametrize(
    "form",
    ["FSDP2, two processes", *map(long, ("SPMD, one device", "SPMD, four devices", "nested"))],
)
def test_eval_only_knn(form, images, weights):  # noqa: F811
    """On each form what the plain vote over timm's features finds; a broken image is left out."""
    if "FSDP2" not in form:
        need_xla()
    command = ["--eval_only", "--knn", "--json", *FLAGS, *LOADER, *FORMS[form]]
    command += ["--init_from", weights, "--data_dir", images]
    done = run_program(
        "run_vit_training.py", *map(str, command), processes=2 if "two" in form else 1
    )
    assert done.returncode == 0, done.stderr
    assert "broken.png" in done.stderr
    expected = {f"val_knn_{k}": top1 for k, top1 in expected_of(images).items()}
    assert json.loads(done.stdout) == pytest.approx(expected)
    assert len(expected) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--knn", "--knn requires --eval_only"),
        ("--eval_only --knn --eval_report x", "is incompatible with --eval_report x: drop one"),
        ("--eval_only --knn --mesh_tensor 2", "incompatible with --mesh_tensor 2: drop one"),
        ("--eval_only --knn --fake_data", "--knn requires images: --fake_data has none"),
        ("--fake_data --knn_every 2", "--knn_every requires images: --fake_data has none"),
        ("--knn_every 2 --mesh_domain 2", "is incompatible with --mesh_domain 2: drop one"),
        ("--knn_every -1", "must be at least 0"),
    ],
)
def test_mistakes_are_told_in_one_line(flags, message, weights, tmp_path, capsys):  # noqa: F811
    words = ["--backend", "cuda", *FLAGS, *LOADER, "--ckpt_dir", tmp_path / "x"]
    words += ["--init_from", weights] if "fake" in flags and "eval" in flags else []
    assert message in told_in_one_line(capsys, *words, *flags.split())
    assert list(tmp_path.iterdir()) == []


EVERY = "--knn_every 2 --max_steps 5 --batch_size 64 --global_pool avg --model_ema".split()


def check_training(result, tmp_path, capsys):
    """Three evaluations, of the EMA, in all records; and the last is --eval_only's."""
    found = [record for record in result.records if "val_knn_10" in record]
    assert [record["step"] for record in found] == [2, 4, 5]
    lines = re.findall(r"^epoch 1 step (\d), k-NN on val: ([\d.]+) % \(k 10\)", result.stdout, re.M)
    assert lines == [(str(each["step"]), f"{each['val_knn_10']:.2f}") for each in found]
    events = next((result.ckpt_dir / "tensorboard").iterdir()).read_bytes()
    # A tag, and what starts its value: knn_10 is the beginning of knn_100.
    assert [events.count(f"val/knn_{k}\x15".encode()) for k in KS] == [3] * 4
    last = str(result.ckpt_dir / "step_5")
    how = ["--backend", "cuda", "--resume", last, "--use_ema", "--data_dir", str(DIGITS)]
    how += ["--batch_size", "64", "--num_workers", "0"]
    assert run_vit_training.main([*how, "--eval_only", "--knn", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == pytest.approx({f"val_knn_{k}": found[-1][f"val_knn_{k}"] for k in KS}, abs=0.3)
    out = tmp_path / "out"
    assert run_vit_training.main([*how, "--features", str(out)]) == 0
    capsys.readouterr()
    of_split = {split: read(out, split) for split in ("train", "val")}
    parts = [
        np.array(of_split[split][name]) for split in ("train", "val") for name in ("mean", "label")
    ]
    for k in KS:
        assert again[f"val_knn_{k}"] == pytest.approx(plain_knn(*parts, k), abs=0.3)


@pytest.mark.long
def test_knn_while_it_trains_on_xla(tmp_path, capsys):
    """One compilation more at the first one, and none afterwards."""
    result = train_tiny(tmp_path / "run", *EVERY, "--test_epoch_interval", "99", devices=4)
    compilations = result.column("compilations")
    assert compilations[1] + 1 == compilations[2] == compilations[4]
    check_training(result, tmp_path, capsys)


def test_knn_while_it_trains(tmp_path, capsys):
    check_training(train_tiny_gpu(tmp_path / "run", *EVERY), tmp_path, capsys)


@pytest.mark.long
def test_knn_changes_no_step(tmp_path):
    one, other = (
        train_tiny_gpu(tmp_path / every, *EVERY, "--knn_every", every, processes=2)
        for every in ("2", "0")
    )
    assert one.column("loss") == other.column("loss")
    losses = ([each["val_loss"] for each in result.evaluations] for result in (one, other))
    assert next(losses) == next(losses)
