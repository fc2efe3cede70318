"""Which links a collective uses, and which devices it is among, worked out by hand."""

import json

import pytest

from tests.support.cli import run_program
from tests.support.marks import long, with_newer_libtpu
from tools.compile_only.expected import Links
from tools.compile_only.hlo import Instruction, group_of, pairs_of
from xla_fsdp.tpu import parse_topology


@pytest.mark.parametrize(
    ("topology", "group", "used"),
    [
        ("v5e:16x16", range(256), 4),  # closed along both sides
        ("v5e:8x16", range(128), 2 * 7 / 8 + 2),  # and along one
        ("v5e:2x2", range(4), 2),
        ("v5p:4x4x8", range(128), 6),
        ("v5p:2x2x4", range(16), 1 + 1 + 2 * 3 / 4),
        ("v6e:16x16", range(16), 2),  # a row
        ("v6e:16x16", range(4), 2 * 3 / 4),  # a part of a row, which is open
        ("v6e:16x16", range(0, 16, 4), 2 / 4),  # beside three more on the same links
        ("tpu7x:4x4x4", range(128), 6),  # two devices a chip fetch together what both need
        ("tpu7x:4x4x4", range(0, 128, 2), 6 / 2),  # the other devices use the same links
        ("tpu7x:2x2x1", range(8), 2),
    ],
)
def test_links_by_number(topology, group, used):
    links = Links(parse_topology(topology))
    assert links.used([*group]) == pytest.approx(used)
    assert links.bandwidth([*group]) == pytest.approx(used * links.topology.chip.link_bandwidth)


@pytest.mark.parametrize(
    "topology",
    [
        "v5p:2x2x4",
        *map(long, ("v5e:1x1", "v5e:4x4", "v6e:8x8", "v5p:4x4x4")),
        *map(with_newer_libtpu, ("tpu7x:1x1x1", "tpu7x:2x4x4")),
    ],
)
def test_devices_are_where_libtpu_has_them(topology):
    done = run_program("-m", "tests.fakes.devices_of_libtpu", topology)
    assert done.returncode == 0, done.stderr
    slice_ = parse_topology(topology)
    for by_host, places in json.loads(done.stdout.splitlines()[-1]).items():
        found = Links(slice_, by_host == "True").places
        assert [(*place, 0)[:3] for place in found] == [tuple(place) for place in places]


@pytest.mark.parametrize(
    ("topology", "pairs", "bandwidth"),
    [
        ("v5e:4x4", [(0, 1), (1, 0)], 50e9),
        ("tpu7x:2x2x1", [(0, 1), (1, 0)], 600e9),  # within a chip
        ("tpu7x:2x2x1", [(0, 1), (1, 2), (2, 3), (3, 0)], 100e9),  # one of a chip leaves it
        ("tpu7x:2x2x1", [(0, 2), (1, 3), (2, 0), (3, 1)], 100e9 / 2),  # both
    ],
)
def test_links_of_a_permute(topology, pairs, bandwidth):
    assert Links(parse_topology(topology)).permute_bandwidth(pairs) == bandwidth
    text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    permute = f"%p = f32[8] collective-permute(%q), channel_id=1, source_target_pairs={{{text}}}"
    assert pairs_of(Instruction("p", "f32[8]", "collective-permute", permute)) == pairs


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("[16,8]<=[128]", [*range(8)]),
        ("[8,16]<=[16,8]T(1,0)", [*range(0, 128, 8)]),
        ("[2,4]<=[2,2,2]T(2,0,1)", [0, 2, 4, 6]),
        ("{}", [0, 1, 2, 3]),
    ],
)
def test_groups(groups, first):
    text = f"%g = f32[8] all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert group_of(Instruction("g", "f32[8]", "all-gather", text), 4) == first
