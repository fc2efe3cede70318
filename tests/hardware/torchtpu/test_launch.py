"""launch/torchrun.sh --backend torchtpu: what torch_tpu itself tells each process of its slice."""

import json

from tests.support.cli import copy_launcher
from tests.support.launching import free_port, start, succeed

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
