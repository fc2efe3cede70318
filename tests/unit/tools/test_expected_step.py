"""The compiler's expected step, on modules made by hand and worked out by hand."""

import json

import pytest

from tools.compile_only.expected import Links, expect
from tools.compile_only.hlo import measure
from xla_fsdp.tpu import CHIPS, parse_topology

pytestmark = pytest.mark.fast

LINKS = Links(parse_topology("v5e:2x2"))
MILLISECOND = 1_503_000
"""Cycles, at the 1.503 GHz of v5e."""
ONE_MS_OF_LINKS = int(200e9 / 2 * 1e-3 / 4 * 4 / 3)
"""Values of fp32 of which three of four, a millisecond's bytes, come from the other devices.

In 2 x 2 chips each has two neighbours, and uses half of its links."""


def module(*entry: str, others: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    return (
        f"HloModule step\n\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n"
        f"  %p = f32[8]{{0}} parameter(0)\n{lines}\n}}\n"
    )


def fusion(name: str, ms: float = 0, calls: str = "inside") -> str:
    cycles = round(ms * MILLISECOND)
    config = json.dumps({"estimated_cycles": str(cycles)}, separators=(",", ":"))
    said = f", backend_config={config}" if ms else ""
    return f"%{name} = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%{calls}{said}"


def milliseconds(hlo: str) -> tuple[float, float, float]:
    found = expect(hlo, LINKS)
    parts = (found.kernels_s, found.waiting_s, found.dma_s, found.host_s, found.dcn_s)
    assert found.seconds == pytest.approx(found.cycles_s + sum(parts))
    return found.cycles_s * 1e3, found.kernels_s * 1e3, found.waiting_s * 1e3


def exactly(*values: float):
    return pytest.approx(values if len(values) > 1 else values[0], rel=1e-3, abs=1e-6)


LOOP = f"""
%inside (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %n = f32[8]{{0}} negate(%q), backend_config={{"estimated_cycles":"{MILLISECOND}"}}
}}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %state = (s32[], f32[8]) parameter(0)
  {fusion("in.loop", 2)}
}}

%condition (state.1: (s32[], f32[8])) -> pred[] {{
  %state.1 = (s32[], f32[8]) parameter(0)
  %bound = s32[] constant(5)
}}
"""


def test_loops_count_in_full_and_the_inside_of_a_fusion_not_at_all():
    loop = "%w = (s32[], f32[8]) while(%p), condition=%condition, body=%body"
    assert milliseconds(module(fusion("a", 3), loop, others=LOOP)) == exactly(3 + 5 * 2, 0, 0)


def test_a_loop_inside_of_a_loop_counts_its_rounds_in_each_round():
    """4 rounds of 1 ms and of 3 rounds of 2 ms, with a permute of 3 ms beside, and a kernel."""
    moved = f"f32[{int(200e9 / 4 * 3e-3 / 4)}]{{0}}"  # from one of four neighbours
    cost = '{"custom_call_config":{"cost_estimate":{"flops":197000000000}}}'
    kernel = 'custom-call(%p), custom_call_target="tpu_custom_call", backend_config='
    ring = f"""
%round (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %s = ({moved}, {moved}) collective-permute-start(%p), channel_id=1
  {fusion("beside", 2)}
  %d = {moved} collective-permute-done(%s)
  %k = f32[8]{{0}} {kernel}{cost}
}}

%until (p.1: f32[8]) -> pred[] {{
  %p.1 = f32[8]{{0}} parameter(0)
  %bound.1 = s32[] constant(3)
}}
"""
    inner = "%v = (s32[], f32[8]) while(%state), condition=%until, body=%round"
    blocks = LOOP.replace(fusion("in.loop", 2), f"{fusion('in.loop', 1)}\n  {inner}")
    outer = "%w = (s32[], f32[8]) while(%p), condition=%condition, body=%body"
    hlo = module(outer, others=ring + blocks.replace("constant(5)", "constant(4)"))
    assert milliseconds(hlo) == exactly(4 * (1 + 3 * 2), 4 * 3 * 1, 4 * 3 * (3 - 2))
    assert dict(measure(hlo, 4).asynchronous) == {"collective-permute": 4 * 3}


def test_of_unknown_cycles_the_bytes_count():
    """Two milliseconds of HBM: as many values are written as read."""
    values = f"f32[{int(819e9 * 1e-3 / 4)}]{{0}}"
    said = 'backend_config={"estimated_cycles":"9223372036854775807"}'
    unknown = f"%a = {values} fusion(%q), kind=kLoop, calls=%inside, {said}"
    hlo = module(f"%q = {values} parameter(1)", unknown, fusion("b", 1), fusion("c"))
    assert milliseconds(hlo) == exactly(2 + 1, 0, 0)
    assert expect(hlo, LINKS).unknown == 1


def test_a_reshape_without_cycles_lays_an_array_out_anew():
    """Rows of 60 in tiles of 8 for rows of 80: two milliseconds of HBM. A bitcast moves nothing."""
    rows = int(819e9 * 1e-3 / 4 / 128 / 240)
    tiled = "{2,1,0:T(8,128)}"
    given, wanted = f"f32[{4 * rows},60,128]{tiled}", f"f32[{3 * rows},80,128]{tiled}"
    reshaped, seen = f"%a = {wanted} reshape(%q)", f"%b = {wanted} bitcast(%a)"
    hlo = module(f"%q = {given} parameter(1)", reshaped, seen)
    assert milliseconds(hlo) == exactly(2, 0, 0)
    assert expect(hlo, LINKS).unknown == 0


@pytest.mark.parametrize(
    ("flops", "size", "ms"), [(197e9, 819e4, 1.0), (197e8, 819e6, 1.0), (197e9, 2 * 819e6, 2.0)]
)
def test_a_kernel_takes_the_longer_of_products_and_bytes(flops, size, ms):
    cost = {"flops": int(flops), "transcendentals": 7, "bytes_accessed": int(size)}
    config = json.dumps({"custom_call_config": {"cost_estimate": cost}}, separators=(",", ":"))
    call = '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"'
    assert milliseconds(module(f"{call}, backend_config={config}")) == exactly(0, ms, 0)


GROUP = "replica_groups={{0,1,2,3}}, dimensions={0}"
GATHERED = f"f32[{ONE_MS_OF_LINKS}]{{0}}"


def test_a_synchronous_collective_is_waited_for():
    gather = f"%g = {GATHERED} all-gather(%p), channel_id=1, {GROUP}"
    assert milliseconds(module(fusion("a", 3), gather, fusion("b", 2))) == exactly(5, 0, 1)


@pytest.mark.parametrize(("between", "waiting"), [(0.25, 0.75), (3, 0)])
def test_a_pair_of_start_and_done_hides_behind_what_is_between(between, waiting):
    size = int(200e9 / 4 * 1e-3 / 4)  # fp32, all received, from one of four neighbours
    moved = f"f32[{size}]{{0}}"
    hlo = module(
        fusion("before", 4),
        f"%s = ({moved}, {moved}) collective-permute-start(%p), channel_id=1",
        fusion("between", between),
        f"%d = {moved} collective-permute-done(%s)",
        fusion("after", 4),
    )
    assert milliseconds(hlo) == exactly(8 + between, 0, waiting)


IN_PIECES = "".join(
    f"""
%piece.{number} (q.{number}: f32[8]) -> f32[8] {{
  %q.{number} = f32[8]{{0}} parameter(0)
  %g.{number} = {GATHERED} all-gather(%q.{number}), channel_id=1, {GROUP}, """
    f"""frontend_attributes={{chain_id="{{chain}}"}}
}}
"""
    for number in range(3)
)


def in_pieces(chain: int) -> str:
    text = IN_PIECES.replace("{chain}", str(chain))
    return text.replace("%piece.", f"%piece.{chain}.")


def test_a_collective_in_pieces_goes_on_in_the_fusions_that_carry_it():
    """As libtpu writes it: the same gather in a start, in a fusion with products, in a done."""
    others = in_pieces(7)
    pieces = [
        fusion("async-collective-start", 0, "piece.7.0"),
        fusion("products.and.piece", 0.5, "piece.7.1"),
        fusion("async-collective-done", 0, "piece.7.2"),
    ]
    assert milliseconds(module(*pieces, fusion("a", 4), others=others)) == exactly(4.5, 0, 0.5)
    hidden = [*pieces[:1], fusion("b", 0.6), *pieces[1:]]
    assert milliseconds(module(*hidden, others=others)) == exactly(1.1, 0, 0)


def test_two_collectives_share_the_links():
    """Each alone would be hidden: both begin at 0, the second arrives after 2 ms."""
    hlo = module(
        fusion("async-collective-start", 0, "piece.7.0"),
        fusion("async-collective-start.1", 0, "piece.8.0"),
        fusion("a", 1.5),
        fusion("async-collective-done", 0, "piece.7.2"),
        fusion("async-collective-done.1", 0, "piece.8.2"),
        others=in_pieces(7) + in_pieces(8),
    )
    assert milliseconds(hlo) == exactly(1.5, 0, 0.5)


ON_SPARSE_CORES = """
%called (q.1: bf16[VALUES]) -> bf16[ALL] {
  %q.1 = bf16[VALUES]{0} parameter(0)
  %t = (bf16[VALUES]{0}) tuple(%q.1)
  %q.2 = bf16[VALUES]{0} get-tuple-element(%t), index=0
  ROOT %work = bf16[ALL]{0} WORK
}, execution_thread="sparsecore"

%wrapped (q: bf16[VALUES]) -> bf16[ALL] {
  %q = bf16[VALUES]{0} parameter(0)
  ROOT %c = bf16[ALL]{0} custom-call(%q), custom_call_target="x", called_computations={%called}
}, execution_thread="sparsecore"
"""
"""Work of tpu7x's SparseCores as libtpu 0.0.52 writes it, with a scratch buffer of a gigabyte."""
SCRATCH = "(s32[268435456]{0}, s32[8]{0:S(8)})"
ASYNC = 'async_execution_thread="sparsecore", calls=%wrapped'


def on_sparse_cores(work: str, values: int, of: int, *between: str) -> str:
    shape = f"((bf16[{values}]{{0}}), bf16[{of}]{{0}}, {SCRATCH})"
    others = ON_SPARSE_CORES.replace("VALUES", str(values)).replace("ALL", str(of))
    return module(
        f"%s = ((), (), {SCRATCH}) async-start(), {ASYNC}",
        fusion("before", 5),
        f"%u = {shape} async-update(%s, %p)",
        *between,
        f"%d = bf16[{of}]{{0}} async-done(%u)",
        others=others.replace("WORK", work),
    )


@pytest.mark.parametrize("between", [0.25, 3])
def test_sparse_cores_start_with_what_they_read(between):
    """All of 4 chips: each has two links, over which both of its devices fetch a millisecond."""
    links, clock = Links(parse_topology("tpu7x:2x2x1")), CHIPS["tpu7x"].clock_hz
    of = int(2 * 100e9 * 1e-3 / 2 * 8 / 7)
    gather = "all-gather(%q.2), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"
    hlo = on_sparse_cores(gather, of // 8, of, fusion("between", between))
    found, scale = expect(hlo, links), 1.503e9 / clock  # of the cycles that ``fusion`` writes
    assert found.cycles_s * 1e3 == exactly((5 + between) * scale)
    assert found.waiting_s * 1e3 == pytest.approx(max(0, 1 - between * scale), rel=1e-3, abs=1e-6)
    traffic = measure(hlo, 8)
    assert (dict(traffic.collectives), dict(traffic.asynchronous)) == (
        {"all-gather": 1},
        {"all-gather": 1},
    )
    assert traffic.collective_bytes["all-gather"] == pytest.approx(2 * of * 7 / 8)


COPIED = f"f32[{int(819e9 * 1e-3 / 4)}]{{0}}"
"""What takes a millisecond to come from HBM."""


@pytest.mark.parametrize(("between", "waiting"), [(0.25, 0.75), (3, 0)])
def test_a_copy_to_vector_memory_hides_behind_what_is_between(between, waiting):
    in_vmem = COPIED.replace("}", ":S(1)}")
    hlo = module(
        f"%c = ({in_vmem}, {COPIED}, u32[]{{:S(2)}}) copy-start(%p)",
        fusion("between", between),
        f"%d = {in_vmem} copy-done(%c)",
        fusion("after", 1),
    )
    found = expect(hlo, LINKS)
    assert found.dma_s * 1e3 == exactly(waiting)
    assert found.seconds * 1e3 == exactly(between + waiting + 1)


@pytest.mark.parametrize(("between", "waiting"), [(0.5, 0.5), (3, 0)])
def test_what_comes_from_the_host_comes_over_pcie(between, waiting):
    """It does not hold up a copy from HBM, and of a stack one slice comes."""
    size = int(16e9 * 1e-3 / 4)
    stack = f"f32[9,{size}]{{1,0:T(8,128)S(5)}}"
    hlo = module(
        f"%h = (({stack}, s32[], s32[]), f32[1,{size}]{{1,0}}, u32[]) dynamic-slice-start(%p)",
        f"%c = ({COPIED}, {COPIED}, u32[]) copy-start(%p)",
        fusion("between", between),
        f"%h.1 = f32[1,{size}]{{1,0}} dynamic-slice-done(%h)",
        f"%c.1 = {COPIED} copy-done(%c)",
    )
    found = expect(hlo, LINKS)
    assert (found.host_s * 1e3, found.dma_s * 1e3) == exactly(waiting, 0)
    assert found.seconds * 1e3 == exactly(between + waiting)


def between_slices(opcode: str, operand: str, number: int, values: int = 8) -> str:
    told = (
        f'frontend_attributes={{_xla_host_transfer_rendezvous="sum_{number}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    shape = f"(f32[{values}]{{0}}, u32[], token[])"
    return f"%{opcode}.{number} = {shape} {opcode}({operand}), is_host_transfer=true, {told}"


@pytest.mark.parametrize(("between", "waiting"), [(0.5, 1.5), (3, 0)])
def test_other_slices_are_waited_for_where_their_values_are_needed(between, waiting):
    """Two sums over 2 slices: of each a millisecond's bytes come from the other slice."""
    values = int(3.125e9 * 1e-3 / 4)
    hlo = module(
        between_slices("send", "%p, %t", 1, values),
        between_slices("send", "%p, %t", 2, values),
        *(between_slices("recv", "%t", number) for number in (1, 2)),
        *(f"%sent.{n} = token[] send-done(%send.{n}), is_host_transfer=true" for n in (1, 2)),
        fusion("between", between),
        *(f"%got.{n} = (f32[8], token[]) recv-done(%recv.{n})" for n in (2, 1)),
    )
    found = expect(hlo, Links(parse_topology("v5e:2x2", 2)))
    assert found.dcn_s * 1e3 == exactly(waiting)
    assert found.seconds * 1e3 == exactly(between + waiting)
