"""--compile_only with the real TPU compiler, against figures worked out by hand."""

import json
import math
import re
import threading

import pytest

from tests.support.cli import run_program
from tests.support.marks import NEEDS_NEWER_LIBTPU, long, with_newer_libtpu
from tools.compile_only import command
from tools.compile_only.command import CompiledGraph, as_table, make_report
from tools.compile_only.compiler import REPLICATED, Compiled, Result, Value, hbm_needed, local_bytes
from tools.compile_only.expected import Links, expect
from tools.compile_only.explain import explain
from tools.compile_only.hlo import count_flops, measure
from xla_fsdp.tpu import parse_topology

# Of a width for which the TPU's tiles of 8 x 128 pad next to nothing.
WIDTH, DEPTH, BATCH, SIDE, PATCH, CLASSES = 512, 2, 64, 128, 16, 128
V5E_BATCH = 16
"""With 64, the compiler takes half as long again."""
TOKENS = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_blocks {DEPTH} --num_heads 4 --image_size {SIDE} "
    f"--patch_size {PATCH} --num_classes {CLASSES} --batch_size {BATCH}"
).split()


def compile_for(topology, *flags, code=0):
    where = f"run_vit_training.py --compile_only --json --tpu_topology {topology}".split()
    done = run_program(*where, *MODEL, *flags)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def parameter_sizes(depth=DEPTH):
    block = [
        3 * WIDTH**2,
        3 * WIDTH,
        WIDTH**2,
        WIDTH,
        4 * WIDTH**2,
        4 * WIDTH,
        4 * WIDTH**2,
        WIDTH,
        WIDTH,
        WIDTH,
        WIDTH,
        WIDTH,
    ]
    rest = [3 * PATCH**2 * WIDTH, WIDTH, TOKENS * WIDTH, WIDTH, WIDTH, CLASSES * WIDTH, CLASSES]
    return block * depth + rest


def step_flops(depth=DEPTH, batch=BATCH):
    """Forward, backward and, but for the last product of a block, forward again."""
    mlp_out = 2 * batch * TOKENS * 4 * WIDTH**2
    block = 2 * batch * (TOKENS * 12 * WIDTH**2 + 2 * TOKENS**2 * WIDTH)
    patch = 2 * batch * TOKENS * 3 * PATCH**2 * WIDTH
    head = 2 * batch * WIDTH * CLASSES
    return depth * (4 * block - mlp_out) + 2 * patch + 3 * head


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of --hlo_dir, which is not there yet."""
    return tmp_path_factory.mktemp("kept") / "new" / "hlo"


@pytest.fixture(scope="module")
def v5e(kept):
    flags = ["--precision", "bf16", "--batch_size", str(V5E_BATCH)]
    return compile_for("v5e:2x2", *flags, "--explain", "--hlo_dir", str(kept))


@pytest.fixture(scope="module")
def v5p():
    return compile_for("v5p:2x2x1")


@pytest.fixture(scope="module")
def tpu7x():
    return compile_for("tpu7x:2x2x1", "--precision", "bf16")


@pytest.fixture(scope="module")
def v6e_newer():
    return compile_for("v6e:2x2", "--precision", "bf16", "--tpu_compiler", "0.0.52")


@pytest.mark.parametrize(
    ("name", "peak", "devices", "libtpu"),
    [
        ("v5e", 197e12, 4, "0.0.21"),
        long("v5p", 459e12, 4, "0.0.21"),
        with_newer_libtpu("tpu7x", 2307e12, 8, "0.0.52"),
        with_newer_libtpu("v6e_newer", 918e12, 4, "0.0.52"),
    ],
)
def test_figures(name, peak, devices, libtpu, request):
    """Of 4 chips; ``peak`` is a chip's."""
    found, chips = request.getfixturevalue(name), 4
    batch = V5E_BATCH if name == "v5e" else BATCH
    assert found["versions"]["libtpu"] == libtpu
    parameters = sum(parameter_sizes())
    assert found["parameters"] == parameters
    assert (found["chips"], found["devices"]) == (chips, devices)
    images = batch * 3 * SIDE**2  # bytes
    # Of the patches' weights a shard of 64 rows lies in tiles of 128.
    padding = 3 * PATCH**2 * max(0, 128 * devices - WIDTH)
    # fp32 values, AdamW's two, all of it sharded.
    expected = (12 * (parameters + padding) + images) / devices
    assert found["argument_bytes"] == pytest.approx(expected, rel=0.02)
    assert found["output_bytes"] < found["argument_bytes"]  # the state again, without the images
    assert found["state_bytes"] == pytest.approx(12 * parameters / devices, rel=0.02)
    assert found["flops_per_chip"] == pytest.approx(step_flops(batch=batch) / chips, rel=0.05)
    assert found["fits"]
    assert found["state_bytes"] < found["peak_hbm_bytes"] < found["hbm_capacity_bytes"]
    assert 0 < found["roofline_mfu"] < 1
    assert found["roofline_step_s"] == max(
        found["compute_s"], found["hbm_s"], found["collective_s"]
    )
    assert found["roofline_step_s"] < found["expected_step_s"] < 20 * found["roofline_step_s"]
    at_peak_s = found["model_flops"] / chips / peak
    assert found["expected_mfu"] == pytest.approx(at_peak_s / found["expected_step_s"])
    assert found["expected_images_per_s"] == pytest.approx(batch / found["expected_step_s"])
    assert found["expected_unknown"] == 0
    assert 0 < found["expected_kernels_s"] < found["expected_step_s"]
    # Of 2 x 2 chips each has two neighbours, with links for four, or for six.
    unused = 2 if name.startswith(("v5e", "v6e")) else 3
    assert 0 < found["expected_waiting_s"] <= 1.0001 * unused * found["collective_s"]


