"""--explain: what it says of modules made by hand, and of a real step."""

import json

import pytest

from tests.support.cli import TINY_MODEL, run_program
from tests.unit.tools.test_expected_step import GATHERED, GROUP, LINKS, MILLISECOND, exactly
from tools.compile_only.expected import Links, expect
from tools.compile_only.explain import UNKNOWN, explain, explained_json, explained_table, scope_in
from tools.compile_only.hlo import Instruction, products_of
from xla_fsdp.tpu import parse_topology


@pytest.mark.parametrize(
    ("left", "right", "result", "how", "flops"),
    [
        ([64, 32], [32, 16], [64, 16], "dim_labels=bf_io->bf", 64 * 32 * 16),
        ([5, 64, 32], [16, 32, 1], [5, 64, 16], "window={size=1}, dim_labels=0bf_oi0->0bf", 163840),
        # Weights of 3 x 8 heads: all but one place of the window meets padding.
        (
            [1, 6, 64, 1],
            [3, 8, 16, 64],
            [3, 6, 16, 8],
            "window={size=3x8 pad=2_2x7_7 rhs_reversal=1x1}, dim_labels=0bf1_01oi->0bf1",
            3 * 8 * 6 * 64 * 16,
        ),
        # Patches of 4 x 4, of 3 channels.
        (
            [2, 3, 16, 16],
            [10, 3, 4, 4],
            [2, 10, 4, 4],
            "window={size=4x4 stride=4x4}, dim_labels=bf01_oi01->bf01",
            2 * 10 * 16 * 48,
        ),
        # The batch as a dilated dimension.
        (
            [6, 64, 32],
            [6, 32, 16],
            [6, 64, 16],
            "window={size=6 stride=5 pad=0_0 lhs_dilate=6}, dim_labels=0bf_0io->0bf",
            6 * 64 * 32 * 16,
        ),
    ],
)
def test_products_are_counted_as_they_are_multiplied(left, right, result, how, flops):
    shapes = (f"bf16{sizes} ".replace(", ", ",") for sizes in (left, right, result))
    *operands, each = (
        Instruction("c", "convolution", shape, f"{shape}(), {how}") for shape in shapes
    )
    each.operands = operands
    assert products_of(each) == [(2 * flops, each)]


def named(name: str) -> str:
    return f'metadata={{op_name="[loss_forward].1/{name}.2/aten__mm"}}'


def cycles(ms: float) -> str:
    return f'backend_config={{"estimated_cycles":"{round(ms * MILLISECOND)}"}}'


SIDE = 4096
MATRIX = f"bf16[{SIDE},{SIDE}]{{1,0}}"
MODULE = f"""HloModule step

%with.product (a: {MATRIX}, b: {MATRIX}) -> {MATRIX} {{
  %a = {MATRIX} parameter(0)
  %b = {MATRIX} parameter(1)
  %small = {MATRIX} exponential(%a), {named("[blocks.mlp.act_forward]")}
  %c = {MATRIX} convolution(%small, %b), dim_labels=bf_io->bf, {named("[blocks.mlp.fc2_forward]")}
  ROOT %d = {MATRIX} add(%c, %c), {named("[blocks_forward]")}
}}

%turned (e: {MATRIX}) -> {MATRIX} {{
  %e = {MATRIX} parameter(0)
  ROOT %f = {MATRIX} transpose(%e), dimensions={{1,0}}
}}

%weighted (g: {MATRIX}) -> {MATRIX} {{
  %g = {MATRIX} parameter(0)
  %h = {MATRIX} exponential(%g), {named("[blocks.attn_recompute]")}
  ROOT %i = {MATRIX} add(%h, %h), {named("[blocks_recompute]")}
}}

ENTRY %main (p: {MATRIX}, q: {MATRIX}) -> {MATRIX} {{
  %p = {MATRIX} parameter(0)
  %q = {MATRIX} parameter(1)
  %x = {MATRIX} fusion(%p, %q), kind=kOutput, calls=%with.product, {cycles(1)}
  %y = {MATRIX} fusion(%x), kind=kLoop, calls=%turned, {cycles(0.5)}
  %z = {MATRIX} fusion(%y), kind=kLoop, calls=%weighted, {cycles(2)}
  %u = {MATRIX} fusion(%z), kind=kLoop, calls=%with.product, {named("[optimizer_update]")}
  %s = {GATHERED} all-gather(%u), channel_id=1, {GROUP}, {named("[head_backward]")}
  %lost = {MATRIX} negate(%s), {cycles(0.25)}
}}
"""


