import os

import pytest

from tests.hardware.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if os.getppid() != 1:
        pytest.exit("these tests run in namespaces of their own: make test-slurm", 2)
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