def test_the_kept_module_is_the_one_that_was_told_of(v5e, kept):
    module = kept / "graph_1.hlo"
    assert {path.name for path in kept.iterdir()} == {"graph_1.hlo", "explain.png"}
    traffic = measure(module.read_text(), 4)
    assert traffic.hbm_bytes == v5e["hbm_bytes"]
    assert (
        expect(module.read_text(), Links(parse_topology("v5e:2x2"))).seconds
        == v5e["expected_step_s"]
    )


def test_collectives_may_share_a_channel(v5e, kept):
    """As TorchTPU's do: pieces of one are found by their chain, and all others are separate."""
    module, links = (kept / "graph_1.hlo").read_text(), Links(parse_topology("v5e:2x2"))
    one_channel, count = re.subn(r"channel_id=\d+", "channel_id=1", module)
    assert count > 20
    assert "chain_id" in module
    assert measure(one_channel, 4) == measure(module, 4)
    assert expect(one_channel, links) == expect(module, links)
    assert expect(module, links).waiting_s == v5e["expected_waiting_s"] > 0


def test_names_reach_the_compiled_step(v5e, kept):
    """By --explain: through the loop over the blocks, forward and backward."""
    told = v5e["explained"]
    by_module = told["seconds_by_module"]
    assert sum(by_module.values()) == pytest.approx(v5e["expected_step_s"])
    assert sum(told["seconds_by_kind"].values()) == pytest.approx(v5e["expected_step_s"])
    linear = {f"blocks.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert by_module.keys() >= linear | {"optimizer", "loss", "head", "norm", "patch_embed.proj"}
    assert by_module.get("unknown", 0) < 0.1 * v5e["expected_step_s"]
    assert len(told["costliest"]) == 20
    costs = explain((kept / "graph_1.hlo").read_text(), Links(parse_topology("v5e:2x2")))
    phases = {cost.phase for cost in costs if cost.module == "blocks.mlp.fc1"}
    assert phases == {"forward", "recompute", "backward"}
    assert (kept / "explain.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["v5e", with_newer_libtpu("tpu7x")])
def test_weights_are_gathered_twice_in_bf16(name, request):
    """Forward and again for the backward pass, each time what a device does not hold."""
    found = request.getfixturevalue(name)
    weights, missing = DEPTH * 12 * WIDTH**2, 1 - 1 / found["devices"]
    gathered = found["collective_bytes"]["all-gather"]
    assert gathered == pytest.approx(2 * weights * 2 * missing, rel=0.25)
    assert found["collectives"]["all-gather"] >= 2 * 4 * DEPTH


@pytest.mark.long
@NEEDS_NEWER_LIBTPU
def test_sparse_cores_of_tpu7x_gather_and_scatter(tpu7x):
    """Gradients are scattered in bf16, beside the products; so are most weights gathered."""
    weights = DEPTH * 12 * WIDTH**2
    scattered = tpu7x["collective_bytes"]["reduce-scatter"]
    assert scattered == pytest.approx(2 * weights * 7 / 8, rel=0.25)
    for kind in ("all-gather", "reduce-scatter"):
        assert tpu7x["asynchronous_collectives"][kind] >= 0.9 * tpu7x["collectives"][kind]
    assert "peak HBM per device" in as_table(tpu7x)
    assert re.search(r"^slice +tpu7x:2x2x1, 4 chips, 8 devices$", as_table(tpu7x), re.MULTILINE)


SMALL = "--num_blocks 1 --batch_size 32".split()
"""The nested form has a copy of each block in the graph, which takes the compiler its time."""


@pytest.mark.long
def test_nested():
    """A process a chip: the same state and work as SPMD, weights gathered, gradients scattered."""
    nested = compile_for("v5p:2x2x1", "--xla_fsdp", "nested", *SMALL)
    parameters = sum(parameter_sizes(depth=1))
    images = 32 * 3 * SIDE**2
    assert "nested FSDP (ZeRO-3)" in nested["sharding"]
    assert nested["fits"]
    assert nested["graphs"] == 1
    assert nested["state_bytes"] == pytest.approx(12 * parameters / 4, rel=0.02)
    assert nested["argument_bytes"] == pytest.approx((12 * parameters + images) / 4, rel=0.02)
    assert nested["flops_per_chip"] == pytest.approx(step_flops(depth=1, batch=32) / 4, rel=0.05)
    weights = 12 * WIDTH**2 * 4
    received = nested["collective_bytes"]
    assert received["all-gather"] == pytest.approx(2 * weights * 3 / 4, rel=0.25)
    assert received["reduce-scatter"] == pytest.approx(weights * 3 / 4, rel=0.25)
    assert received["all-reduce"] < 0.1 * received["reduce-scatter"]


@pytest.mark.long
def test_mesh_of_three_axes():
    """Two slices of 4 chips: each block's weights sharded over the 4, the batch over 4 pairs."""
    mesh = "--mesh_dcn 2 --mesh_fsdp 2 --mesh_tensor 2".split()
    found = compile_for("v5e:2x2", "--precision", "bf16", *mesh, *SMALL)
    assert "mesh dcn 2 x fsdp 2 x tensor 2" in found["sharding"]
    assert (found["slices"], found["chips"]) == (2, 8)
    parameters = sum(parameter_sizes(depth=1))
    images = 32 * 3 * SIDE**2
    assert found["argument_bytes"] == pytest.approx((12 * parameters + images) / 4, rel=0.03)
    assert found["state_bytes"] == pytest.approx(12 * parameters / 4, rel=0.02)
    # Between slices go gradients, of each device its quarter: bf16 as the blocks' products are.
    weights = 12 * WIDTH**2
    expected = (2 * weights + 4 * (parameters - weights)) / 4
    assert found["dcn_bytes"] == pytest.approx(expected, rel=0.2)
    assert found["dcn_s"] == pytest.approx(found["dcn_bytes"] / 3.125e9)


@pytest.mark.long
def test_accumulation(v5p):
    """Two micro-batches: twice a graph that adds to gradients, and one that updates with them."""
    found = compile_for("v5p:2x2x1", "--grad_accum_steps", "2")
    parameters = sum(parameter_sizes())
    images = BATCH * 3 * SIDE**2  # bytes
    assert found["fits"]
    assert (found["graphs"], found["distinct_graphs"]) == (3, 2)
    assert found["flops_per_chip"] == pytest.approx(v5p["flops_per_chip"], rel=0.001)
    # The update needs most: it is given weights, gradients and moments, all sharded. Beside it are
    # both micro-batches.
    assert found["argument_bytes"] == pytest.approx(16 * parameters / 4, rel=0.02)
    assert found["resident_bytes"] == pytest.approx(images / 4, rel=0.1)
    assert found["state_bytes"] == v5p["state_bytes"]
    # Gradients change in place: beside them and a pass's own there is no third copy.
    assert found["peak_hbm_bytes"] < v5p["peak_hbm_bytes"] + 4 * parameters / 4


TRACED = """HloModule step

%body (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %state = (s32[], bf16[8,4]) parameter(0)
  %x = bf16[8,4] get-tuple-element(%state), index=1
  %w = bf16[4,4] constant({...})
  %y = bf16[8,4] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %unused = bf16[4,4] dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %count = s32[] get-tuple-element(%state), index=0
  ROOT %next = (s32[], bf16[8,4]) tuple(%count, %y)
}

%condition (given: (s32[], bf16[8,4])) -> pred[] {
  %given = (s32[], bf16[8,4]) parameter(0)
  %reached = s32[] get-tuple-element(%given), index=0
  %bound = s32[] constant(3)
  ROOT %is_less = pred[] compare(%reached, %bound), direction=LT
}

ENTRY %main (p: (s32[], bf16[8,4])) -> s8[2,2] {
  %p = (s32[], bf16[8,4]) parameter(0)
  %loop = (s32[], bf16[8,4]) while(%p), condition=%condition, body=%body
  %whole = bf16[8,4] get-tuple-element(%loop), index=1
  %part = bf16[2,4] custom-call(%whole), custom_call_target="SPMDFullToShardShape"
  %keys = bf16[1,4] slice(%part), slice={[0:1], [0:4]}
  %kernel = s8[2,2] custom-call(%keys), custom_call_target="tpu_custom_call", backend_config=CONFIG
  ROOT %last = s8[2,2] dot(%kernel, %kernel), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize("element", ["%x", "%state#1"])
def test_flops_of_a_traced_step(element):
    """A loop as often as it runs, nothing that is not used, a kernel on each of four devices; an
    element of a tuple as older and newer compilers write it."""
    traced = TRACED.replace("dot(%x", f"dot({element}")
    config = '{"custom_call_config": {"body": "x", "cost_estimate": {"flops": 1000, "b": 1}}}'
    found = count_flops(traced.replace("CONFIG", config), int8_speedup=2)
    assert found == 3 * 2 * 8 * 4 * 4 + 4 * 1000 + 2 * 2 * 2 * 2 / 2


def test_bytes_of_a_device():
    """As XLA writes it: 8 devices, 4 parts of which each is on two; a compact list; the whole."""
    twice = "{devices=[2,2,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    chosen, unknown = Result(0, 1), Result(2, 0)
    values = [Value(64, twice), Value(64, chosen), Value(64, REPLICATED), Value(64, unknown)]
    assert local_bytes(values, {chosen: "{devices=[8,1]<=[8]}"}) == 16 + 8 + 64


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (
            "Used 17.12G of 15.75G hbm. Exceeded hbm capacity by 1.37G.\n\n    program 1.12G\n"
            "    arguments 16.00G",
            17.12 * 2**30,
        ),
        ("Used 33.50G of 15.75G hbm. [...] HLO temp 33.50G\n    arguments  0B", 43.5 * 2**30),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=68719476736) would exceed memory "
            "(size=17179869184) :: #allocation371 [shape = 'f32[4,2048,256,8192]', [...]",
            74 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (114.05G) exceeds available HBM (94.74G). [...]",
            124.05 * 2**30,
        ),
        ("Unsupported version: expected <= 7 but got 8", None),
    ],
)
def test_what_a_refusal_asks_for(message, asked):
    """libtpu's messages, shortened; 10 GiB of arguments, which the first one has counted."""
    found = hbm_needed(message, 10 * 2**30)
    assert found == (None if asked is None else int(asked))


@pytest.mark.long
def test_too_large_is_told(tmp_path):
    found = compile_for(
        "v5e:2x2", "--model", "vit_10b", "--embed_dim", "8192", "--num_blocks", "16", code=3
    )
    assert not found["fits"]
    state = 12 * found["parameters"] / 4
    assert found["peak_hbm_bytes"] > state > found["hbm_capacity_bytes"]
    assert found["hbm_capacity_bytes"] == math.floor(15.75 * 2**30)


@pytest.mark.long
def test_crash_of_libtpu_is_told():
    """libtpu 0.0.21 crashes where HBM is slightly too small (docs/evidence/findings.md)."""
    where = "run_vit_training.py --compile_only --tpu_topology v5e:16x16 --precision bf16".split()
    done = run_program(*where, "--model", "vit_120b", "--batch_size", "512")
    assert done.returncode == 2
    assert "error: libtpu crashed on this step (Check failed: preferred_offset" in done.stderr
    assert "more HBM than a chip has: use a smaller batch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_crash_of_libtpu_on_broken_graphs_is_told():
    """On v4 alone (docs/evidence/findings.md)."""
    where = "run_vit_training.py --compile_only --tpu_topology v4:2x2x1 --batch_size 8".split()
    broken = "--model vit_10b --num_blocks 2 --mark_step_after_forward".split()
    done = run_program(*where, *broken)
    assert done.returncode == 2
    assert "libtpu crashed on this step (Check failed: s_count.has_value()" in done.stderr
    assert "several graphs: drop --mark_step_after_forward" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_without_the_graphs_after_one_that_does_not_fit():
    topology = parse_topology("v5e:2x2")
    capacity = topology.chip.hbm_bytes
    refused = Compiled(False, None, None, None, 20 * 2**30, capacity, [], "", 2.0)
    graphs = [
        CompiledGraph(1, refused, None, None, 4e12, 2**30),
        CompiledGraph(2, None, None, None, 6e12, 0),
    ]
    report = make_report(
        topology=topology,
        graphs=graphs,
        model_flops=8e12,
        parameters=10,
        batch_size=4,
        input_shape=(3, 32, 32),
        precision="fp32",
        mesh={},
        sharding="",
        state_bytes=120,
        trace_s=1.0,
        load_average=2.0,
        cores=2,
        versions={},
    )
    assert not report["fits"]
    assert report["peak_hbm_bytes"] == 21 * 2**30
    assert (report["graphs"], report["distinct_graphs"]) == (3, 2)
    assert report["flops_per_chip"] == (4e12 + 2 * 6e12) / 4
    assert report["hbm_bytes"] is report["collectives"] is None
    assert report["roofline_step_s"] is report["expected_step_s"] is None
    assert "does not fit, needs at least 5.6 GB more" in as_table(report)
    assert as_table(report).splitlines()[-2].endswith("1.0 s, 2.0 s")
    busy = as_table(report | {"load_average": 7.25})
    told = "1.0 s, 2.0 s (load average 7.2 on 2 cores: this time cannot be compared)"
    assert busy.splitlines()[-2].endswith(told)


def test_what_takes_long_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(command, "_REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(command.os, "getloadavg", lambda: (10_000.0, 0, 0))
    printed = ""
    with command.reporting("compiling graph 1 of 2"):
        while printed.count("\n") < 3:
            printed += capsys.readouterr().err
    first, second, *_ = printed.splitlines()
    assert first.startswith("compiling graph 1 of 2 ... (load average 10000.0 on ")
    assert second.startswith("compiling graph 1 of 2: 0 min so far (load average 10000.0 on ")
    after = threading.active_count()
    with command.reporting("another"):
        assert threading.active_count() == after + 1
    assert threading.active_count() == after
