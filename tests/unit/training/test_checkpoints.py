"""Checkpoint folders: what counts as one, what is refused, what is kept, who may write."""

import argparse
import enum
import io
import json
import os
import pickle
import re
import shutil
import socket

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.support.checkpoints import (
    OneWeight,
    candidates,
    flip,
    left,
    save_state,
    truncate,
    write_checkpoint,
)
from training.checkpoints import inventory
from training.checkpoints.choose import AllDamaged
from training.checkpoints.format import (
    SafeReader,
    checksum,
    damage,
    entries,
    quick_problem,
    quiet_dcp,
    read_manifest,
    read_metadata,
    read_saved_run,
    training_tensors,
    write_manifest,
)
from training.checkpoints.inventory import (
    complete_checkpoints,
    retry_while_error_changes,
    step_folders,
)
from training.checkpoints.removal import clear, later_checkpoints, prune, set_aside
from training.checkpoints.state import load_state, write_state
from training.errors import UsageError
from training.schedule import Position
from training.weights.files import load_tensors, run_as_metadata
from training.weights.find import find

pytestmark = pytest.mark.fast


def of_an_earlier_version(ckpt_dir, step):
    folder = ckpt_dir / f"step_{step}"
    training = training_tensors(Position(step, 0, 0), {"batch_size": 1}, None)
    del training["format"]
    with quiet_dcp():
        state = {"model": {"w": torch.ones(3)}, "training": training}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


# -- the state of a backend -----------------------------------------------------------


def test_the_names_of_what_is_written(tmp_path):
    save_state(OneWeight(1.0, ["scale"]), tmp_path, {"step": torch.tensor(7)})
    assert set(read_metadata(tmp_path).state_dict_metadata) == {
        "model.a.w",
        "optimizer.state.a.w.step",
        "optimizer.state.a.w.exp_avg",
        "optimizer.state.a.w.exp_avg_sq",
        "training.step",
        "training.scale",
        "training.rng",
    }


def test_state_comes_back(tmp_path):
    torch.manual_seed(3)
    save_state(OneWeight(1.0, ["scale"]), tmp_path, {})
    drawn = torch.rand(())
    backend = OneWeight(2.0, ["scale", "of a later version"])
    load_state(backend, tmp_path)
    assert torch.rand(()) == drawn
    assert (backend.taken.model["a.w"] == 1).all()
    assert all((value == 1).all() for value in backend.taken.optimizer["a.w"].values())
    assert backend.taken.step == {"scale": torch.tensor(1.0)}


def test_weights_alone_come_back(tmp_path):
    save_state(OneWeight(1.0, ["scale"]), tmp_path, {})
    torch.manual_seed(4)
    drawn = torch.rand(())
    torch.manual_seed(4)
    backend = OneWeight(2.0, ["scale"])
    load_state(backend, tmp_path, with_optimizer=False)
    assert torch.rand(()) == drawn
    assert (backend.taken.model["a.w"] == 1).all()
    assert backend.taken.optimizer is None


# -- nothing is run by loading --------------------------------------------------------


def test_metadata_cannot_run_code(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'attacked'}",)

    for payload in (Attack(), {"state_dict_metadata": Attack()}):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(payload))
        with pytest.raises(pickle.UnpicklingError, match="is not allowed in a checkpoint"):
            SafeReader(tmp_path).read_metadata()
    for module, name in (
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("pathlib", "os.system"),
        ("builtins", "eval"),
    ):
        (tmp_path / ".metadata").write_bytes(
            f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93.".encode(
                "latin1"
            )
        )
        with pytest.raises(pickle.UnpicklingError, match="is not allowed in a checkpoint"):
            SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "attacked").exists()


class AsPython3112:
    """Pickled as Python 3.11.2 pickles a member of an Enum: by a call of ``getattr``."""

    def __init__(self, owner, name):
        self.call = owner, name

    def __reduce__(self):
        return getattr, self.call


