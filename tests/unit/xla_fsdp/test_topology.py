"""``--tpu_topology``: Google's names of slices."""

import pytest

from training.errors import UsageError
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.fast

# Of Google Cloud's pages of each generation: what accelerator types and machine types have.
NAMES = """
v5e:4x2 v5e:4x2, v5e-1 v5e:1x1, v5e-8 v5e:2x4, v5litepod-8 v5e:2x4, v5litepod-256 v5e:16x16,
v6e-4 v6e:2x2, v6e-8 v6e:2x4, v6e-32 v6e:4x8, V6E-64 v6e:8x8,
v4-8 v4:2x2x1, v4-32 v4:2x2x4, v4-128 v4:4x4x4, v4-4096 v4:8x16x16,
v5p-8 v5p:2x2x1, v5p-16 v5p:2x2x2, v5p-64 v5p:2x4x4, v5p-128 v5p:4x4x4, v5p-1536 v5p:8x8x12,
v5p-2048 v5p:8x8x16, v5p-12288 v5p:16x16x24,
tpu7x-128 tpu7x:4x4x4, tpu7x-4x4x8 tpu7x:4x4x8, tpu7x-standard-4t tpu7x:2x2x1,
ct6e-standard-8t v6e:2x4, ct5lp-hightpu-4t v5e:2x2, ct5p-hightpu-4t v5p:2x2x1,
tpu-v6e-slice:2x4 v6e:2x4, tpu-v5-lite-podslice:4x4 v5e:4x4, tpu-v5p-slice:2x2x2 v5p:2x2x2
"""


@pytest.mark.parametrize(("name", "topology"), [pair.split() for pair in NAMES.split(",")])
def test_names(name, topology):
    assert parse_topology(name).name == topology


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v5p-12", "v5p-N has N cores, two a chip: use v5p-8 (v5p:2x2x1) or v5p-16 (v5p:2x2x2)"),
        ("v6e-512", "v6e-N has N chips: use v6e-256 (v6e:16x16)"),
        ("v5e-0", "use v5e-1 (v5e:1x1)"),
        ("v2-8", "unknown kind of TPU"),
        ("v5e:8", "--tpu_topology v5e:8 must be v5e:AxB"),
        ("v5p-", "--tpu_topology v5p- must be v5p:AxBxC"),
        ("ct6e-standard-2t", "unknown kind of TPU"),
        (f"v5e-{'9' * 5000}", "must be v5e:AxB"),
    ],
)
def test_no_such_slice(name, told):
    with pytest.raises(UsageError) as error:
        parse_topology(name)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
