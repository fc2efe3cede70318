"""Images in folders, at URLs and in tar shards: all of them give the same, from one index."""

import itertools
import json
import multiprocessing
import shutil
import sys

import fsspec
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save
from torchvision.datasets import ImageFolder

from data import files, index, index_file
from data.batch import BatchShard
from data.files import BrokenImageError, DataFolderError
from data.open import open_data
from data.pack import pack
from models.config import VitConfig
from tests.support.cli import DIGITS, VAL_IMAGES, run_program, train_tiny, train_tiny_gpu
from tests.support.hostile import damaged
from tests.support.loading import (
    arguments,
    check_same,
    check_same_epochs,
    concatenated,
    loaders,
    wanted,
)
from tests.support.memory_files import in_memory, settle
from tests.support.usage_error import told_in_one_line

MODEL = VitConfig(img_size=16, patch_size=4, num_classes=3)
STEP = 4  # between the greys of one image and the next
TRAIN, VAL = 53, 17


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Grey images in folders below 3 classes; their grey is their place in the order."""
    root = tmp_path_factory.mktemp("tree")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            folder = root / split / "abc"[3 * number // count] / "xy"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16)).save(folder / f"{number:03}.png")
        for number, (path, _) in enumerate(ImageFolder(str(root / split)).samples):
            Image.new("L", (16, 16), STEP * number).save(path)
    settle(root)
    return root


@pytest.fixture(scope="module")
def sources(tree, tmp_path_factory):
    """The flags of each source of the same images."""
    made = tmp_path_factory.mktemp("made")
    pack(str(tree), str(made / "shards"), 12_000, 2)
    index = str(made / "index")
    shards = {"data_source": "webdataset", "index_dir": index}
    return {
        "folder": {"data_dir": tree},
        "kept folder": {"data_dir": tree, "index_dir": index},
        "URL": {"data_dir": in_memory(tree), "index_dir": index},
        "shards": {"data_dir": made / "shards", **shards},
        "shards at a URL": {"data_dir": in_memory(made / "shards"), **shards},
    }


def numbers(images):
    """Which images these are."""
    return [round(grey / STEP) for grey in images.float().mean(dim=(1, 2, 3)).tolist()]


SOURCES = ["folder", "kept folder", "URL", "shards", "shards at a URL"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("world", "workers", "batch", "first"), [(1, 0, 10, 0), (2, 1, 12, 3), (3, 2, 9, 1)]
)
def test_every_image_once_an_epoch(source, world, workers, batch, first, sources, tree):
    config = arguments(batch_size=batch, num_workers=workers, **sources[source])
    alone = arguments(batch_size=batch, num_workers=0, data_dir=tree)
    for which, split in enumerate(("train", "val")):
        labels_of = [label for _, label in ImageFolder(str(tree / split)).samples]
        shares = [loaders(config, BatchShard(rank, world), MODEL)[which] for rank in range(world)]
        parts = [list(loader.epoch(2, first)) for loader in shares]
        joined = [concatenated(part) for part in zip(*parts, strict=True)]
        whole = list(loaders(alone, model=MODEL)[which].epoch(2))
        seen = [
            number
            for each in [*whole[:first], *joined]
            for number, label in zip(numbers(each["image"]), each["target"].tolist(), strict=True)
            if label >= 0 and label == labels_of[number]
        ]
        assert len(seen) == len(set(seen)) == (TRAIN // batch * batch if which == 0 else VAL)
        check_same_epochs(joined, whole[first:])


# -- the index ------------------------------------------------------------------------


@pytest.fixture
def copy(tree, tmp_path, monkeypatch):
    """A copy of the tree to be changed, whose index is saved like that of a large one."""
    monkeypatch.setattr(index_file, "MIN_IMAGES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = shutil.copytree(tree, tmp_path / "copy")
    settle(root)
    return root


def opened(capsys, root, **flags):
    """A source's sizes, and what is said of its indices."""
    source = open_data(wanted(arguments(root, batch_size=1, **flags), MODEL))
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(("note: the index of ", "warning: the index of ")) for line in lines)
    of_train = [line.partition("/train ")[2] for line in lines if "/train " in line]
    return (source.train_length, source.val_length), of_train


