"""The unchanged program on one and several TPU hosts, emulated by tests/fakes/rehearsal.

The reference is the program on as many virtual CPU devices of one process.
"""

from dataclasses import replace

import pytest

from tests.fakes.gcs_server import GCSServer
from tests.fakes.rehearsal.slice_ import Slice
from tests.support.cli import DIGITS, VAL_IMAGES, Result, run_program, tiny, train_tiny
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.rehearsed import all_ended
from tools.explain_profile import find_traces, measure

HOST = Slice("v5p-8", (2, 2, 1))
TWO_HOSTS = Slice("v5p-16", (2, 2, 2))
FOUR_HOSTS = Slice("v5litepod-16", (4, 4, 1))
ONE_CHIP = Slice("v6e-1", (1, 1, 1), (1, 1, 1))


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("eight"), "--max_steps", "8", devices=8)


@pytest.fixture
def gcs(tmp_path, monkeypatch):
    """Google's storage, which programs find by their environment."""
    server = GCSServer()
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield server
    server.close()


def test_one_host(slice_of, tmp_path):
    """Trains, evaluates, saves and resumes, with all that only a TPU is asked."""
    host, run = slice_of(HOST), tmp_path / "run"
    first = host.train(run, "--max_steps", "3", warm=False)
    assert "XLA: 4 TPU device(s)" in first.stdout
    assert "MFU: 0.0%" in first.stdout  # the peak of a v5p is known
    assert "WARNING" not in first.stderr
    second = host.train(run, "--grad_ckpt", "auto")
    assert f"resuming {run}/step_3 at step 3" in second.stdout
    assert "--grad_ckpt auto: the fastest that fits by estimate" in second.stdout
    reference = train_tiny(tmp_path / "cpu", devices=4)
    assert_same_curves(second, reference, rel=1e-6)
    assert second.evaluations[-1]["val_loss"] == pytest.approx(
        reference.evaluations[-1]["val_loss"], rel=1e-6
    )


@pytest.mark.rehearse
def test_one_chip_nested(slice_of, tmp_path):
    """A process a chip, started by torch_xla itself."""
    chip = slice_of(ONE_CHIP)
    result = chip.train(tmp_path / "run", "--xla_fsdp", "nested")
    assert "XLA: 1 TPU device(s)" in result.stdout
    assert_same_training(result, train_tiny(tmp_path / "cpu"))


@pytest.mark.rehearse
def test_profile_of_two_hosts(slice_of, tmp_path):
    """Both write a trace of their own into the same run of XProf."""
    result = slice_of(TWO_HOSTS).train(tmp_path, "--profile", "2:3", "--max_steps", "3")
    assert f"profile of steps 2 to 3: {tmp_path}/profile" in result.stdout
    traces = find_traces(tmp_path)
    assert [path.name.rpartition("_")[2] for path in traces] == ["0.xplane.pb", "1.xplane.pb"]
    found = measure(traces)
    assert found.steps == 2
    assert {"blocks.attn.qkv", "blocks.mlp.fc2", "optimizer"} <= found.by_module.keys()
    assert "hook Saves" in found.hooks


@pytest.mark.rehearse
def test_hosts_train_as_one_and_hand_over(slice_of, tmp_path, eight_devices):
    """Two hosts, VMs of Compute Engine, then one with another mesh, then four: the losses are those
    of one process."""
    run = tmp_path / "run"
    two = slice_of(replace(TWO_HOSTS, on_compute_engine=True)).train(run, "--max_steps", "3")
    assert "XLA: 8 TPU device(s)" in two.stdout
    assert two.column("loss") == pytest.approx(eight_devices.column("loss")[:3], rel=1e-6)
    assert_parts_of_all_hosts(run / "step_3", 2)
    one = slice_of(HOST).train(run, "--max_steps", "5", "--mesh_tensor", "2")
    assert f"resuming {run}/step_3 at step 3" in one.stdout
    meshes = ["--mesh_dcn", "2", "--mesh_tensor", "2"]
    four = slice_of(FOUR_HOSTS).train(run, "--max_steps", "7", *meshes)
    assert "mesh dcn 2 x fsdp 4 x tensor 2" in four.stdout
    assert f"resuming {run}/step_5 at step 5" in four.stdout
    last = train_tiny(run, "--max_steps", "8", devices=8)
    assert_same_curves(last, eight_devices, rel=1e-5)
    assert last.evaluations[-1]["val_images"] == VAL_IMAGES


def assert_parts_of_all_hosts(checkpoint, hosts):
    """Each has written what its devices have, and no more."""
    sizes = [sum(f.stat().st_size for f in checkpoint.glob(f"__{n}_*")) for n in range(hosts)]
    assert min(sizes) > 0.3 * sum(sizes)


