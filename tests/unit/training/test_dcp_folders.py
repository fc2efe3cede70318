"""DCP folders of other programs: which tensors are the model's, and what is never opened."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from models.registry import open_model
from training.checkpoints.choose import candidates_in
from training.checkpoints.format import SafeReader, load_into, quiet_dcp
from training.errors import UsageError
from training.weights.adapt import adapt
from training.weights.find import find

pytestmark = pytest.mark.fast

MODEL = {
    "pos_embed": torch.arange(6.0).view(1, 3, 2),
    "blocks.0.norm1.weight": torch.arange(4.0),
    "head.weight": torch.ones(3, 2, dtype=torch.bfloat16),
}
OPTIMIZER = {
    "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4)}},
    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
}
PREFIXED = {f"module.{name}": tensor for name, tensor in MODEL.items()}
HALF = {name: tensor / 2 for name, tensor in MODEL.items()}
LEFT_OUT = "not used: optimizer (tensors: 2), entries that are no tensors: 2"


class Attack:
    """What DCP saves as bytes, and unpickles where it reads them."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def saved(folder, content, **how):
    with quiet_dcp():
        dcp.save(content, checkpoint_id=folder, no_dist=True, **how)
    return folder


def changed(folder, change):
    """The folder with other metadata: ``change`` gets and returns it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    return folder


def assert_read(folder, expected=MODEL, **how):
    """The values, in fp32; returns the note."""
    found = find(folder, "--init_from", **how)
    values = found.read(list(found.layouts))
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(values[name], tensor.float()), name
    return found.notes


def refused(folder):
    with pytest.raises(UsageError) as error:
        find(folder, "--init_from")
    line = str(error.value)
    assert len(line.splitlines()) == 1
    return line


# -- which tensors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (MODEL, ""),
        ({"model": MODEL}, ""),
        ({"state_dict": PREFIXED}, "module. removed from names"),
        (
            {"model": PREFIXED, "optimizer": OPTIMIZER},
            f"module. removed from names; {LEFT_OUT}",
        ),
        (
            {"app": {"model": MODEL, "optim": OPTIMIZER}, "step": 3},
            "not used: app.optim (tensors: 2), entries that are no tensors: 3",
        ),
        ({**MODEL, "optimizer": OPTIMIZER}, LEFT_OUT),
        (
            {"model": {f"_orig_mod.{n}": t for n, t in MODEL.items()}, "ema": HALF},
            "_orig_mod. removed from names; not used: ema (tensors: 3)",
        ),
        (
            {"model_state_dict": MODEL, "optimizer_state_dict": OPTIMIZER},
            "model_state_dict. removed from names; not used: optimizer_state_dict (tensors: 2), "
            "entries that are no tensors: 2",
        ),
    ],
)
def test_the_model_is_found(content, note, tmp_path):
    assert assert_read(saved(tmp_path / "step_5_loss_0.250", content)) == note


def test_the_average_is_found(tmp_path):
    folder = saved(tmp_path / "one", {"model": MODEL, "ema": HALF})
    assert assert_read(folder, HALF, use_ema=True) == "not used: model (tensors: 3)"
    folder = saved(tmp_path / "app", {"app": {"model": MODEL, "model_ema": PREFIXED}})
    assert "not used: app.model" in assert_read(folder, use_ema=True)
    with pytest.raises(UsageError, match="has no EMA of the weights"):
        find(saved(tmp_path / "none", {"model": MODEL}), "--resume", use_ema=True)


def test_names_of_transformers_are_joined(tmp_path):
    """Query, key and value are one tensor in timm; each is an entry of its own here."""
    layer, qkv = "vit.encoder.layer.0.attention.attention", torch.arange(18.0).view(6, 3)
    parts = dict(zip(("value", "key", "query"), reversed(qkv.split(2)), strict=True))
    content = {f"{layer}.{name}.weight": part for name, part in parts.items()}
    content["vit.embeddings.patch_embeddings.projection.weight"] = torch.ones(1, 1, 2, 2)
    expected = {
        "patch_embed.proj.weight": torch.ones(1, 1, 2, 2),
        "blocks.0.attn.qkv.weight": qkv,
    }
    assert_read(saved(tmp_path / "folder", {"model": content, "optim": OPTIMIZER}), expected)


def test_without_the_structure_of_what_was_saved(tmp_path):
    """DCP records it only if it has flattened dictionaries itself."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    flat = saved(tmp_path / "flat", PREFIXED, planner=planner)
    assert assert_read(flat) == "module. removed from names"
    folder = saved(tmp_path / "none", {"model": MODEL})
    changed(folder, lambda metadata: replace(metadata, planner_data=None))
    assert assert_read(folder) == "model. removed from names"


def test_metadata_of_pytorch_2_1(tmp_path):
    """Properties are of another class, and later fields are missing."""

    def older(metadata):
        for entry in metadata.state_dict_metadata.values():
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
        for info in metadata.storage_data.values():
            vars(info).pop("transform_descriptors", None)
        for name in ("storage_meta", "version"):
            vars(metadata).pop(name, None)

    folder = changed(saved(tmp_path / "folder", {"model": MODEL}), older)
    assert b"sharded_tensor" in (folder / ".metadata").read_bytes()
    assert_read(folder)