def scope_of(cost):
    return cost.module, cost.phase


def test_what_is_told_of_a_module():
    module = MODULE.replace("%lost = ", "%apart = s8[] iota(), iota_dimension=0\n  %lost = ")
    module = module.replace("negate(%s)", "negate(%apart)")
    found = explain(module, LINKS, times=3)
    costs = {cost.instruction: cost for cost in found}
    assert sum(cost.seconds for cost in costs.values()) == pytest.approx(
        3 * expect(module, LINKS).seconds
    )
    product = costs["x"]
    assert scope_of(product) == ("blocks.mlp.fc2", "forward")  # the product's, not the root's
    assert (product.kind, product.bound, product.runs) == ("product", "products", 3)
    assert product.seconds * 1e3 == exactly(3)
    assert product.share_of_ideal == pytest.approx(2 * SIDE**3 / 197e12 / 1e-3, rel=1e-3)
    copy = costs["y"]
    assert (copy.kind, copy.bound, copy.share_of_ideal) == ("layout copy", "layout", None)
    assert scope_of(copy) == ("blocks.mlp.fc2", "forward")  # of what it is given
    scores = costs["z"]
    assert (scores.kind, *scope_of(scores)) == ("softmax", "blocks.attn", "recompute")
    assert scores.bound == "vector units"  # its 64 MiB take HBM less than a tenth of its time
    wait = costs["s"]
    assert (wait.kind, wait.bound) == ("collective waited for", "waiting")
    assert (scope_of(wait), wait.seconds * 1e3) == (("head", "backward"), exactly(3))
    assert scope_of(costs["lost"]) == UNKNOWN
    explained = explained_json(found)
    assert explained["seconds_by_kind"]["softmax"] * 1e3 == exactly(6)
    assert "blocks.mlp.fc2" in explained_table(explained)


TINY = (
    "run_vit_training.py --compile_only --json --tpu_topology v5e:1x1 --precision bf16 "
    "--embed_dim 256 --num_blocks 2 --num_heads 2 --image_size 128 --patch_size 16 "
    "--num_classes 128 --batch_size 16 --attention sdpa"
).split()


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    done = run_program(*TINY, "--explain", "--hlo_dir", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.long
def test_products_of_the_compiled_step_are_those_of_the_program(explained):
    """What the compiler's convolutions count, against what was traced."""
    report, folder = explained
    costs = explain((folder / "graph_1.hlo").read_text(), Links(parse_topology("v5e:1x1")))
    counted = (
        sum(cost.seconds * cost.share_of_ideal for cost in costs if cost.share_of_ideal) * 197e12
    )
    assert counted == pytest.approx(report["flops_per_chip"], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "distinct"),
    [
        ("--xla_fsdp nested", 1),
        ("--mesh_tensor 2", 1),
        ("--grad_accum_steps 4", 2),  # of all passes, and of the update
    ],
)
def test_every_product_is_named_and_the_graph_is_the_same(flags, distinct):
    """Without a loop over the blocks, with products of tensor parallelism, with several graphs."""
    where = "--compile_only --tpu_topology v5e:2x2 --model vit_10b --batch_size 64".split()
    traces = []
    for more in ([], ["--explain"]):
        command = [
            "tests/fakes/traced_graphs.py",
            "4",
            *where,
            *TINY_MODEL,
            *flags.split(),
            *more,
        ]
        done = run_program(*command, warm=False)
        assert done.returncode == 0, done.stderr
        traces.append(json.loads(done.stdout))
    plain, with_names = traces
    assert with_names["texts"] == plain["texts"]
    assert with_names["distinct"] == plain["distinct"] == distinct
    found = [scope_in(" ".join(names)) for names in with_names["products"]]
    assert None not in found
    modules = {scope.module for scope in found} - {"blocks.attn", "blocks.mlp"}
    linear = {f"blocks.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    around = {"patch_embed.proj", "head"}
    assert modules == (around if "tensor" in flags else {*around, *linear})
    assert {scope.phase for scope in found} == {"forward", "recompute", "backward"}