@pytest.mark.rehearse
def test_sigterm_to_one_host(slice_of, tmp_path, eight_devices):
    """All stop after the same step with a checkpoint, and go on from there."""
    hosts, run = slice_of(TWO_HOSTS), tmp_path / "run"
    program = ("-m", "tests.fakes.signal_at_step")
    started = hosts.start(*tiny(run), program=program, SIGNAL_AT="1 3 SIGTERM")
    all_ended(started, 143)
    (saved,) = run.glob("step_*")
    assert saved.name in ("step_3", "step_4", "step_5")
    done = hosts.train(run, "--max_steps", "8")
    assert f"resuming {saved} at step" in done.stdout
    assert done.column("loss") == pytest.approx(eight_devices.column("loss"), rel=1e-6)


@pytest.mark.rehearse
def test_images_and_checkpoints_in_a_bucket(gcs, slice_of, tmp_path):
    """Two hosts of Google's cloud, with Google's storage: as one process with folders."""
    shards, run = gcs.url("shards"), gcs.url("run")
    packed = run_program("-m", "data.pack", str(DIGITS), shards)
    assert packed.returncode == 0, packed.stderr
    words = ["--data_source", "webdataset", "--data_dir", shards, "--num_workers", "2"]
    words += ["--ckpt_step_interval", "2", "--keep_checkpoints", "1"]
    hosts = slice_of(replace(TWO_HOSTS, on_compute_engine=True))
    all_ended(hosts.start(*tiny(run), *words, "--max_steps", "4"))
    assert gcs.folders("run/") == ["step_4", "tensorboard"]
    parts = [name for name in gcs.names("run/step_4/") if name.endswith(".distcp")]
    assert {name.split("_")[2] for name in parts} == {"0", "1"}
    (said, _), _ = all_ended(hosts.start(*tiny(run), *words))
    assert f"resuming {run}/step_4 at step 4" in said
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_bytes(gcs.read("run/metrics.jsonl"))
    reference = train_tiny(tmp_path / "cpu", devices=8)
    assert_same_curves(Result(tmp_path / "logs"), reference, rel=1e-6)


# -- what only several hosts show ------------------------------------------------------


FLAGS = [
    (TWO_HOSTS, "--mesh_dcn 2 --mesh_fsdp 4"),
    (TWO_HOSTS, "--mesh_tensor 4 --num_heads 4 --no-scan_blocks"),
    (TWO_HOSTS, "--mesh_domain 8 --image_size 32 --data_source mosaics"),
    (TWO_HOSTS, "--run_without_fsdp --precision bf16 --qk_norm"),
    (TWO_HOSTS, "--grad_accum_steps 2 --no_grad_ckpt --eval_batches 3"),
    (TWO_HOSTS, "--num_workers 2 --clip_grad_norm 0.1"),
    (TWO_HOSTS, "--embed_dim 34 --mlp_ratio 3"),  # two shards, four copies of each
    (Slice("v5p-8", (2, 2, 1), slices=4), "--mesh_dcn 4 --mesh_tensor 2"),
    (Slice("v6e-16", (4, 4, 1)), "--mesh_tensor 2 --mesh_fsdp 8 --precision bf16"),
]


@pytest.mark.rehearse
@pytest.mark.parametrize(("what", "flags"), FLAGS, ids=[flags for _, flags in FLAGS])
def test_flags_on_hosts(what, flags, slice_of, tmp_path):
    """As one process on as many devices; stopped and gone on with, too."""
    words = flags.split()
    run = slice_of(what)
    run.train(tmp_path / "hosts", *words, "--max_steps", "4")
    result = run.train(tmp_path / "hosts", *words)
    reference = train_tiny(tmp_path / "process", *words, devices=what.devices)
    rel = 1e-5 if "bf16" in flags else 1e-6  # which sum comes first may decide a rounding
    assert_same_curves(result, reference, rel=rel)
    (*_, found), (expected,) = result.evaluations, reference.evaluations
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=rel)
    assert found["val_images"] == expected["val_images"]


@pytest.mark.rehearse
def test_a_mistake_on_one_host(slice_of, tmp_path):
    """It ends before its devices start; the other waits for it, and heeds a signal meanwhile."""
    hosts = slice_of(TWO_HOSTS)
    waits, mistaken = hosts.start(*tiny(tmp_path / "run"), own={1: ["--max_steps", "0"]})
    assert "--max_steps" in mistaken.communicate(timeout=60)[1]
    assert mistaken.returncode == 2
    assert waits.poll() is None
    waits.terminate()
    waits.communicate(timeout=60)
    assert waits.returncode in (-15, 143)
    assert not (tmp_path / "run").exists()


@pytest.mark.rehearse
@pytest.mark.parametrize(("fault", "line"), [("", ""), ("other data", "FAIL  rows, sum")])
def test_self_check_on_hosts(fault, line, slice_of, tmp_path):
    """Of two hosts the last one is given other images."""
    program = ("-m", "tests.fakes.self_check_fault") if fault else ("run_vit_training.py",)
    flags = ["--fake_data", "--mesh_tensor", "2", "--self_check"]
    started = slice_of(TWO_HOSTS).start(
        *tiny(tmp_path / "run"), *flags, program=program, FAULT=fault
    )
    (stdout, stderr), *_ = all_ended(started, 1 if fault else 0)
    assert line in stdout, stderr
    assert ("FAIL" in stdout) == bool(fault)