def test_training_cannot_continue_from_it(tmp_path):
    folder = saved(tmp_path / "step_12_loss_0.250", {"model": MODEL, "optimizer": OPTIMIZER})
    saved(tmp_path / "step_5_loss_0.5", {"model": MODEL})
    with pytest.raises(UsageError) as error:
        candidates_in(folder)
    assert f"{folder} is a DCP folder of another program" in str(error.value)
    assert str(error.value).endswith(f"use --init_from {folder}")
    with pytest.raises(UsageError, match=f"name one of its DCP folders, such as {folder}"):
        candidates_in(tmp_path)


# -- hostile and damaged folders ----------------------------------------------------------


def test_pickles_are_never_opened(tmp_path):
    """Neither beside the model nor inside of it, wherever they claim to be."""
    attack = Attack(tmp_path / "attacked")
    content = {"model": {**MODEL, "extra_state": attack}, "optimizer": attack, "step": [attack]}
    folder = saved(tmp_path / "folder", content)
    assert assert_read(folder) == "not used: entries that are no tensors: 3"

    def elsewhere(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn not in {f"model.{name}" for name in MODEL}:
                info.relative_path = "../elsewhere"

    assert_read(changed(folder, elsewhere))
    for entry in ("optimizer", "model.extra_state"):
        with quiet_dcp(), pytest.raises(dcp.CheckpointException):
            load_into({entry: torch.zeros(1)}, folder)
    assert BytesStorageMetadata not in map(
        type, SafeReader(folder).read_metadata().state_dict_metadata.values()
    )
    assert not (tmp_path / "attacked").exists()


def test_a_pickle_in_place_of_a_tensor(tmp_path):
    content = {**MODEL, "head.weight": Attack(tmp_path / "attacked")}
    found = find(saved(tmp_path / "folder", {"model": content}), "--init_from")
    assert "head.weight" not in found.layouts
    assert not (tmp_path / "attacked").exists()


def test_metadata_that_runs_code(tmp_path):
    folder = saved(tmp_path / "folder", {"model": MODEL})
    changed(folder, lambda metadata: replace(metadata, planner_data=Attack(tmp_path / "attacked")))
    assert "system is not allowed in a checkpoint" in refused(folder)
    assert not (tmp_path / "attacked").exists()


def test_an_unknown_dtype(tmp_path):
    folder = saved(tmp_path / "folder", {"model": MODEL})
    metadata = (folder / ".metadata").read_bytes()
    assert b"bfloat16" in metadata
    (folder / ".metadata").write_bytes(metadata.replace(b"bfloat16", b"bfloat99"))
    assert refused(folder).endswith(f"PyTorch {torch.__version__} has no torch.bfloat99")


def without(metadata, name):
    metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == name))


def smaller(metadata, name):
    entry = metadata.state_dict_metadata[name]
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size((1,)))


def shifted(metadata, name):
    entry = metadata.state_dict_metadata[name]
    index = next(index for index in metadata.storage_data if index.fqn == name)
    metadata.storage_data[MetadataIndex(name, (2,))] = metadata.storage_data.pop(index)
    entry.chunks[0] = replace(entry.chunks[0], offsets=torch.Size((2,)))


def moved(metadata, name):
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            info.relative_path = "sub/__0_0.distcp"


def nested(metadata, name):
    paths = {**metadata.planner_data, name: ("model", "pos_embed", "inside")}
    return replace(metadata, planner_data=paths)


def twice(metadata, name):
    return replace(metadata, planner_data={**metadata.planner_data, name: ("model", "pos_embed")})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without, "the part of {} at (0,) is missing"),
        (smaller, "it has 1 of the 4 values of {}"),
        (shifted, "a part of {} is outside its shape"),
        (moved, "sub/__0_0.distcp is not a file of the checkpoint"),
        (nested, "{} is inside another tensor"),
        (twice, "{} was saved twice"),
    ],
)
def test_metadata_that_contradicts_itself(change, told, tmp_path):
    name = "model.blocks.0.norm1.weight"
    folder = saved(tmp_path / "folder", {"model": MODEL})
    changed(folder, lambda metadata: change(metadata, name))
    assert refused(folder) == f"cannot read the checkpoint {folder}: {told.format(name)}"


def test_missing_and_truncated_parts(tmp_path):
    folder = saved(tmp_path / "folder", {"model": MODEL, "optimizer": OPTIMIZER})
    (part,) = folder.glob("*.distcp")
    os.truncate(part, 100)
    assert f"{part.name} has 100 bytes, not " in refused(folder)
    part.unlink()
    assert refused(folder).endswith(f"{part.name} is missing")


def test_other_names_get_an_advice_for_folders(tmp_path):
    found = find(saved(tmp_path / "f", {"model": {"w": torch.ones(1)}}), "--init_from")
    with pytest.raises(UsageError) as error:
        adapt(found, open_model("vit_tiny_patch16_224", {}), unchanged=True)
    told = str(error.value)
    assert "not timm's (such as w): save its weights under the names of" in told
    assert "checkpoint_path" not in told
