"""--compile_only --backend torchtpu: the real backend, torch_tpu and libtpu, without a TPU."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cli import run_program

WIDTH, BATCH, SIDE, PATCH, CLASSES, CHIPS = 256, 16, 64, 16, 128, 4
TOKENS = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_heads 4 --image_size {SIDE} --patch_size {PATCH} "
    f"--num_classes {CLASSES} --batch_size {BATCH} --precision bf16"
).split()
OF_A_BLOCK = 12 * WIDTH**2 + 13 * WIDTH
AROUND = (3 * PATCH**2 + 1 + TOKENS + 2) * WIDTH + (WIDTH + 1) * CLASSES


FSDP2 = ("--fsdp", "fsdp2")


def compiled(blocks: int, *flags: str, code: int = 0) -> dict:
    where = f"--backend torchtpu --compile_only --json --tpu_topology v6e:2x2 --num_blocks {blocks}"
    done = run_program("run_vit_training.py", *where.split(), *MODEL, *flags, warm=False)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("hlo")


@pytest.fixture(scope="module")
def two_blocks(kept):
    """A step of FSDP2."""
    return compiled(2, *FSDP2, "--hlo_dir", str(kept))


def runs_by_name(report: dict) -> Counter[str]:
    runs: Counter[str] = Counter()
    for program in report["programs"]:
        runs[program["name"]] += program["runs"]
    return runs


@pytest.fixture(scope="module")
def kept_of_one(tmp_path_factory):
    return tmp_path_factory.mktemp("hlo of one")


@pytest.fixture(scope="module")
def one_program(kept_of_one):
    """The same step as one program, which is the default."""
    return compiled(2, "--explain", "--hlo_dir", str(kept_of_one))


@pytest.fixture(params=["two_blocks", "one_program"])
def step(request):
    return request.getfixturevalue(request.param)


def groups_in(folder: Path) -> set[str]:
    """The groups of devices of all collectives of a step as one program."""
    (module,) = folder.glob("graph_*.hlo")
    return set(re.findall(r"replica_groups=(\S+),", module.read_text()))


def test_figures(step):
    found = step
    parameters = 2 * OF_A_BLOCK + AROUND
    assert found["parameters"] == parameters
    assert (found["chips"], found["devices"]) == (CHIPS, CHIPS)
    assert found["versions"] == {"torch_tpu": "0.2.0", "libtpu": "0.0.52"}
    assert "mesh fsdp 4" in found["sharding"]
    # fp32 values and AdamW's two, and its counters.
    assert found["state_bytes"] == pytest.approx(12 * parameters / CHIPS, rel=0.01)
    assert found["fits"]
    assert found["state_bytes"] < found["peak_hbm_bytes"] < 20 * found["state_bytes"]
    assert sum(each["seconds"] for each in found["programs"]) == pytest.approx(
        found["expected_step_s"]
    )
    assert 0 < found["expected_waiting_s"] < found["expected_step_s"]


def test_work(step):
    """Forward, forward again and backward of each block but for what the compiler saves itself."""
    block = 2 * BATCH * (TOKENS * 12 * WIDTH**2 + 2 * TOKENS**2 * WIDTH)
    mlp_out = 2 * BATCH * TOKENS * 4 * WIDTH**2
    patch = 2 * BATCH * TOKENS * 3 * PATCH**2 * WIDTH
    head = 2 * BATCH * WIDTH * CLASSES
    expected = 2 * (4 * block - mlp_out) + 2 * patch + 3 * head
    assert step["flops_per_chip"] == pytest.approx(expected / CHIPS, rel=0.05)


def test_collectives_are_programs_of_their_own(two_blocks, kept):
    """Each block is gathered twice, in bf16, and its gradients are scattered, in fp32; the root is
    gathered once. libtpu makes sums of them all: its default without torch_xla's options."""
    runs = runs_by_name(two_blocks)
    assert runs["distributed.all_gather_into_tensor"] == 2 * 2 + 1
    assert runs["distributed.reduce_scatter_tensor"] == 2 + 1
    received = sum(two_blocks["collective_bytes"].values())
    blocks, root = 2 * OF_A_BLOCK, AROUND
    gathered = 2 * (2 * blocks + root)
    scattered = 4 * (blocks + root)
    assert received == pytest.approx(2 * 3 / 4 * (gathered + scattered), rel=0.1)
    assert not any(two_blocks["asynchronous_collectives"].values())
    modules = [path.read_text() for path in kept.glob("graph_*.hlo")]
    assert len(modules) == two_blocks["distinct_graphs"]


def test_products_of_bf16_are_at_the_default_precision(two_blocks, kept):
    """With more, SDPA's kernel of torch_tpu 0.2.0 does not compile for heads of 160."""
    modules = [path.read_text() for path in kept.glob("graph_*.hlo")]
    assert any(" convolution(" in module for module in modules)
    assert not any("highest" in module for module in modules)


CALL = re.compile(r'"estimated_cycles":"(\d+)","custom_call_config"')