class MetadataPickler(pickle.Pickler):
    """Pickles DCP's metadata as Python 3.11.2, and with the paths of Python 3.13."""

    def reducer_override(self, value):
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (_MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_metadata_of_other_versions_of_python(tmp_path):
    folder = write_checkpoint(tmp_path, 3, manifest=False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    written = io.BytesIO()
    MetadataPickler(written, protocol=4).dump(metadata)
    assert b"getattr" in written.getvalue()
    assert b"\x8c\x07pathlib" in written.getvalue()
    of_3_13 = written.getvalue().replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    for content in (written.getvalue(), unframed(of_3_13)):
        (folder / ".metadata").write_bytes(content)
        assert read_metadata(folder) == metadata
        assert read_saved_run(folder).position.step == 3


def unframed(content):
    """A pickle without its frames, whose sizes are of the original content."""
    return re.sub(rb"\x95.{8}", b"", content, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__subclasses__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (_MEM_FORMAT_ENCODING, "_member_map_"),
        (_MEM_FORMAT_ENCODING, "nothing"),
        (_MEM_FORMAT_ENCODING, ["TORCH_CHANNELS_LAST"]),
        (_MEM_FORMAT_ENCODING, AsPython3112(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")),
        (AsPython3112(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), "__class__"),
        (Metadata, "__init__"),
        (torch.Size, "__subclasses__"),
        (torch.float32, "__class__"),
        ("TORCH_CHANNELS_LAST", "join"),
    ],
)
def test_no_other_attribute_is_read(owner, name, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(AsPython3112(owner, name)))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.getattr is not allowed"):
        read_metadata(tmp_path)


class Color(enum.Enum):
    RED = 1


def test_a_file_of_weights_with_members_of_enums(tmp_path):
    """As their program's arguments; Python 3.11.2 pickles them by a call of ``getattr``."""
    for red in (Color.RED, AsPython3112(Color, "RED")):
        content = {"args": argparse.Namespace(color=red), "model": {"w": torch.ones(3)}}
        torch.save(content, tmp_path / "weights.pt")
        found = load_tensors(tmp_path / "weights.pt")
        assert torch.equal(found["model"]["w"], torch.ones(3))
        assert found["args"].color == {}


class Attack:
    """What DCP saves as bytes, and unpickles as it reads them."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("name", ["rng", "arguments", "extra"])
def test_an_entry_that_is_no_tensor_is_refused_before_anything_is_read(name, tmp_path):
    folder = tmp_path / "step_1"
    training = training_tensors(Position(1, 0, 1), {}, None) | {name: Attack(tmp_path / "attacked")}
    with quiet_dcp():
        dcp.save({"training": training}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    told = rf"training\.{name} is not a tensor|is a DCP folder of another program"
    with pytest.raises(UsageError, match=told):
        read_saved_run(folder)
    target = {"training": {name: torch.zeros(1)}}
    with quiet_dcp(), pytest.raises(dcp.CheckpointException):
        dcp.load(target, storage_reader=SafeReader(folder), no_dist=True)
    assert not (tmp_path / "attacked").exists()


def test_a_tensor_outside_of_the_folder_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    metadata = SafeReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match=r"elsewhere is not a file of the checkpoint"):
        read_saved_run(folder)


# -- complete, damaged ----------------------------------------------------------------


def test_complete_is_what_has_its_manifest(tmp_path):
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 10)
    of_an_earlier_version(tmp_path, 9)
    write_checkpoint(tmp_path, 11, manifest=False)
    (tmp_path / "step_12").mkdir()
    (tmp_path / "step_best").mkdir()
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_2", "step_9", "step_10"]
    assert candidates(tmp_path).paths[0].name == "step_10"
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_manifest_names_every_file_with_size_and_checksum(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    files = read_manifest(folder)
    assert set(files) == {".metadata", "__0_0.distcp"}
    for name, (size, digest) in files.items():
        assert size == (folder / name).stat().st_size
        content = (folder / name).read_bytes()
        assert digest == xxhash.xxh3_128(content).hexdigest() == checksum(folder / name)
    assert quick_problem(folder) is None
    assert damage(folder) is None


def test_a_part_that_another_disk_has_makes_no_complete_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 1, manifest=False)
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp is not in the folder"):
        write_manifest(folder, entries(folder, [".metadata"]))
    parts = entries(folder, [".metadata", "__0_0.distcp"])
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match="do all processes see the same one"):
        write_manifest(folder, parts)
    assert complete_checkpoints(tmp_path) == []


def lose(folder):
    (folder / "__0_0.distcp").unlink()


def garble_manifest(folder):
    (folder / "manifest.json").write_text('{"files": [')


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (truncate, "has 100 bytes, not "),
        (lose, "__0_0.distcp is missing"),
        (garble_manifest, "manifest.json is damaged"),
    ],
)
def test_damage_that_sizes_show_is_passed_over_and_named(harm, told, tmp_path):
    write_checkpoint(tmp_path, 5)
    harm(write_checkpoint(tmp_path, 10))
    found = candidates(tmp_path)
    assert [path.name for path in found.paths] == ["step_5"]
    (line,) = found.passed_over
    assert "step_10 is damaged" in line
    assert told in line
    with pytest.raises(UsageError, match="cannot read the checkpoint"):
        candidates(tmp_path, tmp_path / "step_10")


def test_names_that_the_program_does_not_write(tmp_path):
    write_checkpoint(tmp_path, 7)
    arabic = "step_\N{ARABIC-INDIC DIGIT SEVEN}"
    for name in ("step_007", "step_-1", arabic, "step_7 (copy)", "Step_7", "step_1e3", "step_"):
        (tmp_path / "step_7").rename(tmp_path / name)
        assert complete_checkpoints(tmp_path) == []
        (tmp_path / name).rename(tmp_path / "step_7")
    huge = tmp_path / f"step_{10**200}"
    (tmp_path / "step_7").rename(huge)
    with pytest.raises(UsageError, match="it contains step 7, not step 100"):
        candidates(tmp_path)


@pytest.mark.parametrize(
    "harm", ["a folder", "a pipe", "a socket", "a link to itself", "a file of a long name"]
)
def test_what_is_no_file_is_damage(harm, tmp_path):
    """And not a storage that does not answer, which would end each start."""
    write_checkpoint(tmp_path, 5)
    newest = write_checkpoint(tmp_path, 10)
    manifest, tensors = newest / "manifest.json", newest / "__0_0.distcp"
    if harm == "a link to itself":
        tensors.unlink()
        tensors.symlink_to(tensors)
    elif harm == "a file of a long name":
        content = json.loads(manifest.read_text())
        content["files"]["x" * 300] = [1, "0" * 32]
        manifest.write_text(json.dumps(content))
    else:
        manifest.unlink()
        if harm == "a folder":
            manifest.mkdir()
        elif harm == "a pipe":
            os.mkfifo(manifest)
        else:
            with socket.socket(socket.AF_UNIX) as bound, pytest.MonkeyPatch.context() as patch:
                patch.chdir(newest)  # a socket's path is short
                bound.bind("manifest.json")
    found = candidates(tmp_path)
    assert [path.name for path in found.paths] == ["step_5"]
    assert "step_10 is damaged" in found.passed_over[0]
    prune(tmp_path, 1, [])
    clear(tmp_path / "step_10")
    assert list((tmp_path / "step_10").iterdir()) == []


LIES = {
    "arguments": [
        *(["--lr"], "x", 3, None),
        *({"embed_dim": "x"}, {"depth": [1]}, {"depth": -1}, {"img_size": {}}, {"qk_norm": 3}),
        *({"objective": "x"}, {"objective": 1}, {"mlp_ratio": "4"}, {"decoder_depth": None}),
        *({"crop_sizes": [1, 2]}, {"global_crops_scale": [0.1]}, {"mask_ratio": float("nan")}),
        *({"class_order": ["sorted"]}, {"data_source": ["folder"]}),
    ],
    "classes": [[1, 2], "ab", {"a": 1}, [["a"]], 7],
    "order": [[1], "x", 3],
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_checkpoint_says_of_itself_may_be_anything(name, tmp_path):
    write_checkpoint(tmp_path, 5)
    texts = [json.dumps(value).encode() for value in LIES[name]]
    for text in (*texts, b"[" * 200_000, b'{"a":' * 200_000, b"\xff", b"{"):
        training = training_tensors(Position(10, 0, 0), {}, ["a"], {})
        training[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        shutil.rmtree(tmp_path / "step_10", ignore_errors=True)
        folder = tmp_path / "step_10"
        with quiet_dcp():
            writer = dcp.FileSystemWriter(folder)
            dcp.save({"training": training}, storage_writer=writer, no_dist=True)
        write_manifest(folder, entries(folder, [path.name for path in folder.iterdir()]))
        found = candidates(tmp_path)
        assert found.saved.path.name == "step_5", text[:100]
        assert found.passed_over[0].startswith(f"cannot read the checkpoint {folder}: ")
        assert "\n" not in found.passed_over[0]


@pytest.mark.parametrize("name", LIES)
def test_what_a_file_of_weights_says_of_itself_may_be_anything(name, tmp_path):
    saved = read_saved_run(write_checkpoint(tmp_path, 5))
    good = json.loads(run_as_metadata(saved)["training"])
    path, weights = tmp_path / "weights.safetensors", {"w": torch.ones(3)}
    for lie in ([], LIES[name])[name in good]:
        save_file(weights, path, {"training": json.dumps(good | {name: lie})})
        with pytest.raises(UsageError, match=r"^cannot read the checkpoint \S+ .*$"):
            find(path, "--resume")
    save_file(weights, path, {"training": '{"arguments":' * 200_000})  # of another program
    assert find(path, "--resume").run is None


def test_checkpoints_that_their_run_removes_meanwhile(tmp_path, monkeypatch):
    """Whoever reads a run that is being trained looks again; without end, if all are damaged."""
    for step in (5, 10):
        write_checkpoint(tmp_path, step)

    read = inventory.read_or_problem

    def read_late(path):
        if (tmp_path / "step_5").exists():  # the run goes on
            for step in (5, 10):
                shutil.rmtree(tmp_path / f"step_{step}")
            write_checkpoint(tmp_path, 15)
        return read(path)

    monkeypatch.setattr(inventory, "read_or_problem", read_late)
    found = retry_while_error_changes(lambda: candidates(tmp_path))
    assert (found.saved.position.step, found.passed_over) == (15, ())
    truncate(tmp_path / "step_15")
    with pytest.raises(AllDamaged, match="step_15 is damaged"):
        retry_while_error_changes(lambda: candidates(tmp_path))


def test_damage_that_sizes_hide_is_found_by_checksum(tmp_path):
    folder = write_checkpoint(tmp_path, 5)
    flip(folder)
    assert quick_problem(folder) is None
    assert "__0_0.distcp has changed since it was written" in damage(folder)
    shares = [damage(folder, part, 3) for part in range(3)]
    assert sum(share is not None for share in shares) == 1


# -- kept, removed, set aside ---------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(0, [1, 2, 3, 4, 9]), (1, [4, 9]), (4, [1, 2, 3, 4, 9]), (10**9, [1, 2, 3, 4, 9])],
)
def test_keep_the_newest(keep, kept, tmp_path):
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_9").mkdir()  # one that is being written
    prune(tmp_path, keep, [])
    assert left(tmp_path) == kept


def test_what_an_interrupted_save_left_goes_with_the_old_ones(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 3, manifest=False)
    prune(tmp_path, 1, [tmp_path / "step_2"])
    assert left(tmp_path) == [2, 4]


def test_files_and_links_with_a_checkpoints_name(tmp_path):
    """A file is the user's, and stays; a link is removed, and what it leads to stays."""
    elsewhere = write_checkpoint(tmp_path / "elsewhere", 3)
    (tmp_path / "step_2").write_text("mine")
    (tmp_path / "step_3").symlink_to(elsewhere)
    (tmp_path / "step_4").symlink_to(tmp_path / "nowhere")
    for step in (2, 4):
        clear(tmp_path / f"step_{step}")
        write_checkpoint(tmp_path, step)
    assert (tmp_path / "step_2.set_aside").read_text() == "mine"
    (tmp_path / "step_1").write_text("mine, too")
    prune(tmp_path, 1, [])
    assert [path.name for path in step_folders(tmp_path)] == ["step_4"]
    assert (tmp_path / "step_1.set_aside").read_text() == "mine, too"
    assert damage(elsewhere) is None


def test_going_back_sets_the_later_ones_aside(tmp_path):
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text('{"step": 12}\n')
    later = later_checkpoints(tmp_path, tmp_path / "step_5")
    assert [path.name for path in later] == ["step_10", "step_15"]
    aside = set_aside(tmp_path, later)
    assert aside == tmp_path / "set_aside_1"
    assert (aside / "metrics.jsonl").read_text() == '{"step": 12}\n'
    assert left(tmp_path) == [5]
    assert candidates(tmp_path, aside).paths[0] == aside / "step_15"
    write_checkpoint(tmp_path, 6)
    assert set_aside(tmp_path, [tmp_path / "step_6"]) == tmp_path / "set_aside_2"
    assert later_checkpoints(tmp_path, tmp_path / "step_5") == []
    assert [p.name for p in later_checkpoints(tmp_path, aside / "step_10")] == [
        "step_5"
    ]  # another run's


def test_sums_made_while_writing_are_those_of_the_files(tmp_path):
    content = {"model": {"a": torch.arange(1e6), "b": torch.ones(3)}, "step": torch.tensor(3)}
    sums = write_state(content, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [".metadata", "__0_0.distcp"]
    assert sums == entries(tmp_path, files)
