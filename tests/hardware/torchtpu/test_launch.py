"""launch/torchrun.sh --backend torchtpu: what torch_tpu itself tells each process of its slice."""

import json
import signal
import sys
import time

import pytest

from tests.support.cli import OF_TORCHTPU, ROOT, Result, copy_launcher, tiny, train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.launching import finish, free_port, start, succeed

SAYS_ITS_PLACE = """
import json, os
names = "RANK", "LOCAL_RANK", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES"
print(json.dumps([os.environ[name] for name in names]) + "\\n", end="", flush=True)
"""


def test_each_process_knows_its_slice(tmp_path):
    """Two hosts of two TPU7x chips: four devices a host. One host alone takes free ports."""
    copy_launcher(tmp_path)
    (tmp_path / "run_vit_training.py").write_text(SAYS_ITS_PLACE)
    command = [tmp_path / "launch" / "torchrun.sh", "--backend", "torchtpu"]
    hosts = ["127.0.0.1", "127.0.0.2"]
    shared = {
        "NPROC_PER_NODE": "4",
        "NNODES": "2",
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": free_port(),
        "NODE_ADDRESSES": ",".join(hosts),
        "TORCH_TPU_TOPOLOGY": "2,2,1",
    }
    nodes = [start(*command, **shared, NODE_RANK=str(rank)) for rank in (0, 1)]
    told = [json.loads(line) for node in nodes for line in succeed(node).splitlines()]
    addresses = ",".join(f"{host}:{8070 + device}" for host in hosts for device in range(4))
    assert sorted(told) == [[str(rank), str(rank % 4), "2,2,1,2", addresses] for rank in range(8)]
    alone = start(*command, NPROC_PER_NODE="2", TORCH_TPU_TOPOLOGY="2x1")
    told = [json.loads(line) for line in succeed(alone).splitlines()]
    assert [words[:3] for words in sorted(told)] == [["0", "0", "2,1,1"], ["1", "1", "2,1,1"]]
    ((_, first), (_, second)) = [each.split(":") for each in told[0][3].split(",")]
    assert first != second


TRAINS = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module("tests.fakes.torchtpu_on_cpu", run_name="__main__")
"""


@pytest.fixture
def launch(tmp_path):
    """Start the program on a pod by launch/torchrun.sh, with the flags of six tiny steps and more;
    ``own`` are the launcher's."""
    copy_launcher(tmp_path / "vit")
    (tmp_path / "vit" / "run_vit_training.py").write_text(TRAINS)

    def start_it(pod, *flags, own="", tpu="pod", **variables):
        variables |= OF_TORCHTPU | {"PYTHON": sys.executable, "MASTER_PORT": free_port()}
        sent = [word for item in variables.items() for word in ("--env", "=".join(item))]
        return pod.launch(
            *("launch/torchrun.sh", "--backend", "torchtpu", *tiny(tmp_path / "run"), *flags),
            flags=(*sent, *own.split(), "--workdir", str(tmp_path / "vit")),
            tpu=tpu,
        )

    return start_it


def wait_for(path, run):
    while not path.exists():
        assert run.poll() is None, finish(run)
        time.sleep(0.05)


@pytest.mark.long
def test_four_hosts_that_are_stopped(pod_of, launch, tmp_path):
    """A slice of 2x2 with a chip a host. Ctrl-C, and the same command again."""
    flags = "--max_steps 20 --ckpt_step_interval 2".split()
    pod, chips = pod_of(4), {"NPROC_PER_NODE": "1", "TORCH_TPU_TOPOLOGY": "2,2,1"}
    run = launch(pod, *flags, own="--grace 60", **chips)
    wait_for(tmp_path / "run" / "step_4", run)
    run.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(run)
    assert code == 130, stdout + stderr
    assert "training stopped by SIGINT: step " in stdout
    code, stdout, stderr = finish(launch(pod, *flags, **chips))
    assert code == 0, stdout + stderr
    result = Result(tmp_path / "run", stdout, stderr)
    assert "TPU: 4 cpu device(s), TorchTPU, SimpleFSDP" in result.run_file["backend"]
    assert_same_curves(result, train_tiny_gpu(tmp_path / "whole", *flags), rel=1e-4)


@pytest.mark.long
def test_two_slices_of_which_one_is_lost(pod_of, launch, tmp_path):
    """By one launch, each of one host with two devices: a replica of the model in each. Training
    goes on with the one that is left, as if nothing had happened."""
    flags = "--max_steps 20 --ckpt_step_interval 2".split()
    pod = pod_of(1)
    run = launch(
        pod,
        *("--mesh_dcn", "slices", *flags),
        own="--elastic 1 --max_restarts 1 --grace 2 --elastic_wait 1 --elastic_poll 1",
        tpu="pod-0,pod-1",
        NPROC_PER_NODE="2",
        TORCH_TPU_TOPOLOGY="2,1,1",
    )
    wait_for(tmp_path / "run" / "step_4", run)
    before = json.loads((tmp_path / "run" / "run.json").read_text())["backend"]
    pod.lose(1)
    code, stdout, stderr = finish(run)
    assert code == 0, stdout + stderr
    assert "starting on 1 of 2 slices: pod-0" in stderr
    result = Result(tmp_path / "run", stdout, stderr)
    after = result.run_file["backend"]
    for told, mesh in ((before, "mesh dcn 2 x fsdp 2,"), (after, "mesh fsdp 2,")):
        assert "SimpleFSDP" in told
        assert mesh in told
    assert_same_curves(result, train_tiny_gpu(tmp_path / "whole", *flags), rel=1e-4)
