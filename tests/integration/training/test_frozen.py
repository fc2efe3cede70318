"""Frozen features by k-NN and linear probes, alone and in training, against plain references."""

import contextlib
import io
import json
import multiprocessing
import shutil
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import run_vit_training
from tests.support.cli import DIGITS, train_tiny, train_tiny_gpu
from tests.support.features import FLAGS, TRAIN, backbone, read, run_form, tokens_of
from training.evaluation import knn_and_probe
from training.evaluation import rank as rank_module
from training.evaluation.knn_and_probe import RATES, Labelled, batches_of, knn, probe, random_order
from training.evaluation.rank import rank

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


def labelled(features, labels, first=0, count=None):
    """Images of a split of so many, from the number ``first`` on."""
    numbers = torch.arange(first, first + len(labels))
    count = len(labels) if count is None else count
    return Labelled(numbers, torch.from_numpy(features), torch.from_numpy(labels), count)


def measured(bank, queries):
    return knn(labelled(*bank), labelled(*queries))


def test_vote_is_the_plain_one(monkeypatch):
    bank, queries = made(300, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    expected = {k: plain_knn(*bank, *queries, k) for k in KS}
    assert 20 < min(expected.values()) < max(expected.values()) < 95
    for similarities in (2**25, 300 * 8, 1):
        monkeypatch.setattr(knn_and_probe, "_SIMILARITIES", similarities)
        found = measured(bank, queries)
        assert found.top1 == pytest.approx(expected)
        assert (found.images, found.bank) == (90, 300)


def test_edges():
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


def plain_probe(train, val, rate, seed):
    """The percentage that nn.Linear names right, trained by torch.optim.SGD, from zeros."""
    (x, y), (asked, labels) = ([torch.from_numpy(each) for each in split] for split in (train, val))
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    x, asked = (x - mean) / deviation, (asked - mean) / deviation
    linear = torch.nn.Linear(x.shape[1], 1 + int(y.max()))
    torch.nn.init.zeros_(linear.weight), torch.nn.init.zeros_(linear.bias)
    size, steps = batches_of(len(x))
    optimizer = torch.optim.SGD(linear.parameters(), rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    epoch, done = 0, 0
    while done < steps:
        for places in random_order(seed, epoch, len(x)).split(size)[: steps - done]:
            optimizer.zero_grad()
            F.cross_entropy(linear(x[places]), y[places]).backward()
            optimizer.step(), schedule.step()
            done += 1
        epoch += 1
    return 100 * (linear(asked).argmax(dim=1) == labels).float().mean().item()


def test_probes_are_plain_ones(monkeypatch):
    monkeypatch.setattr(knn_and_probe, "BATCH_SIZE", 64)
    monkeypatch.setattr(knn_and_probe, "LEAST_STEPS", 60)
    train, val = made(150, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    found = probe(labelled(*train), labelled(*val), seed=3)
    assert [*found.top1] == [*RATES]
    for rate, top1 in found.top1.items():
        assert top1 == pytest.approx(plain_probe(train, val, rate, 3), abs=100 / 90 + 0.01)
    assert found.top1[found.best] == max(found.top1.values()) > 30
    assert found.top1[RATES[0]] < found.top1[found.best]
    assert (found.images, found.trained_on) == (90, 150)
    assert probe(labelled(*train), labelled(*val), seed=3) == found
    assert not random_order(3, 0, 150).equal(random_order(4, 0, 150))


def test_probes_of_clusters_and_edges(monkeypatch):
    monkeypatch.setattr(knn_and_probe, "LEAST_STEPS", 100)
    train, val = made(200, 10, 1, spread=0.01), made(50, 10, 2, spread=0.01)
    constant = [
        np.concatenate([each[0], np.ones((len(each[0]), 1), np.float32)], 1)
        for each in (train, val)
    ]
    found = probe(labelled(constant[0], train[1]), labelled(constant[1], val[1]), seed=0)
    assert found.top1[found.best] == 100
    one = probe(labelled(train[0], 0 * train[1]), labelled(val[0], 0 * val[1]), seed=0)
    assert set(one.top1.values()) == {100}
    single = probe(labelled(train[0][:1], train[1][:1]), labelled(*val), seed=0)
    assert single.top1[single.best] <= 100
    huge = probe(labelled(train[0] * 1e30, train[1]), labelled(*val), seed=0)
    assert not any(np.isnan(each) for each in huge.top1.values())
    none = probe(labelled(train[0][:0], train[1][:0]), labelled(*val), seed=0)
    assert none.top1 == {} == none.values


def plain_rank(features):
    """RankMe (arXiv 2210.02885, equation 1), and the deviation of features of length 1, times the
    root of the width, in NumPy by a singular value decomposition."""
    singular = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    rankme = np.exp(-np.sum(shares * np.log(shares)))
    return rankme, units.std(axis=0).mean() * units.shape[1] ** 0.5


def low_rank(count, directions, noise=0.0):
    random = np.random.default_rng(3)
    values = random.normal(size=(count, directions)) @ random.normal(size=(directions, 24)) + 0.5
    return (values + noise * random.normal(size=(count, 24))).astype(np.float32)


@pytest.mark.parametrize(
    "features", [low_rank(300, 24), low_rank(300, 3), low_rank(10, 24), low_rank(300, 1, 1e-3)]
)
def test_rank_is_the_plain_one(features, monkeypatch):
    monkeypatch.setattr(rank_module, "_PART", 128)
    rankme, std = plain_rank(features)
    found = rank(torch.from_numpy(features))
    assert found.rankme == pytest.approx(rankme, rel=1e-3)
    assert found.std == pytest.approx(std, rel=1e-5)
    assert (found.images, found.width) == (len(features), 24)


def test_rank_at_the_edges():
    same = rank(torch.ones(50, 24))
    assert same.values == pytest.approx({"train_rankme": 1.0, "train_feature_std": 0.0}, abs=1e-4)
    evenly = rank(torch.eye(24).repeat(10, 1) * torch.randn(240, 1).sign())
    assert evenly.rankme == pytest.approx(24, abs=1e-3)
    assert rank(torch.zeros(50, 24)).rankme == pytest.approx(1.0, abs=1e-3)
    assert rank(torch.randn(1, 24)).rankme == pytest.approx(1.0)
    assert rank(torch.zeros(0, 24)).values == {}
    assert rank(torch.full((5, 24), torch.nan)).values == {}


def _one_of(process, port, found):
    """A process's part: sizes differ, and one has no training image."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=process, world_size=3)
    bank, queries = made(300, 7, 1, spread=3.0), made(90, 7, 2, spread=3.0)
    of_bank, of_queries = ((0, 50), (50, 300), (300, 300)), ((0, 7), (7, 7), (7, 90))
    knn_and_probe._SIMILARITIES = 250 * 16
    parts = [
        labelled(
            *(each[slice(*where[process])] for each in whole), where[process][0], len(whole[0])
        )
        for whole, where in ((bank, of_bank), (queries, of_queries))
    ]
    found.put((knn(*parts).top1, probe(*parts, seed=3).top1, rank(parts[0].features).rankme))
    dist.destroy_process_group()


@pytest.mark.long
def test_hosts_find_what_one_finds():
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
    alone = probe(labelled(*bank), labelled(*queries), seed=3).top1
    for by_knn, by_probe, rankme in results:
        assert rankme == pytest.approx(plain_rank(bank[0])[0], rel=1e-5)
        assert by_knn == pytest.approx({k: plain_knn(*bank, *queries, k) for k in KS})
        assert by_probe == pytest.approx(alone, abs=100 / 90 + 0.01)


# -- the program ---------------------------------------------------------------------------


def expected_of(root):
    """The accuracy by timm's class tokens of the folder, for each k, and the effective rank of the
    training images' tokens; of the images to read."""
    of_split = {}
    for split in ("train", "val"):
        paths = sorted(path for path in (root / split).glob("*/*") if path.stem != "broken")
        tokens = tokens_of(backbone(), paths)[:, 0].numpy()
        of_split[split] = tokens, np.array([int(path.parent.name) for path in paths])
    ks = dict.fromkeys(min(k, TRAIN) for k in KS)
    accuracy = {f"val_knn_{k}": plain_knn(*of_split["train"], *of_split["val"], k) for k in ks}
    rankme, std = plain_rank(of_split["train"][0])
    return accuracy | {"train_rankme": rankme, "train_feature_std": std}


def test_eval_only(images, weights):
    asked = ("--eval_only", "--knn", "--probe", "--rank", "--json", "--init_from", weights)
    done = run_form("FSDP2, two processes", *asked, *FLAGS, "--data_dir", images)
    assert "broken.png" in done.stderr
    expected = expected_of(images)
    found = json.loads(done.stdout)
    assert found.pop("val_probe_lr") in RATES
    assert 10 < found.pop("val_probe") <= 100
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(expected) == 5


def test_rank_of_images_without_labels(weights, tmp_path, monkeypatch):
    """Of a few of them, spread over all, which lie in no class folders; there is no val/."""
    (tmp_path / "data" / "train").mkdir(parents=True)
    paths = sorted((DIGITS / "train").glob("*/*"))[::18]
    for number, path in enumerate(paths):
        shutil.copy(path, tmp_path / "data" / "train" / f"{number:03}.png")
    monkeypatch.setattr(knn_and_probe, "MOST_IMAGES", 40)
    asked = ["--eval_only", "--rank", "--json", "--init_from", str(weights), *FLAGS]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        data = ["--backend", "cuda", "--data_dir", str(tmp_path / "data")]
        assert run_vit_training.main([*asked, *data]) == 0
    some = [paths[place * len(paths) // 40] for place in range(40)]
    rankme, std = plain_rank(tokens_of(backbone(), some)[:, 0].numpy())
    expected = {"train_rankme": rankme, "train_feature_std": std}
    assert json.loads(out.getvalue()) == pytest.approx(expected, rel=1e-4)


EVERY = "--knn_every 2 --probe_every 4 --rank_every 2 --max_steps 5 --batch_size 64".split()
EVERY.append("--model_ema")


def check_training(result, tmp_path, capsys):
    """Three evaluations, of the EMA, in all records; and the last is --eval_only's."""
    found = [record for record in result.records if "val_knn_10" in record]
    assert [record["step"] for record in found] == [2, 4, 5]
    events = next((result.ckpt_dir / "tensorboard").iterdir()).read_bytes()
    # A tag, and what starts its value: knn_10 is the beginning of knn_100.
    assert [events.count(f"val/knn_{k}\x15".encode()) for k in KS] == [3] * 4
    assert events.count(b"val/probe\x15") == 2
    ranks = [record for record in result.records if "train_rankme" in record]
    assert [record["step"] for record in ranks] == [2, 4, 5]
    assert events.count(b"train/rankme\x15") == 3
    probes = [record for record in result.records if "val_probe" in record]
    assert [record["step"] for record in probes] == [4, 5]
    last = str(result.ckpt_dir / "step_5")
    how = ["--backend", "cuda", "--resume", last, "--use_ema", "--data_dir", str(DIGITS)]
    how += ["--batch_size", "64", "--num_workers", "0"]
    assert run_vit_training.main([*how, "--eval_only", "--knn", "--probe", "--rank", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("train_rankme", "train_feature_std"):
        assert again.pop(name) == pytest.approx(ranks[-1][name], rel=1e-4)
    assert again.pop("val_probe_lr") in RATES
    assert again.pop("val_probe") == pytest.approx(probes[-1]["val_probe"], abs=1.5)
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
def test_while_it_trains_on_xla(tmp_path, capsys):
    result = train_tiny(tmp_path / "run", *EVERY, "--test_epoch_interval", "99", devices=4)
    compilations = result.column("compilations")
    assert compilations[1] + 1 == compilations[2] == compilations[4]
    check_training(result, tmp_path, capsys)


@pytest.mark.long
def test_what_a_kill_has_left_out_is_made_up(tmp_path):
    flags = "--knn_every 2 --probe_every 2 --max_steps 2 --batch_size 64".split()
    first = train_tiny_gpu(tmp_path / "run", *flags)
    whole = first.records
    frozen = [each for each in whole if "val_knn_10" in each or "val_probe" in each]
    assert len(frozen) == 2
    metrics = first.ckpt_dir / "metrics.jsonl"
    for left_out in (frozen, frozen[1:], []):
        lines = [json.dumps(each) + "\n" for each in whole if each not in left_out]
        metrics.write_text("".join(lines))
        again = train_tiny_gpu(tmp_path / "run", *flags)
        assert again.records == whole
        assert again.stdout.count("k-NN on val") == (left_out == frozen)
        assert again.stdout.count("linear probe on val") == (left_out != [])