def test_the_index_is_read_as_long_as_it_is_right(copy, capsys, monkeypatch):
    sizes, (said,) = opened(capsys, copy)
    assert sizes == (TRAIN, VAL)
    assert said.endswith(f"s and saved as {copy}/.vit_fsdp_index/train-of-folder")
    with monkeypatch.context() as patch:
        patch.setattr(index, "index_split", None)
        assert opened(capsys, copy) == (sizes, [])


def test_changes_of_the_tree(copy, capsys):
    train = copy / "train"
    opened(capsys, copy)
    shutil.copy(train / "a/x/000.png", train / "a/x/new.png")
    sizes, (why,) = opened(capsys, copy)
    assert sizes == (TRAIN + 1, VAL)
    assert why == f"is being rebuilt: {train}/a/x has changed"
    assert opened(capsys, copy)[1] == [why]  # a file might have been added since, unseen
    settle(copy)
    assert len(opened(capsys, copy)[1]) == 2
    (train / "a/x/new.png").rename(train / "b/x/new.png")
    assert opened(capsys, copy)[0] == (TRAIN + 1, VAL)
    settle(copy)
    opened(capsys, copy)
    elsewhere = shutil.copytree(train / "c", copy / "elsewhere")
    for split in ("train", "val"):
        (copy / split / "c").rename(copy / f"away-{split}")
        (copy / split / "c").symlink_to(elsewhere)
    settle(copy)
    opened(capsys, copy)
    (elsewhere / "y" / "more.png").write_bytes((elsewhere / "x" / "036.png").read_bytes())
    sizes, (why,) = opened(capsys, copy)
    assert sizes[0] == TRAIN + 2
    assert why == f"is being rebuilt: {train}/c/y has changed"


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


