"""Files of weights and runs that claim any size, or that are pipes: one line, at once."""

import json
import re
import signal
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.little_memory import little_memory, sparse
from tools.convert import main as convert
from tools.plan.plans import read_prices
from training.checkpoints.format import quiet_dcp, read_manifest, read_saved_run
from training.errors import UsageError
from training.files import folder_at, read_object
from training.weights.describe import describe
from training.weights.find import find

pytestmark = pytest.mark.fast

INDEX = "model.safetensors.index.json"
OF_TEXT = "the limit for a file of text or JSON is 67,108,864"


@pytest.fixture(autouse=True)
def _little_memory_and_time():
    def end(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    with little_memory():
        yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


# -- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["", "memory"])
def test_records(tmp_path, protocol):
    if protocol:  # where a file cannot be sparse
        import fsspec

        path = folder_at("memory://limits/run.json")
        fsspec.filesystem("memory").pipe("/limits/run.json", bytes(2**26 + 1))
    else:
        path = sparse(tmp_path / "run.json", b'{"job": 1}')
    with pytest.raises(ValueError, match=f"run.json has [0-9,]* bytes; {OF_TEXT}"):
        read_object(path)
    path.write_bytes(b'{"job": 1}')
    assert read_object(path) == {"job": 1}


def test_prices(tmp_path):
    path = sparse(tmp_path / "prices.toml")
    with pytest.raises(UsageError, match=f"--price .* hour: prices.toml has .* bytes; {OF_TEXT}"):
        read_prices(str(path))


def test_what_describes_a_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    sparse(folder / "manifest.json")
    with pytest.raises(ValueError, match=f"manifest.json has .* bytes; {OF_TEXT}"):
        read_manifest(folder)
    sparse(folder / ".metadata")
    told = (
        r"\.metadata has 8,589,934,592 bytes; the limit for the metadata of a checkpoint is 1,073,7"
    )
    with pytest.raises(UsageError, match=told):
        read_saved_run(folder)


def test_arguments_of_a_checkpoint(tmp_path):
    """DCP's metadata may claim any number of bytes, which would be allocated first."""
    training = {
        name: torch.zeros((), dtype=torch.int64) for name in ("step", "epoch", "images_in_epoch")
    }
    training["arguments"] = torch.zeros(2**26 + 1, dtype=torch.uint8)
    with quiet_dcp():
        writer = dcp.FileSystemWriter(tmp_path / "step_1")
        dcp.save({"training": training}, storage_writer=writer, no_dist=True)
    with pytest.raises(UsageError, match=f"arguments has 67,108,865 bytes; {OF_TEXT}"):
        read_saved_run(tmp_path / "step_1")


def test_what_describes_weights(tmp_path):
    sparse(tmp_path / "weights" / INDEX, size=3 * 2**30)
    with pytest.raises(UsageError, match=f"{INDEX} has 3,221,225,472 bytes; {OF_TEXT}"):
        find(tmp_path / "weights", "--init_from")


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_what_is_beside_weights(tmp_path, name):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    sparse(tmp_path / name, b"{}", 3 * 2**30)
    weights = find(tmp_path, "--init_from")
    told = (
        f"{tmp_path / name}, which describes the weights, cannot be read ({name} has 3,221,225,472 "
    )
    with pytest.raises(UsageError, match=re.escape(f"{told}bytes; {OF_TEXT}")):
        describe(weights)


def test_the_pickle_of_a_file_of_torch_save(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(2, 3)}, path)
    assert find(path, "--init_from").tensors["a"].equal(torch.ones(2, 3))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights/other.pkl", bytes(2**27))
    assert path.stat().st_size < 200_000
    told = (
        r"weights/other.pkl has 134,217,728 bytes; the limit for what a torch.save file has beside"
    )
    with pytest.raises(UsageError, match=told):
        find(path, "--init_from")


# -- pipes ----------------------------------------------------------------------------------


def refused(capsys, source):
    assert convert([str(source), f"{source}.safetensors"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_pipe_as_a_shard(tmp_path, endless, capsys):
    folder = tmp_path / "weights"
    folder.mkdir()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"a": torch.ones(3)}, folder / shards[0])
    (folder / shards[1]).symlink_to(endless)
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (folder / INDEX).write_text(json.dumps(index))
    assert f"it is not a regular file: {folder / shards[1]}" in refused(capsys, folder)


def test_a_pipe_as_a_part_of_a_checkpoint(tmp_path, endless, capsys):
    folder = tmp_path / "weights"
    with quiet_dcp():
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(endless)
    assert "it is not a regular file" in refused(capsys, folder)


def test_a_pipe_as_a_file_of_weights(tmp_path, endless, capsys):
    for name in ("a.pt", "a.safetensors", "config.json", INDEX):
        (tmp_path / name).symlink_to(endless)
    for name in ("a.pt", "a.safetensors"):
        assert "no such checkpoint, folder or file" in refused(capsys, tmp_path / name)
