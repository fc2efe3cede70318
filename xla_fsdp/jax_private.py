"""All uses of the undocumented interface of jax and jaxlib, but for those that lower a kernel
(``tpu_attention/jax_private.py``).

JAX is imported only when these functions are called, because ``compile_only`` must first set the
environment that keeps it off the TPU. MLIR modules, operations and values are jaxlib's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tpu_attention.jax_private import WRITTEN_FOR as WRITTEN_FOR

# -- StableHLO modules ----------------------------------------------------------------


def stablehlo_of(hlo: bytes) -> Any:
    """Return the StableHLO module of a serialized HLO module, with the names of operations."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        return ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(hlo))


def text_of(hlo: bytes, *, with_names: bool = True) -> str:
    """Return a serialized HLO module as text, with or without the origins of operations."""
    from jax._src.lib import xla_client

    options = xla_client._xla.HloPrintOptions()
    options.print_metadata = with_names
    return xla_client.XlaComputation(hlo).get_hlo_module().to_string(options)


def mark_main(
    module: Any,
    arguments: Callable[[int], str],
    results: Sequence[str | None],
    donated: dict[int, int],
) -> None:
    """Write the shardings of arguments, by their numbers, and of results into the module's main
    function, in XLA's notation; None where the compiler chooses. ``donated`` maps an argument to
    the result that takes its memory."""
    from jax._src.lib.mlir import ir

    with module.context:
        (main,) = (f for f in module.body.operations if f.name.value == "main")
        integer = ir.IntegerType.get_signless(32)
        argument_marks = [
            {"mhlo.sharding": ir.StringAttr.get(arguments(number))}
            for number in range(len(main.arguments))
        ]
        for number, result in donated.items():
            argument_marks[number]["tf.aliasing_output"] = ir.IntegerAttr.get(integer, result)
        result_marks = [
            {"mhlo.sharding": ir.StringAttr.get(mark)} if mark else {} for mark in results
        ]
        for name, marks in (("arg_attrs", argument_marks), ("res_attrs", result_marks)):
            main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(mark) for mark in marks])


def module_of(text: str) -> Any:
    """Return the StableHLO module that is written so."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        return ir.Module.parse(text)


# -- the compiler ---------------------------------------------------------------------


def compile_for(
    devices: Sequence[Any],
    numbers: Any,
    module: Any,
    chosen_by_compiler: list[bool],
    dump_to: str = "",
) -> Any:
    """Compile a module for devices of a compile-only client; returns the executable.

    ``numbers`` is the array (replicas, partitions) of the devices' ids, in the mesh's order;
    ``chosen_by_compiler``: whether it chooses the sharding, for each result; ``dump_to``: the
    folder for the modules of its passes, as text. Raises jaxlib's own error if the compiler
    refuses.
    """
    from jax._src.lib import xla_client
    from jax._src.lib.mlir.dialects import hlo
    from jaxlib import _jax

    replicas, partitions = numbers.shape
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    build = options.executable_build_options
    build.use_spmd_partitioning = partitions > 1
    build.allow_spmd_sharding_propagation_to_output = chosen_by_compiler
    build.num_replicas, build.num_partitions = replicas, partitions
    build.device_assignment = xla_client.DeviceAssignment.create(numbers)
    if dump_to:
        build.debug_options.xla_dump_to = dump_to
        build.debug_options.xla_dump_hlo_as_text = True
    # In a format that other versions read, too: libtpu 0.0.52 refuses plain bytecode.
    portable = xla_client._xla.mlir.serialize_portable_artifact(
        module.operation.get_asm(binary=True, enable_debug_info=True), hlo.get_current_version()
    )
    return devices[0].client.compile(portable, _jax.DeviceList(tuple(devices)), options)


def result_shardings(executable: Any) -> list[str]:
    """Return the sharding of each result of an executable, in XLA's notation."""
    from jax._src.lib import xla_client

    shardings = executable.get_output_shardings() or []
    return [str(xla_client.HloSharding.from_proto(sharding)) for sharding in shardings]