def with_info(name, value):
    """Change what an index says of itself, with the right checksum."""

    def spoil(path):
        with safe_open(path, "numpy") as file:
            info = json.loads(file.metadata()["info"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del info["checksum"]
        info[name] = value
        info["checksum"] = index_file._checksum(arrays, info)
        path.write_bytes(save(arrays, {"info": json.dumps(info)}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (with_info("left_out", {".txt": "many"}), "its left_out is invalid"),
        (with_info("left_out", [1, 2]), "its left_out is invalid"),
        (with_info("classes", [1, 2, 3]), "its classes is invalid"),
        (with_info("names", "abc"), "its names is invalid"),
        (with_info("built", "today"), "its built is invalid"),
        (cut, "Error while deserializing header: "),
        (flip, "its checksum does not match"),
        (lambda path: path.write_bytes(b""), "Error while deserializing header: "),
        (lambda path: path.write_bytes(b"{}" * 100), "Error while deserializing header: "),
        (lambda path: path.write_bytes(save({}, {"info": "[" * 10**5})), "it is nested too deeply"),
        (lambda path: path.write_bytes(save({}, {"info": "3"})), "it is not a JSON object"),
    ],
)
@pytest.mark.parametrize("source", ["kept folder", "shards"])
def test_a_spoilt_index_is_made_anew(source, spoil, why, sources, tmp_path, capsys):
    flags = {**sources[source], "index_dir": str(tmp_path), "batch_size": 1}
    config = arguments(**flags)
    before = open_data(wanted(config, MODEL)).fingerprint()
    (path,) = tmp_path.glob("train-of-*")
    spoil(path)
    capsys.readouterr()
    assert open_data(wanted(config, MODEL)).fingerprint() == before
    first, second = capsys.readouterr().err.splitlines()
    assert f"is being rebuilt: {why}" in first
    assert second.endswith(f"and saved as {path}")
    open_data(wanted(config, MODEL))
    assert capsys.readouterr().err == ""
    again = arguments(**flags, rebuild_index=True)
    assert open_data(wanted(again, MODEL)).fingerprint() == before
    assert capsys.readouterr().err.count("is being rebuilt: --rebuild_index") == 2


def test_an_index_damaged_at_random(sources, tmp_path, capsys):
    config = arguments(**{**sources["kept folder"], "index_dir": str(tmp_path)}, batch_size=1)
    before = open_data(wanted(config, MODEL)).fingerprint()
    (path,) = tmp_path.glob("train-of-*")
    whole = path.read_bytes()
    for content in damaged(whole, 0, 100):
        path.write_bytes(content)
        assert open_data(wanted(config, MODEL)).fingerprint() == before


def test_where_the_index_is_kept(copy, capsys, tmp_path):
    (copy / ".vit_fsdp_index").touch()
    (said,) = opened(capsys, copy)[1]
    assert f"saved as {tmp_path}/cache/vit_fsdp/train-of-folder-" in said
    assert opened(capsys, copy)[1] == []
    (tmp_path / "file").touch()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    sizes, (said,) = opened(capsys, copy)
    assert sizes == (TRAIN, VAL)
    assert said.startswith("cannot be saved (Not a directory")
    with pytest.raises(DataFolderError, match=r"^--index_dir \S+/file cannot be used: "):
        opened(capsys, copy, index_dir=str(tmp_path / "file"))
    (said,) = opened(capsys, copy, index_dir=str(tmp_path / "new"))[1]
    assert f"saved as {tmp_path}/new/train-of-folder-" in said


def test_a_new_host_reads_the_index_beside_the_images(copy, capsys, tmp_path, monkeypatch):
    """Of images at a URL: as after a preemption, on a slice without its old disks."""
    url = in_memory(copy)
    shared, cache = f"{url}/.vit_fsdp_index/train-of-folder", tmp_path / "cache"
    sizes, (said,) = opened(capsys, url)
    assert f"saved as {cache}/vit_fsdp/train-of-folder-" in said
    assert said.endswith(f" and {shared}")
    system, name = fsspec.core.url_to_fs(shared)
    whole = system.cat_file(name)
    shutil.rmtree(cache)
    with monkeypatch.context() as patch:
        patch.setattr(index, "index_split", None)
        assert opened(capsys, url) == (sizes, [])
    for content, why in (
        (whole[:-5], "is being rebuilt: Error while deserializing header: "),
        (save({}, {"info": "[" * 10**5}), "is being rebuilt: it is nested too deeply"),
    ):
        shutil.rmtree(cache)
        system.pipe_file(name, content)
        assert opened(capsys, url)[1][0].startswith(why)
        # But for the digits of the time at which it was built.
        assert abs(len(system.cat_file(name)) - len(whole)) <= 8
    assert opened(capsys, url, rebuild_index=True)[1][0] == "is being rebuilt: --rebuild_index"

    system.rm(name)
    shutil.rmtree(cache)
    no_put = DataFolderError(f"{shared} cannot be written: forbidden")
    monkeypatch.setattr(files, "put", lambda *_: (_ for _ in ()).throw(no_put))
    said = opened(capsys, url)[1][0]
    assert said.endswith(f"; each new host builds it again: {no_put}")
    assert opened(capsys, url) == (sizes, [])


def fingerprint_of(queue, config):
    queue.put(open_data(wanted(config, MODEL)).fingerprint())


def test_processes_that_begin_at_once(sources, tmp_path, capfd):
    """One lists, the others read what it has found; nothing but the two indices is left."""
    config = arguments(**sources["kept folder"] | {"index_dir": str(tmp_path)}, batch_size=1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=fingerprint_of, args=(queue, config)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert found == [open_data(wanted(config, MODEL)).fingerprint()] * 6
    assert len(capfd.readouterr().err.splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 2


# -- URLs -----------------------------------------------------------------------------


def test_reading_is_tried_again(sources, monkeypatch):
    monkeypatch.setattr(files, "RETRY_WAITS_S", (0.0, 0.0, 0.0))
    config = arguments(**sources["URL"], batch_size=10, num_workers=0)
    whole = [list(loader.epoch(0)) for loader in loaders(config, model=MODEL)]
    read = type(fsspec.filesystem("memory")).cat_file
    tries = itertools.count()

    def unreliable(self, path, start=None, end=None, **more):
        if path.endswith("/000.png"):
            raise ConnectionError("no answer")
        if next(tries) % 4:
            raise TimeoutError
        return read(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", unreliable)
    train, val = loaders(config, model=MODEL)
    batches = list(train.epoch(0))
    pairs = zip(batches, whole[0], strict=True)
    assert sum(not here["image"].equal(there["image"]) for here, there in pairs) < 2
    (first, *_), (expected, *_) = val.epoch(0), whole[1]
    assert first["target"][0] == first["index"][0] == -1
    check_same(*({name: values[1:] for name, values in each.items()} for each in (first, expected)))
    ((name, reason, _),) = val.bad_images()
    assert (name, reason) == (f"{config.data_dir}/val/a/x/000.png", "no answer")
    with pytest.raises(BrokenImageError, match="No such file"):
        files.read_bytes(f"{config.data_dir}/nowhere.png")


def test_urls_that_cannot_be_used(capsys, monkeypatch, sources):
    monkeypatch.setitem(sys.modules, "gcsfs", None)

    def told(*flags):
        return told_in_one_line(
            capsys, *"--image_size 16 --patch_size 4 --num_classes 3".split(), *flags
        )

    for source in ("folder", "webdataset"):
        line = told("--data_source", source, "--data_dir", "gs://bucket/imagenet")
        assert line.endswith(": requires the package gcsfs: python3 -m pip install gcsfs")
    line = told("--data_dir", "nowhere://bucket/imagenet")
    assert line.endswith(": fsspec does not support nowhere:// URLs")
    line = told("--data_dir", "memory://no/such")
    assert "memory://no/such/train does not exist: --data_dir requires train/<class>/*" in line
    line = told("--data_dir", sources["URL"]["data_dir"], "--data_source", "volumes")
    assert "--data_source volumes reads parts of files" in line


# -- real command lines ---------------------------------------------------------------


def test_large_images_are_read_without_warnings(tmp_path):
    Image.new("L", (40, 30)).save(tmp_path / "large.png")
    code = (
        "import sys; from PIL import Image; from data.decode import read_image\n"
        "Image.MAX_IMAGE_PIXELS = 1000; print(read_image(sys.argv[1]).size)"
    )
    done = run_program("-c", code, str(tmp_path / "large.png"))
    assert (done.stdout, done.stderr) == ("(40, 30)\n", "")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "digits"
    pack(str(DIGITS), str(target), 400_000, 2)
    return target


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "how"), [(train_tiny, {"devices": 2}), (train_tiny_gpu, {"processes": 2})]
)
def test_the_same_training_from_any_source(train, how, shards, tmp_path):
    index = ["--index_dir", str(tmp_path / "index")]
    url = ["--data_dir", f"file://{DIGITS}", "--num_workers", "2", "--max_steps", "3", *index]
    tars = ["--data_source", "webdataset", "--data_dir", str(shards), *index]
    folder = train(tmp_path / "folder", **how)
    stopped = train(tmp_path / "run", *url, **how)
    resumed = train(stopped.ckpt_dir, *tars, **how)
    assert list(resumed.steps) == list(folder.steps) == [1, 2, 3, 4, 5, 6]
    assert resumed.column("loss") == folder.column("loss")
    assert resumed.evaluations[-1]["val_images"] == VAL_IMAGES
    assert (stopped.stderr + resumed.stderr).count("and saved as") == 4
    again = train(stopped.ckpt_dir, *tars, **how)
    assert "and saved as" not in again.stderr