def test_attention_is_this_programs_kernels(two_blocks, kept):
    """One in the graph of the forward pass, and both in that of the backward pass. Of the backward
    kernel, which a grid of three writes, a third computes: 5 products, the forward one 2."""
    assert "whole attention" in two_blocks["sharding"]
    found = [CALL.findall(path.read_text()) for path in kept.glob("graph_*.hlo")]
    (forward,), (again, backward) = sorted(filter(None, found), key=len)
    assert forward == again
    assert 1 < int(backward) / int(forward) < 4
    assert 0 < two_blocks["expected_kernels_s"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "calls", "flags"),
    [("plain", 0, ""), ("flash", 3, ""), ("whole", 3, "--native_resolution --token_budget 256")],
)
def test_other_attention(form, calls, flags, tmp_path):
    words = f"--attention {form} --hlo_dir {tmp_path} {flags}".split()
    found = compiled(1, *FSDP2, *words)
    assert f"{form} attention" in found["sharding"]
    modules = [path.read_text() for path in tmp_path.glob("graph_*.hlo")]
    assert sum(len(CALL.findall(module)) for module in modules) == calls


def matrices(width: int) -> list[tuple[int, int]]:
    """Rows and columns of a block's four matrices."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def test_products_of_bytes(one_program, tmp_path):
    """With --matmul int8 a block's products forward, and again, are of int8 with int32 sums; its
    matrices are gathered twice, a byte a number and four a row in place of two a number."""
    words = ["--matmul", "int8", "--hlo_dir", str(tmp_path)]
    found = compiled(2, "--fsdp", "simple", *words)
    assert "linear layers in int8" in found["sharding"]
    (module,) = (path.read_text() for path in tmp_path.glob("graph_*.hlo"))
    products = [line for line in module.splitlines() if " convolution(" in line]
    assert sum("= s32[" in line for line in products) == 4 + 3  # one of them is not needed again
    less = sum(2 * 2 * (rows * columns - 4 * rows) for rows, columns in matrices(WIDTH))
    gathered = [each["collective_bytes"]["all-gather"] for each in (one_program, found)]
    assert gathered[0] - gathered[1] == pytest.approx(less * (CHIPS - 1) / CHIPS, rel=0.1)


@pytest.mark.long
def test_inputs_of_blocks_in_the_hosts_memory(tmp_path):
    found = compiled(2, "--fsdp", "simple", "--grad_ckpt", "offload", "--hlo_dir", str(tmp_path))
    assert found["fits"]
    (module,) = (path.read_text() for path in tmp_path.glob("graph_*.hlo"))
    # The inputs of both blocks, which the loops carry.
    saved = rf"bf16\[2,{BATCH // CHIPS},{TOKENS},{WIDTH}\]\S*S\(5\)"
    assert re.search(saved, module)


def test_whole_step_is_one_program(one_program, kept_of_one):
    """With collectives of all devices, and all of its state donated: each parameter and AdamW's two
    moments and count of it."""
    assert runs_by_name(one_program) == {"step": 1}
    assert groups_in(kept_of_one) == {"{{0,1,2,3}}"}
    (module,) = (path.read_text() for path in kept_of_one.glob("graph_*.hlo"))
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", module)[1]
    assert aliases.count("may-alias") >= 3 * (2 * 12 + 6)
    # Each block is gathered twice, in bf16, and its gradients are scattered, in fp32.
    blocks, root = 2 * OF_A_BLOCK, AROUND
    received = sum(one_program["collective_bytes"].values())
    # libtpu makes sums of two gradients of this small model: of patches, and of the MLP's last.
    sums = 4 * (3 * PATCH**2 * WIDTH + 2 * 4 * WIDTH**2)
    moved = 2 * (2 * blocks + root) + 4 * (blocks + root) + sums
    assert received == pytest.approx(3 / 4 * moved, rel=0.1)


OF_A_BLOCK_BY_NAME = {
    f"blocks.{part}" for part in "norm1 attn attn.qkv attn.proj norm2 mlp.fc1 mlp.fc2".split()
}


def test_modules_of_the_whole_step(one_program, kept_of_one):
    """Those of blocks, which are a loop, among them; each forward, recomputed and backward."""
    explained = one_program["explained"]
    seconds = explained["seconds_by_module"]
    assert sum(seconds.values()) == pytest.approx(one_program["expected_step_s"])
    assert OF_A_BLOCK_BY_NAME | {"patch_embed.proj", "head", "loss", "optimizer"} <= seconds.keys()
    assert seconds["unknown"] < 0.05 * sum(seconds.values())
    (module,) = (path.read_text() for path in kept_of_one.glob("graph_*.hlo"))
    for part in OF_A_BLOCK_BY_NAME:
        # Of what the last product gives, the backward pass needs nothing.
        for phase in ("forward", "recompute", "backward")[:: 2 if part == "blocks.mlp.fc2" else 1]:
            assert f'"[{part}_{phase}]"' in module


def plain(folder: Path) -> list[str]:
    """The instructions of a step as one program without names of them, and without metadata."""
    (module,) = (path.read_text() for path in folder.glob("graph_*.hlo"))
    names = r"metadata=\{.*?\}|%[\w.\-]+|[\w.\-]+(?=: )"
    head, _, instructions = re.sub(names, "", module).partition("\nFileNames")
    return [head, *instructions.partition("\n\n (")[2].splitlines()]


def test_names_change_nothing_else(one_program, kept_of_one, tmp_path):
    without = compiled(2, "--fsdp", "simple", "--hlo_dir", str(tmp_path))
    assert without["expected_step_s"] == one_program["expected_step_s"]
    assert len(plain(tmp_path)) > 1000
    assert plain(tmp_path) == plain(kept_of_one)


def test_tensor_parallelism(tmp_path):
    """Also in loops, weights are gathered between devices that have the same part of them, and
    tokens between those that share images; sums of both, by whatever collective."""
    batch = 32
    flags = f"--fsdp simple --mesh_tensor 2 --batch_size {batch} --hlo_dir {tmp_path}"
    report = compiled(2, *flags.split())
    assert report["mesh"] == {"dcn": 1, "fsdp": 2, "domain": 1, "tensor": 2}
    parameters = 2 * OF_A_BLOCK + AROUND
    assert report["state_bytes"] == pytest.approx(12 * parameters / CHIPS, rel=0.01)
    (module,) = (path.read_text() for path in tmp_path.glob("graph_*.hlo"))
    same_part, tensor, everyone = "{{0,2},{1,3}}", "{{0,1},{2,3}}", "{{0,1,2,3}}"
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(.*?replica_groups=(\S+),", module)
    over: dict[str, set[int]] = {same_part: set(), tensor: set(), everyone: set()}
    for sizes, groups in gathered:
        over[groups].add(math.prod(map(int, sizes.split(","))))
    of_parts = {width * WIDTH**2 // 2 for width in (3, 1, 4)}  # of qkv, proj, and the MLP's both
    assert of_parts <= over[same_part]
    assert over[tensor] == {batch // 2 * TOKENS * WIDTH}
    assert groups_in(tmp_path) == {*over}


@pytest.mark.long
def test_modules_of_unrolled_blocks(tmp_path):
    words = ("--explain", "--grad_ckpt", "selective")
    found = compiled(2, *words, "--hlo_dir", str(tmp_path))
    explained = found["explained"]
    seconds = explained["seconds_by_module"]
    assert sum(seconds.values()) == pytest.approx(found["expected_step_s"])
    of_a_block = {f"blocks.{part}" for part in "attn attn.qkv attn.proj mlp.fc1 mlp.fc2".split()}
    assert of_a_block | {"patch_embed.proj", "head", "loss", "optimizer"} <= seconds.keys()
    assert seconds.get("unknown", 0.0) < 0.2 * sum(seconds.values())
    phases = {row["phase"] for row in explained["costliest"] if row["module"] in of_a_block}
    assert {"backward"} <= phases <= {"forward", "recompute", "backward"}
    assert (tmp_path / "explain.png").stat().st_size > 1000


@pytest.mark.long
def test_processes_that_are_not_there(tmp_path):
    """A bigger slice: 8 chips, 7 of them without a process here."""
    report = compiled(1, "--tpu_topology", "v5e:2x4", "--hlo_dir", str(tmp_path))
    assert (report["devices"], report["graphs"]) == (8, 1)
    assert groups_in(tmp_path) == {"{{0,1,2,3,4,5,6,7}}"}
    assert report["state_bytes"] == pytest.approx(12 * (OF_A_BLOCK + AROUND) / 8, rel=0.01)


@pytest.mark.long
def test_a_step_that_does_not_fit():
    """What is saved of 16,384 images of 256 tokens alone fills a device."""
    words = "--tpu_topology v5e:1x1 --patch_size 4 --batch_size 16384"
    found = compiled(2, *words.split(), code=3)
    assert (found["fits"], found["expected_step_s"]) == (False, None)
    assert found["peak_hbm_bytes"] > 15.75 * 2**30


@pytest.mark.long
def test_programs_are_linear_in_depth(two_blocks):
    three, two = runs_by_name(compiled(3, *FSDP2)), runs_by_name(two_blocks)
    four = runs_by_name(compiled(4, *FSDP2))
    assert four - three == three - two
    assert not two - three
    assert (three - two)["distributed.all_gather_into_tensor"] == 2


@pytest.mark.long
def test_muon_exchanges_whole_matrices(tmp_path):
    """In slots for four matrices each: those of the MLPs; queries, keys and values, the patches'
    and a projection; the other projection and the head's."""
    found = compiled(2, "--fsdp", "simple", "--optimizer", "muon", "--hlo_dir", str(tmp_path))
    assert runs_by_name(found) == {"step": 1}
    assert groups_in(tmp_path) == {"{{0,1,2,3}}"}
    assert found["collectives"]["all-to-all"] == 2 * 3
    long_sides = 4 * WIDTH, 3 * WIDTH, WIDTH
    there_and_back = 2 * 2 * WIDTH * sum(long_sides)  # in bf16
    assert found["collective_bytes"]["all-to-all"] == 3 / 4 * there_and_back
