"""The peer of benchmarks/tpu_peer.py: the same training step written in JAX, compiled for a TPU.

    python benchmarks/tpu_peer_step.py --model vit_large_patch16_224 --tpu_topology v5e:2x4

Blocks are scanned and recomputed (jax.checkpoint), every array is sharded over all devices along
its largest dimension (FSDP by the partitioner), products are in bf16, weights and AdamW's moments
in fp32, as the program's. It is compiled by the same libtpu with the same flags, and prints what
that expects as one line of JSON. LIBTPU_INIT_ARGS is that of the program, if the caller sets it.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config_fields import local_path
from models.registry import open_model
from models.spec import ModelSpec
from tools.compile_only.compiler import JAX_WITHOUT_TPU, devices_of
from tools.compile_only.expected import Links, expect
from xla_fsdp.tpu import parse_topology

os.environ.update(JAX_WITHOUT_TPU)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Arrays = dict[str, Any]
HALF = jnp.bfloat16
AXIS = "fsdp"


@dataclass(frozen=True)
class Step:
    """What is computed, of the sizes of a plain ViT."""

    model: ModelSpec
    mesh: Mesh
    batch: int
    residual: Any
    """The dtype that blocks add their results in."""
    scores: Any
    """The dtype of attention's softmax."""

    # -- parameters -------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters' shapes; those of all blocks are stacked."""
        sizes, settings = self.model.sizes, self.model.settings
        width, hidden = sizes.embed_dim, sizes.hidden
        of_block = {
            "norm1": (2, width),
            "qkv": (width, 3 * width),
            "qkv_bias": (3 * width,),
            "proj": (width, width),
            "proj_bias": (width,),
            "norm2": (2, width),
            "fc1": (width, hidden),
            "fc1_bias": (hidden,),
            "fc2": (hidden, width),
            "fc2_bias": (width,),
        }
        tokens = sizes.num_tokens
        return {
            **{f"blocks.{key}": (sizes.depth, *shape) for key, shape in of_block.items()},
            "patch": (settings["patch_size"] ** 2 * 3, width),
            "patch_bias": (width,),
            **({"class_token": (1, width)} if tokens > sizes.num_patches else {}),
            "positions": (tokens, width),
            "norm": (2, width),
            "head": (width, sizes.num_classes),
            "head_bias": (sizes.num_classes,),
        }

    def lies(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Shard the largest dimension that the devices divide; blocks are not divided."""
        first = 1 if name.startswith("blocks.") else 0
        fit = [i for i in range(first, len(shape)) if shape[i] % self.mesh.size == 0]
        if not fit:
            return self.lies()
        largest = max(fit, key=lambda i: shape[i])
        return self.lies(*(AXIS if i == largest else None for i in range(len(shape))))

    # -- the model --------------------------------------------------------------------

    def block(self, x: jax.Array, weights: Arrays) -> tuple[jax.Array, None]:
        heads, width = self.model.sizes.num_heads, self.model.sizes.embed_dim
        whole = {
            key: lax.with_sharding_constraint(w.astype(HALF), self.lies()) if w.ndim > 1 else w
            for key, w in weights.items()
        }
        y = _normed(x, weights["norm1"])
        y = _linear(y, whole, "qkv").reshape(*y.shape[:2], 3, heads, width // heads)
        query, key, value = (y[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=self.scores)
        chances = jax.nn.softmax(scores * (width // heads) ** -0.5, axis=-1).astype(HALF)
        y = jnp.einsum("bhqk,bkhd->bqhd", chances, value).reshape(x.shape)
        x = x + _linear(y, whole, "proj")
        y = _linear(_normed(x, weights["norm2"]), whole, "fc1")
        x = x + _linear(jax.nn.gelu(y, approximate=False), whole, "fc2")
        return lax.with_sharding_constraint(x, self.lies(AXIS)), None

    def logits(self, weights: Arrays, images: jax.Array) -> jax.Array:
        patch, (_, height, across) = (
            self.model.settings["patch_size"],
            self.model.sizes.input_shape,
        )
        rows, columns = height // patch, across // patch
        cut = images.reshape(len(images), 3, rows, patch, columns, patch)
        cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(images), rows * columns, -1)
        x = _linear(cut.astype(HALF), {k: w.astype(HALF) for k, w in weights.items()}, "patch")
        if "class_token" in weights:
            first = weights["class_token"].astype(HALF)[None].repeat(len(x), 0)
            x = jnp.concatenate([first, x], 1)
        x = (x + weights["positions"].astype(HALF)).astype(self.residual)
        x = lax.with_sharding_constraint(x, self.lies(AXIS))
        stacked = {
            key.removeprefix("blocks."): w for key, w in weights.items() if key.startswith("blocks")
        }
        x, _ = lax.scan(jax.checkpoint(self.block), x, stacked)
        x = _normed(x, weights["norm"])
        x = x[:, 0] if "class_token" in weights else x.mean(1)
        return _linear(x, {k: weights[k].astype(HALF) for k in ("head", "head_bias")}, "head")

    def loss(self, weights: Arrays, images: jax.Array, labels: jax.Array) -> jax.Array:
        chances = jax.nn.log_softmax(self.logits(weights, images).astype(jnp.float32))
        return -jnp.take_along_axis(chances, labels[:, None], 1).mean()

    # -- the step ---------------------------------------------------------------------

    def __call__(self, state: tuple, images: jax.Array, labels: jax.Array, lr: jax.Array) -> tuple:
        weights, first, second, count = state
        loss, grads = jax.value_and_grad(self.loss)(weights, images, labels)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
        scale, count = jnp.minimum(1.0, 1.0 / (norm + 1e-6)), count + 1
        new: tuple[Arrays, Arrays, Arrays] = ({}, {}, {})
        for key, weight in weights.items():
            grad = grads[key] * scale
            one = new[1][key] = 0.9 * first[key] + 0.1 * grad
            two = new[2][key] = 0.999 * second[key] + 0.001 * grad**2
            update = one / (1 - 0.9**count) / (jnp.sqrt(two / (1 - 0.999**count)) + 1e-8)
            new[0][key] = weight * (1 - lr * 0.1) - lr * update
        return (*new, count), loss, norm


def _normed(x: jax.Array, scale_and_shift: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    apart = x - x.mean(-1, keepdims=True)
    unit = apart * lax.rsqrt((apart**2).mean(-1, keepdims=True) + 1e-6)
    return (unit * scale_and_shift[0] + scale_and_shift[1]).astype(HALF)


def _linear(x: jax.Array, weights: Arrays, name: str) -> jax.Array:
    return x @ weights[name] + weights[f"{name}_bias"].astype(HALF)


def compile_step(step: Step) -> tuple[Any, float]:
    """Return the compiled step and the seconds that the compiler took."""

    def like(shape: tuple[int, ...], sharding: NamedSharding, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shardings = {key: step.sharding(key, shape) for key, shape in step.shapes().items()}
    weights = {key: like(shape, shardings[key]) for key, shape in step.shapes().items()}
    scalar = like((), step.lies())
    images = like((step.batch, *step.model.sizes.input_shape), step.lies(AXIS))
    labels = like((step.batch,), step.lies(AXIS), jnp.int32)
    results = ((shardings,) * 3 + (step.lies(),), step.lies(), step.lies())
    jitted = jax.jit(step.__call__, donate_argnums=0, out_shardings=results)
    lowered = jitted.lower((weights, weights, weights, scalar), images, labels, scalar)
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_large_patch16_224", help="a plain ViT; %(default)s")
    parser.add_argument("--tpu_topology", default="v5e:2x4", help="slice; default: %(default)s")
    parser.add_argument("--batch_size", type=int, default=1024, help="images; %(default)s")
    for name, what in (("residual", "of what blocks add to"), ("scores", "of attention's softmax")):
        kinds = ("fp32", "bf16")
        parser.add_argument(f"--{name}_dtype", choices=kinds, default="fp32", help=f"{what}; fp32")
    parser.add_argument("--hlo", type=local_path, help="file to keep the scheduled module in")
    args = parser.parse_args()
    topology = parse_topology(args.tpu_topology)
    dtypes = {"fp32": jnp.float32, "bf16": HALF}
    devices = sorted(devices_of(topology), key=lambda device: device.id)
    step = Step(
        open_model(args.model, {}),
        Mesh(np.array(devices), (AXIS,)),
        args.batch_size,
        dtypes[args.residual_dtype],
        dtypes[args.scores_dtype],
    )
    compiled, seconds = compile_step(step)
    hlo = compiled.runtime_executable().hlo_modules()[0].to_string()
    if args.hlo:
        args.hlo.write_text(hlo)
    expected = expect(hlo, Links(topology))
    figures = {
        "expected_step_s": expected.seconds,
        "expected_waiting_s": expected.waiting_s,
        "expected_unknown": expected.unknown,
        "peak_hbm_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "compile_s": seconds,
        "parameters": sum(int(np.prod(shape)) for shape in step.shapes().values()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
