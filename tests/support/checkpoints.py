"""Write, damage and compare checkpoints."""

import os
import re
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp

from training.backend import State
from training.checkpoints.choose import choose
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import (
    SafeReader,
    damage,
    entries,
    quiet_dcp,
    training_tensors,
    write_manifest,
)
from training.checkpoints.inventory import inventory
from training.checkpoints.state import state_content, write_state
from training.schedule import Position

HOLD = """
import sys, time
from pathlib import Path
from training.files import FolderLock
FolderLock(Path(sys.argv[1])).acquire(is_restart=False)
print("held", flush=True)
time.sleep(600)
"""


class OneWeight:
    """A backend, as far as checkpoints know one: its tensors are all equal to one number."""

    def __init__(self, value, step_names=()):
        self.value, self.taken = value, None
        self.step_names = step_names

    def state(self, *, with_optimizer=True):
        moments = {name: torch.full((2,), self.value) for name in ("step", "exp_avg", "exp_avg_sq")}
        return State(
            model={"a.w": torch.full((2, 3), self.value)},
            optimizer={"a.w": moments} if with_optimizer else None,
            step={name: torch.tensor(self.value) for name in self.step_names},
        )

    def load_state(self, state):
        self.taken = state


def write_checkpoint(
    ckpt_dir, step, *, position=None, arguments=None, classes=("a", "b"), order=None, manifest=True
):
    """A small checkpoint as the program writes it, without a model of its arguments."""
    folder = ckpt_dir / f"step_{step}"
    training = training_tensors(
        position or Position(step, step // 5, step % 5),
        {"batch_size": 1} if arguments is None else arguments,
        None if classes is None else list(classes),
        order,
    )
    content = {
        "model": {"w": torch.arange(1000.0) + step},
        "optimizer": {"state": {"w": {"step": torch.tensor(float(step))}}},
        "training": training,
    }
    with quiet_dcp():
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    if manifest:
        write_manifest(folder, entries(folder, [path.name for path in folder.iterdir()]))
    return folder


def candidates(ckpt_dir, resume="auto"):
    """The checkpoints that a start in this folder may resume."""
    checkpoints = CheckpointConfig(ckpt_dir=str(ckpt_dir), resume=str(resume))
    return choose(inventory(checkpoints), checkpoints)


def save_state(backend, folder, training):
    """Write the backend's state, as a saver does, but without a manifest."""
    with quiet_dcp():
        write_state(state_content(backend, training, copy=False), folder)


def flip(folder):
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)
        file.seek(2000)
        file.write(bytes([byte[0] ^ 1]))


def truncate(folder):
    os.truncate(folder / "__0_0.distcp", 100)


def left(ckpt_dir):
    return sorted(int(path.name[5:]) for path in ckpt_dir.glob("step_*"))


def tensors_of(folder):
    """All tensors of a checkpoint by their names, read whole."""
    assert damage(folder) is None
    reader = SafeReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
    with quiet_dcp():
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def assert_same_bits(folder, other):
    one, two = tensors_of(folder), tensors_of(other)
    assert one.keys() == two.keys()
    unlike = [name for name in one if not torch.equal(one[name], two[name])]
    assert [name for name in unlike if name != "training.arguments"] == []


def write_shards_of_xla_fsdp(pattern: str, state: Mapping[str, torch.Tensor], ranks: int) -> None:
    """Write a model as torch_xla's FSDP saves it without flattened parameters, in a file per rank.

    As torch_xla 2.9.0 writes it: the root and each block are units; a part is padded and flat.
    ``pattern`` has ``{}`` for the rank.
    """
    separator = "_FSDP_SHARD_SEPARATOR_"
    shard_info: dict[str, dict] = {}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for name, value in state.items():
        block = re.match(r"blocks\.\d+", name)
        unit = f"_fsdp_wrapped_module.{block[0]}" if block else ""
        inside = name.removeprefix(f"{block[0]}.") if block else name
        original = f"_fsdp_wrapped_module._fpw_module.{inside}"
        suffix = f"_fsdp_shard.{original}".replace(".", separator)
        shard_info.setdefault(unit, {})[suffix] = {
            "_orig_size": list(value.shape),
            "_orig_name": original,
        }
        flat = value.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
        for part, shard in zip(parts, padded.chunk(ranks), strict=True):
            part[f"{unit}.{suffix}".lstrip(".")] = shard.clone()
    for rank, part in enumerate(parts):
        metadata = {"shard_info": shard_info, "flatten_info": {}, "buffer_info": {}}
        metadata |= {"world_size": ranks, "rank": rank}
        saved = {"model": part, "shard_metadata": metadata, "optimizer": {}, "lr_scheduler": {}}
        torch.save(saved, pattern.format(rank))
