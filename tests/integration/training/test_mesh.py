"""Meshes of dcn x fsdp x tensor: the same training as on one device."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.cli import TINY_MODEL, run_program, train_tiny
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.marks import long
from tests.support.resolved import on_xla
from training.errors import UsageError
from training.mesh import Mesh
from xla_fsdp import resolve_xla
from xla_fsdp.hosts import HostPart, device_order, part_of_host

# What each block may have more, so that every kind of parameter is sharded.
FULL_BLOCK = "--qk_norm --scale_attn_norm --scale_mlp_norm --init_values 0.5 --class_token".split()
DROPOUT = "--mlp_dropout 0.1 --att_dropout 0.1 --pos_dropout 0.1 --drop_path_rate 0.2".split()


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("one_device"), *FULL_BLOCK)


@pytest.mark.parametrize(
    ("devices", "flags", "mesh"),
    [
        long(4, "--mesh_tensor 2", "mesh fsdp 2 x tensor 2"),
        long(4, "--mesh_dcn 2 --mesh_fsdp 2", "mesh dcn 2 x fsdp 2"),
        long(8, "--mesh_dcn 2 --mesh_tensor 2", "mesh dcn 2 x fsdp 2 x tensor 2"),
    ],
)
def test_same_training(devices, flags, mesh, one_device, tmp_path):
    result = train_tiny(tmp_path, *FULL_BLOCK, *flags.split(), devices=devices)
    assert mesh in result.run_file["backend"]
    assert_same_training(result, one_device)
    # XLA's warning where it replicates a tensor to shard it otherwise.
    assert "Involuntary full rematerialization" not in result.stderr


@pytest.mark.long
def test_dropout_bf16_and_accumulation(tmp_path):
    flags = [*DROPOUT, "--grad_accum_steps", "2", "--max_steps", "2"]
    plain = train_tiny(tmp_path / "plain", *flags)
    sharded = train_tiny(tmp_path / "sharded", *flags, "--mesh_tensor", "2", devices=2)
    lower = train_tiny(
        tmp_path / "bf16", *flags, "--mesh_tensor", "2", "--precision", "bf16", devices=2
    )
    assert_same_curves(sharded, plain, rel=1e-5)
    assert lower.column("loss") != pytest.approx(plain.column("loss"), rel=1e-6)
    assert lower.column("loss") == pytest.approx(plain.column("loss"), rel=0.03)


@pytest.mark.long
def test_checkpoint_moves_between_meshes(one_device, tmp_path):
    train_tiny(tmp_path, *FULL_BLOCK, "--mesh_tensor", "2", "--max_steps", "2", devices=4)
    unrolled = "--mesh_dcn 2 --mesh_tensor 2 --no-scan_blocks --max_steps 4".split()
    train_tiny(tmp_path, *FULL_BLOCK, *unrolled, devices=4)
    assert_written_once(tmp_path / "step_2", "blocks.1.attn.qkv.weight", [(32 // 2, 32 // 2)] * 12)
    assert_written_once(tmp_path / "step_4", "blocks.1.attn.qkv.weight", [(32 // 2, 32)] * 6)
    result = train_tiny(tmp_path, *FULL_BLOCK, devices=2)
    assert_same_curves(result, one_device, rel=1e-5)


def assert_written_once(checkpoint, name, sizes):
    """Chunks of these sizes: of q, k and v each, copies along dcn but once."""
    tensors = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = tensors[f"model.{name}"]
    assert found.size == (96, 32)
    assert [chunk.sizes for chunk in found.chunks] == sizes
    assert len({tuple(chunk.offsets) for chunk in found.chunks}) == len(sizes)


@pytest.mark.long
def test_state_is_sharded():
    """Bytes that really lie on the first of 8 devices, of two copies, against all there are."""
    mesh = "--mesh_dcn 2 --mesh_tensor 2".split()
    done = run_program("-m", "tests.fakes.measure_state", "8", *TINY_MODEL, *mesh)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["told"] == found["bytes"]
    block = 12 * 32**2 + 13 * 32
    rest = 3 * 4**2 * 32 + 32 + 16 * 32 + 2 * 32 + 10 * 32 + 10
    assert 0.25 <= found["bytes"]["parameters"] / 4 / (2 * block + rest) <= 0.26


def test_specs():
    mesh = Mesh(dcn=2, fsdp=4, tensor=8)
    assert str(mesh) == "mesh dcn 2 x fsdp 4 x tensor 8"
    assert mesh.parameter_spec((48, 64), tensor_dim=1) == (("fsdp",), ("tensor",))
    assert mesh.parameter_spec((3, 64, 48), tensor_dim=1) == ((), ("tensor",), ("fsdp",))
    assert mesh.parameter_spec((64,), tensor_dim=0) == (("tensor", "fsdp"),)
    assert mesh.parameter_spec((10, 64)) == ((), ("fsdp", "tensor"))
    assert mesh.parameter_spec((12,)) == (("fsdp",),)
    assert mesh.parameter_spec((3,)) == ((),)
    assert Mesh(fsdp=4).parameter_spec((5, 8), tensor_dim=0) == ((), ("fsdp",))


@pytest.mark.parametrize(
    ("flags", "devices", "passes"),
    [
        ("--batch_size 24 --micro_batch_size 8", 3, 1),
        ("--batch_size 24 --micro_batch_size 8", 2, 2),
        ("--batch_size 24 --micro_batch_size 100", 2, 1),
        ("--batch_size 24 --micro_batch_size 1", 2, 12),
        ("--batch_size 14 --micro_batch_size 5", 2, 7),  # of 7 images a device
        ("--batch_size 30 --micro_batch_size 4", 2, 5),  # four passes are no equal ones
        ("--batch_size 24 --micro_batch_size 8 --mesh_tensor 2", 4, 2),
    ],
)
def test_passes_follow_devices(flags, devices, passes):
    run = on_xla(f"{flags} --cpu_devices {devices}")
    assert run.config.data.grad_accum_steps == passes
    least = 2 if "tensor" in flags else 1
    other = on_xla(f"{flags} --cpu_devices {least}")
    assert other.on(devices).config.data.grad_accum_steps == passes


@pytest.fixture
def two_slices(monkeypatch):
    """Two slices of four chips."""

    class Host:
        version = staticmethod(lambda: 5)
        num_available_devices = staticmethod(lambda: 4)
        num_expected_global_devices = staticmethod(lambda: 4)

    monkeypatch.setattr(resolve_xla, "device_type", lambda: "TPU")
    monkeypatch.setattr(resolve_xla, "slice_count", lambda: 2)
    monkeypatch.setattr(resolve_xla, "host_tpu", lambda: Host)


def test_replicas_follow_slices(two_slices, monkeypatch):
    with pytest.raises(
        UsageError, match="--mesh_dcn 1 is not a multiple of 2, the number of slices"
    ):
        on_xla("--batch_size 8")
    run = on_xla("--mesh_dcn slices --batch_size 8")
    assert run.mesh == Mesh(dcn=2, fsdp=4)
    assert run.on(8) is run
    with pytest.raises(UsageError, match="--mesh_dcn requires --xla_fsdp spmd"):
        on_xla("--mesh_dcn slices --xla_fsdp nested --batch_size 8")
    monkeypatch.setattr(resolve_xla, "slice_count", lambda: 1)
    assert on_xla("--mesh_dcn slices --batch_size 8").mesh == Mesh(fsdp=4)


def test_one_slice_where_there_is_no_tpu():
    assert on_xla("--mesh_dcn slices --cpu_devices 4 --batch_size 8").mesh == Mesh(fsdp=4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--mesh_dcn slices --batch_size 24", ""),
        ("--mesh_dcn slices --batch_size 16", r"with 3 slices \(--elastic 1:3\): --batch_size 16"),
        ("--mesh_dcn 2 --batch_size 24", r"with 3 slices \(--elastic 1:3\): --mesh_dcn 2 "),
        ("--mesh_dcn slices --mesh_fsdp 4 --batch_size 24", ""),
    ],
)
def test_a_run_must_fit_each_number_of_slices(two_slices, monkeypatch, flags, told):
    monkeypatch.setenv("ELASTIC_SLICES", "1:3")
    if not told:
        assert on_xla(flags).mesh == Mesh(dcn=2, fsdp=4)
        return
    with pytest.raises(UsageError, match=told):
        on_xla(flags)


def test_devices_along_tensor_share_a_host():
    """Two slices of 4 x 4 chips, hosts of 2 x 2: numbered along rows, not host by host."""
    attributes = [
        {"name": f"TPU:{16 * slice_ + 4 * y + x}", "coords": [x, y, 0], "slice_index": slice_}
        for slice_ in (1, 0)
        for y in range(4)
        for x in range(4)
    ]
    here = {18, 19, 22, 23}  # the second host of the second slice
    order = device_order(attributes, here)
    assert order[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order[16:24] == [16, 17, 20, 21, 18, 19, 22, 23]
    part = part_of_host(Mesh(dcn=2, fsdp=4, tensor=4), order, here, 32)
    assert (part.groups, part.shard, part.shards, part.rows) == ((5,), 5, 8, range(32))
    part = part_of_host(Mesh(dcn=2, fsdp=8, tensor=2), order, here, 32)
    assert (part.groups, part.shard, part.shards) == ((10, 11), 5, 8)
    with pytest.raises(UsageError, match="must divide 4, the number of devices per host"):
        part_of_host(Mesh(dcn=2, fsdp=2, tensor=8), order, here, 32)
    share = torch.arange(6).view(6, 1)
    whole = HostPart((1, 3), 4, range(0)).in_global_batch(share, None, 32)
    assert whole[[3, 4, 5, 9, 10, 11]].equal(share)


@pytest.mark.parametrize(
    ("mesh", "groups", "rows"),
    [
        (Mesh(fsdp=8, domain=2), (2, 3), range(32)),  # two images whole
        (Mesh(fsdp=4, domain=4), (1,), range(32)),
        (Mesh(fsdp=2, domain=8), (0,), range(16, 32)),  # half of an image, of two hosts
        (Mesh(domain=16), (0,), range(8, 16)),
        (Mesh(fsdp=2, domain=4, tensor=2), (0,), range(16, 32)),
    ],
)
def test_hosts_that_share_images(mesh, groups, rows):
    part = part_of_host(mesh, range(16), range(4, 8), 32)
    assert (part.groups, part.rows) == (groups, rows)
    images = torch.randn(len(groups) * 3, 2, len(rows), 5)
    whole = part.in_global_batch(images, 1, 32)
    assert whole.shape == (mesh.batch_shards * 3, 2, 32, 5)
    first = groups[0] * 3
    assert whole[first : first + len(images), :, rows.start : rows.stop].equal(images)


def test_rows_of_a_host_are_those_of_its_devices():
    """XLA pads 13 rows over 4 devices to 4 each: the last one has 1."""
    parts = [part_of_host(Mesh(domain=4), range(4), {2 * n, 2 * n + 1}, 13) for n in range(2)]
    assert [part.rows for part in parts] == [range(8), range(8, 13)]
    with pytest.raises(UsageError, match="or be a multiple of it"):
        part_of_host(Mesh(fsdp=2, domain=3), range(6), range(4), 12)


def test_slices_alike():
    """A replica on a slice has the order that the slice alone has, so its hosts hold the same."""
    attributes = [
        {"name": f"TPU:{n}", "coords": [0, 0, 0], "slice_index": n < 8} for n in range(16)
    ]
    assert device_order(attributes) == [*range(8, 16), *range(8)]
