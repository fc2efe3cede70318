"""Checkpoint folders: what counts as one, what is refused, what is kept, who may write."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from tests.support.checkpoints import OneWeight, flip, left, save_state, truncate, write_checkpoint
from training.checkpoints.choose import (
    complete_checkpoints,
    later_checkpoints,
    named_candidates,
    prune,
    set_aside,
)
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
from training.checkpoints.state import load_state, write_state
from training.errors import UsageError
from training.schedule import Position

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
    with pytest.raises(UsageError, match="BytesStorageMetadata is not allowed in a checkpoint"):
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
    assert named_candidates(tmp_path, "auto", 0).paths[0].name == "step_10"
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
    found = named_candidates(tmp_path, "auto", 0)
    assert [path.name for path in found.paths] == ["step_5"]
    (line,) = found.passed_over
    assert "step_10 is damaged" in line
    assert told in line
    with pytest.raises(UsageError, match="cannot read the checkpoint"):
        named_candidates(tmp_path, str(tmp_path / "step_10"), 0)


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
    assert named_candidates(tmp_path, str(aside), 0).paths[0] == aside / "step_15"
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
