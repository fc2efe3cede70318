"""All uses of JAX's undocumented interface by which a Pallas kernel is lowered without a TPU.

JAX is imported only when it is called.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WRITTEN_FOR = {"jax": "0.7.1", "jaxlib": "0.7.1"}


def lower_for_tpu(
    function: Callable, arrays: Sequence[Any], cost: Mapping[str, int]
) -> tuple[str, str]:
    """Lower a function that calls one Pallas kernel, of arrays of these shapes, on any machine.

    Returns the configuration of the Mosaic call, JSON, with its ``cost``, and the StableHLO module
    as text. As for export: in the second newest format, as libtpu 0.0.21 does not read the newest.
    """
    import jax
    from jax._src import cloud_tpu_init
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    # On a TPU's host JAX would ask that TPU, which is not JAX's here, for its software's version.
    on_tpu_host = cloud_tpu_init.running_in_cloud_tpu_vm
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    for_export = mlir.LoweringParameters(for_export=True)
    try:
        traced = jax.jit(function).trace(*arrays)
        lowered = traced.lower(lowering_platforms=("tpu",), _private_parameters=for_export)
    finally:
        cloud_tpu_init.running_in_cloud_tpu_vm = on_tpu_host
    module = lowered.compiler_ir()
    operations = [op for each in module.body.operations for op in each.body.blocks[0].operations]
    (call,) = (op for op in operations if op.name == "stablehlo.custom_call")
    config = json.loads(call.attributes["backend_config"].value)
    config["custom_call_config"]["cost_estimate"] = dict(cost)
    with module.context:
        call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
    text = module.operation.get_asm(enable_debug_info=False)  # with it, it would name the caller
    return json.dumps(config), text
