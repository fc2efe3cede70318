"""A traced step: its collectives against arithmetic, kinds, groups and elements of each; how
patches are embedded."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.cli import TINY_MODEL, TINY_RUN
from tests.support.resolved import on_gpus
from torch_fsdp.devices import Cpu, Tpu
from torch_fsdp.shards import Layout
from torch_fsdp.simple_fsdp import SimpleFsdpBackend
from torch_fsdp.step_graph import code_of
from training.objectives.registry import open_objective
from training.schedule import StepRates
from training.step import shard_and_optimize, train_step

PROCESSES, BLOCKS = 3, 2
FLAGS = [*TINY_MODEL, *TINY_RUN, "--batch_size", "24", "--fake_data", "--fsdp", "simple"]


@contextlib.contextmanager
def fake_processes(processes, rank=0):
    """A group of processes that are not there: their collectives return at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WORLD_SIZE", str(processes))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        try:
            yield
        finally:
            dist.destroy_process_group()


def traced(*flags, images=8, rows=16):
    """The graph of a step of a process, and the shapes of the whole parameters."""
    run = on_gpus([*FLAGS, "--compile", *flags])
    backend = SimpleFsdpBackend(run, Cpu())
    model = shard_and_optimize(run, backend)
    objective = open_objective(run, backend, lambda text: None)
    model.train()
    batches = [
        {
            "image": torch.zeros(images // count, 3, rows, 16, dtype=torch.uint8),
            "target": torch.zeros(images // count, dtype=torch.int64),
        }
        for count in [run.config.data.grad_accum_steps]
        for images in [run.config.data.batch_size // run.mesh.batch_shards]
        for _ in range(count)
    ]
    train_step(model, objective, backend, 0, batches, rates=StepRates(1e-3), max_norm=1.0)
    backend.close()
    (graph,) = backend._graphs._graphs.values()
    shapes = {name: p.shape for name, p in run.model.meta.named_parameters()}
    return graph.traced, shapes


def nodes_that_run(graph):
    """Each node of a graph, and how often it runs: in a loop, once for each block."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.scan:
            for inner, times in nodes_that_run(getattr(graph, node.args[0].target)):
                yield inner, BLOCKS * times
        else:
            yield node, 1


def collectives(graph):
    """How often each kind runs, and the elements of its whole tensors, by kind and group."""
    found, elements = Counter(), Counter()
    for node, times in nodes_that_run(graph):
        kind = getattr(node.target, "__name__", "").partition(".")[0]
        if kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            group = dist.distributed_c10d._resolve_process_group(node.args[-1])
            ranks = tuple(dist.get_process_group_ranks(group))
            if kind != "all_reduce":
                assert node.args[-2] == len(ranks)
            whole = node if kind == "all_gather_into_tensor" else node.args[0]
            found[kind, ranks] += times
            elements[kind, ranks] += times * whole.meta["val"].numel()
    return found, elements


def padded(shape, shards=PROCESSES):
    """The elements of all shards of a parameter, along dimension 0 or that of the positions."""
    dim = 1 if shape[0] == 1 and len(shape) > 2 and shape[1] % shards == 0 else 0
    return shape.numel() // shape[dim] * -(-shape[dim] // shards) * shards


@pytest.mark.parametrize(
    ("flags", "passes", "recomputes", "is_loop"),
    [
        ("", 1, 1, True),
        ("--grad_accum_steps 2", 2, 1, True),
        ("--no_grad_ckpt", 1, 0, False),
        ("--grad_accum_steps 2 --grad_ckpt selective", 2, 1, False),
        ("--zero_dp_strategy 2", 1, 0, False),
    ],
)
def test_collectives_of_a_step(flags, passes, recomputes, is_loop):
    with fake_processes(PROCESSES):
        graph, shapes = traced(*flags.split())
        found, elements = collectives(graph)
    everyone = tuple(range(PROCESSES))
    in_blocks = {name for name in shapes if name.startswith("blocks.")}
    assert len(in_blocks) == BLOCKS * 12
    # A loop gathers norms and biases of all blocks together, once.
    together = {name for name in in_blocks if is_loop and len(shapes[name]) == 1}
    fewer = len(together) - len(together) // BLOCKS
    times = {name: 1 + recomputes * (name in in_blocks - together) for name in shapes}
    assert found == {
        ("all_gather_into_tensor", everyone): passes * (sum(times.values()) - fewer),
        ("reduce_scatter_tensor", everyone): passes * (len(shapes) - fewer),
        ("all_reduce", everyone): 2,  # of the loss and of the gradient's norm
    }
    assert elements == {
        ("all_gather_into_tensor", everyone): passes
        * sum(times[name] * padded(shape) for name, shape in shapes.items()),
        ("reduce_scatter_tensor", everyone): passes * sum(map(padded, shapes.values())),
        ("all_reduce", everyone): 2,
    }


@pytest.mark.parametrize(("images", "passes"), [(126, 2), (64, 1)])
def test_few_images_are_embedded_by_a_product(images, passes):
    with fake_processes(PROCESSES):
        flags = f"--batch_size {PROCESSES * images} --grad_accum_steps {passes}"
        graph, _ = traced(*flags.split())
    convolutions = [node for node, _ in nodes_that_run(graph) if "convolution" in str(node.target)]
    assert bool(convolutions) == (images // passes >= 64)


def test_muon_exchanges_slots_of_equal_size():
    """Slots of 3 processes: for two matrices of each shape in the blocks, one of the embedding and
    one of the head, largest first."""
    code = set()
    for rank in range(PROCESSES):
        with fake_processes(PROCESSES, rank):
            graph, shapes = traced("--optimizer", "muon")
            code.add(graph.code)
            exchanges = [
                node
                for node in graph.graph.nodes
                if node.target is torch.ops._c10d_functional.all_to_all_single.default
            ]
            for node in exchanges:
                _, received, sent, group = node.args
                assert received == sent == [node.meta["val"].shape[0] // PROCESSES] * PROCESSES
                group = dist.distributed_c10d._resolve_process_group(group)
                assert dist.get_process_group_ranks(group) == [*range(PROCESSES)]
    assert len(code) == 1  # all processes must run one program
    assert shapes["blocks.0.mlp.fc1.weight"] == (128, 32)
    assert shapes["patch_embed.proj.weight"] == (32, 3, 4, 4)
    assert shapes["head.weight"] == (10, 32)
    # Sides that are sharded are multiples of 3.
    one_way = [
        2 * 3 * 129 * 33,  # (128, 32), (128, 32), (32, 128); (32, 128), (96, 32), (96, 32)
        3 * 48 * 33,  # (32, 48), (32, 32), (32, 32)
        3 * 32 * 12,  # (10, 32)
    ]
    elements = sorted(node.meta["val"].numel() for node in exchanges)
    assert elements == sorted(size // PROCESSES for size in [*one_way, *one_way])


DOMAIN, WIDTH, PREFIX, PATCHES, IMAGES = 2, 32, 1, 8, 12


@pytest.mark.parametrize("is_loop", [True, False])
@pytest.mark.parametrize("form", ["ulysses", "ring"])
def test_collectives_between_processes_that_share_images(form, is_loop):
    """Of two groups, 12 images each, of which a process has 8 of 16 patches and the class token."""
    flags = f"--mesh_domain {DOMAIN} --domain_attention {form} --class_token --global_pool token"
    flags += "" if is_loop else " --no_grad_ckpt"
    sent, calls = Counter(), Counter()
    with fake_processes(4):
        graph, _ = traced(*flags.split(), images=IMAGES, rows=8)
        for node, times in nodes_that_run(graph):
            kind = getattr(node.target, "__name__", "").partition(".")[0]
            if kind in ("all_to_all_single", "rotate"):
                elements = node.args[0].meta["val"].numel()
                sent[kind, elements] += times
            if kind == "all_to_all_single":
                group = dist.distributed_c10d._resolve_process_group(node.args[3])
                assert dist.get_process_group_ranks(group) == [0, 1]
                assert node.args[1] == node.args[2] == [1] * DOMAIN
            elif kind == "rotate":
                assert list(node.args[1]) == [0, 1, 2, 3]
                assert node.args[2] == DOMAIN
            elif kind in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                calls[node.args[-2]] += 1
    assert calls.keys() == {4}  # parameters are sharded over all
    forward = BLOCKS * (2 if is_loop else 1)  # computed again in the backward pass
    if form == "ulysses":  # of queries, keys and values; of the output, and gradients of both
        tokens = IMAGES * (PREFIX + PATCHES) * WIDTH
        assert sent == {
            ("all_to_all_single", 3 * tokens): forward + BLOCKS,
            ("all_to_all_single", tokens): forward + BLOCKS,
        }
    else:  # keys and values go to the other process, and so do their gradients, and back
        pair = 2 * IMAGES * PATCHES * WIDTH
        assert sent == {("rotate", pair): (DOMAIN - 1) * forward + (2 * DOMAIN - 1) * BLOCKS}


DIVIDED = (
    "attn.qkv.weight attn.qkv.bias attn.proj.weight mlp.fc1.weight mlp.fc1.bias mlp.fc2.weight"
)
"""The parameters of a block that "tensor" shards."""


def test_collectives_with_tensor_parallelism():
    """Matrices go between processes that have the same part of them, tokens between those of a
    "tensor" group, in each half of a block there and back."""
    with fake_processes(4):
        graph, shapes = traced("--mesh_tensor", "2")
        found, elements = collectives(graph)
    everyone, same_part, tensor = (0, 1, 2, 3), (0, 2), (0, 1)
    in_blocks = {name for name in shapes if name.startswith("blocks.")}
    divided = {name for name in in_blocks if name.endswith(tuple(DIVIDED.split()))}
    assert len(divided) == BLOCKS * 6
    matrices = {name for name in divided if len(shapes[name]) == 2}
    others = shapes.keys() - divided

    # Of the two halves: forward, again in the backward pass, and backward; and after all blocks.
    tokens = 12 * 16 * 32
    of_halves = BLOCKS * 2 * 3 + 1
    assert found == {
        ("all_gather_into_tensor", same_part): 2 * len(matrices) + 2,
        ("reduce_scatter_tensor", same_part): len(matrices) + 2,
        ("all_gather_into_tensor", everyone): len(others) - (BLOCKS - 1) * 6,
        ("reduce_scatter_tensor", everyone): len(others) - (BLOCKS - 1) * 6,
        ("all_gather_into_tensor", tensor): of_halves,
        ("reduce_scatter_tensor", tensor): of_halves,
        ("all_reduce", everyone): 3,  # of the loss, the gradient's norm, and whether to skip
    }
    of_parts = {name: shapes[name].numel() // 2 for name in divided}
    of_others = sum(padded(shapes[name], 4) for name in others)
    assert elements == {
        ("all_gather_into_tensor", same_part): sum(of_parts.values())
        + sum(of_parts[name] for name in matrices),
        ("reduce_scatter_tensor", same_part): sum(of_parts.values()),
        ("all_gather_into_tensor", everyone): of_others,
        ("reduce_scatter_tensor", everyone): of_others,
        ("all_gather_into_tensor", tensor): of_halves * tokens,
        ("reduce_scatter_tensor", tensor): of_halves * tokens,
        ("all_reduce", everyone): 3,
    }


@pytest.mark.parametrize("flags", ["--mesh_tensor 2", "--mesh_dcn 2"])
def test_all_processes_trace_the_same_graph(flags):
    """Which process it is, and what its groups are called, is not in it."""
    codes = set()
    for rank in range(4):
        with fake_processes(4, rank):
            graph, _ = traced(*flags.split(), "--mlp_dropout", "0.1")
            codes.add(code_of(graph))
    assert len(codes) == 1


@pytest.mark.parametrize(
    "flags", ["", "--matmul int8", "--matmul fp8 --grad_ckpt none", "--gather_dtype fp8"]
)
def test_bytes_of_gathered_matrices(flags):
    """A byte a number, and a factor of four for each row, in place of two bytes a number; gradients
    are reduced as without the flag."""
    with fake_processes(PROCESSES):
        graph, shapes = traced("--precision", "bf16", *flags.split())
    found, is_flag_set = Counter(), bool(flags)
    for node, times in nodes_that_run(graph):
        kind = getattr(node.target, "__name__", "").partition(".")[0]
        if kind == "all_gather_into_tensor":
            found[kind] += times * node.meta["val"].nbytes
        elif kind == "reduce_scatter_tensor":
            assert node.args[0].meta["val"].dtype == torch.float32
            found[kind] += times * node.args[0].meta["val"].numel()
    expected = 0
    for name, shape in shapes.items():
        in_block, rows = name.startswith("blocks."), padded(torch.Size((shape[0], 1)))
        recomputed = in_block and len(shape) > 1 and "none" not in flags
        is_rounded = in_block and len(shape) > 1 and is_flag_set
        size = padded(shape) + 4 * rows if is_rounded else 2 * padded(shape)
        expected += size * (2 if recomputed else 1)
    assert found["all_gather_into_tensor"] == expected
    assert found["reduce_scatter_tensor"] == sum(map(padded, shapes.values()))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.int8), ("meta", torch.float8_e4m3fn)])
def test_fp8_is_gathered_as_int8_on_the_cpu_alone(device, dtype):
    """On a TPU, a view of all bytes in another dtype would be a pass over them."""
    with fake_processes(PROCESSES):
        everyone = dist.distributed_c10d._get_default_group()
        layout = Layout.of(
            torch.Size((12, 4)), everyone, torch.bfloat16, torch.float32, PROCESSES, Cpu()
        )
        shard = torch.empty(4, 4, dtype=torch.float8_e4m3fn, device=device)
        graph = make_fx(lambda x: layout.gather(x), tracing_mode="fake")(shard).graph
    (gather,) = (node for node in graph.nodes if "all_gather" in str(node.target))
    assert gather.meta["val"].dtype == dtype
    *_, whole, _ = graph.nodes
    assert whole.meta["val"].dtype == torch.float8_e4m3fn
    assert whole.meta["val"].shape == (12, 4)


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_what_loops_take_and_give(reduce_dtype):
    """Norms and biases of a block are one row; gradients are as they are reduced."""
    with fake_processes(PROCESSES):
        graph, shapes = traced("--precision", "bf16", "--reduce_dtype", reduce_dtype)
    forward, backward = graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.scan
    )
    block = [shape for name, shape in shapes.items() if name.startswith("blocks.0.")]
    matrices = [shape for shape in block if len(shape) > 1]
    together = sum(shape.numel() for shape in block if len(shape) == 1)
    for loop in (forward, backward):
        taken = [node.meta["val"].shape for node in loop.args[2]]
        assert taken.count((BLOCKS, together)) == 1
        assert len(taken) == 1 + 1 + len(matrices) + (loop is backward)  # of each its number
    (output,) = getattr(graph, backward.args[0].target).graph.find_nodes(op="output")
    _, *gradients = [node.meta["val"] for node in output.args[0]]
    row, *of_matrices = gradients
    assert (row.shape, row.dtype) == ((together,), torch.bfloat16)
    reduced = {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce_dtype]
    assert [each.dtype for each in of_matrices] == [reduced] * len(matrices)


@pytest.mark.parametrize(
    ("chip", "shape", "scattered", "in_rows"),
    [
        ("TPU7x", (4, 16, 24), (64, 24), True),
        ("TPU7x", (4, 20, 24), (4, 20, 24), False),  # no whole tiles of 8 rows
        ("TPU7x", (4, 16), (64,), False),
        ("TPU v6e", (4, 16, 24), (64, 24), False),
    ],
)
def test_layout_of_what_is_scattered(chip, shape, scattered, in_rows):
    class Slice(Tpu):
        name = chip

    parts = torch.arange(4 * 20 * 24.0)[: torch.Size(shape).numel()].view(shape)
    graph = make_fx(lambda x: Slice().to_scatter(x), tracing_mode="fake")(parts)
    constraints = graph.graph.find_nodes(op="call_function", target=torch.ops.vit.row_major.default)
    assert len(constraints) == in_rows
    for node in constraints:  # what it computes, without a TPU to lay it out
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    assert graph(parts).equal(parts.reshape(scattered))
