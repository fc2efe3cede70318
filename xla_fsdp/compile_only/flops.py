"""Floating-point operations of matrix products in a StableHLO module, loops counted in full."""

from __future__ import annotations

import json
import math
from typing import Any

from xla_fsdp.jax_private import (
    contracted_dimensions,
    first_integer,
    is_int8,
    kernel_output_dimension,
    shape_of,
)


def count_flops(module: Any, int8_pace: int = 1) -> float:
    """Count the whole program, before it is divided over devices: two for each multiply-add.

    Recomputation under gradient checkpointing is in the program and so in the count. Of int8
    numbers, ``int8_pace`` operations count as one.
    """
    functions = {f.name.value: f for f in module.body.operations}
    return _of_block(functions["main"].regions[0].blocks[0], functions, int8_pace)


def _of_block(block: Any, functions: dict[str, Any], pace: int) -> float:
    total = 0.0
    for op in _live(block):
        if op.name == "stablehlo.dot":
            total += 2.0 * math.prod(shape_of(op.results[0])) * shape_of(op.operands[0])[-1]
        elif op.name == "stablehlo.dot_general":
            total += _dot(op) / (pace if is_int8(op.operands[0]) else 1)
        elif op.name == "stablehlo.convolution":
            total += _convolution(op)
        elif op.name == "stablehlo.custom_call":
            total += _kernel(op)
        elif op.name == "func.call":
            called = functions[op.attributes["callee"].value]
            total += _of_block(called.regions[0].blocks[0], functions, pace)
        elif op.name == "stablehlo.while":
            condition, body = (region.blocks[0] for region in op.regions)
            total += _rounds(condition, functions) * _of_block(body, functions, pace)
        else:
            total += sum(_of_block(b, functions, pace) for r in op.regions for b in r.blocks)
    return total


def _live(block: Any) -> list[Any]:
    """Return the operations whose results are used, the last one first.

    The compiler drops the others, such as the gradient of the images.
    """
    live: list[Any] = []
    dead = set()
    for operation in reversed(list(block.operations)):
        op = operation.operation
        users = [use.owner.operation for result in op.results for use in result.uses]
        if len(op.results) and all(user in dead for user in users):
            dead.add(op)
        else:
            live.append(op)
    return live


def _dot(op: Any) -> float:
    left = shape_of(op.operands[0])
    contracted = math.prod(left[d] for d in contracted_dimensions(op))
    return 2.0 * math.prod(shape_of(op.results[0])) * contracted


def _convolution(op: Any) -> float:
    kernel = shape_of(op.operands[1])
    per_output = math.prod(kernel) // kernel[kernel_output_dimension(op)]
    return 2.0 * math.prod(shape_of(op.results[0])) * per_output


def _kernel(op: Any) -> float:
    """Return the FLOPs that a Pallas kernel's call tells of itself, on all devices together.

    xla_fsdp.attention.kernels writes them there.
    """
    if op.attributes["call_target_name"].value != "tpu_custom_call":
        return 0.0
    cost = json.loads(op.attributes["backend_config"].value)["custom_call_config"]["cost_estimate"]
    devices = 1.0
    part = op.operands[0]
    if getattr(part.owner, "name", "") == "stablehlo.custom_call":  # taken from a sharded tensor
        devices = math.prod(shape_of(part.owner.operands[0])) / math.prod(shape_of(part))
    return devices * float(cost["flops"])


def _rounds(condition: Any, functions: dict[str, Any]) -> int:
    """Return the bound of a loop's counter, which begins at 0 and grows by 1 (xla_fsdp.scan)."""
    bounds = [1]
    for operation in condition.operations:
        op = operation.operation
        if op.name == "stablehlo.constant":
            bounds.append(first_integer(op))
        elif op.name == "func.call":
            called = functions[op.attributes["callee"].value]
            bounds.append(_rounds(called.regions[0].blocks[0], functions))
    return max(bounds)
