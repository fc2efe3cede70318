"""The compiler's figures of one training step, as a table to read and as JSON."""

import math
from dataclasses import dataclass
from typing import Any

from tools.compile_only.compiler import Compiled
from tools.compile_only.expected import Expected
from tools.compile_only.hlo import Traffic
from xla_fsdp.tpu import Topology

_GIB = 2**30
Report = dict[str, Any]
"""The figures of a step by their names in ``--json``."""


@dataclass(frozen=True)
class CompiledGraph:
    """One of the graphs of a step, and what is known of it."""

    runs: int
    """How often it runs in a step."""
    compiled: Compiled | None
    """None if an earlier graph does not fit."""
    traffic: Traffic | None
    """None if this graph does not fit."""
    expected: Expected | None
    """None if this graph does not fit."""
    flops: float
    """Operations of the whole slice in one run, at the throughput of bf16 products."""
    resident_bytes: int
    """Bytes on a device of what is there meanwhile without being an argument."""


def make_report(
    *,
    topology: Topology,
    graphs: list[CompiledGraph],
    model_flops: float,
    batch_size: int,
    **facts: Any,
) -> Report:
    """Combine the graphs of a step; ``model_flops`` are those of the whole slice.

    Bytes and seconds are a device's. The memory is that of the graph that needs most (resident: on
    the device meanwhile, in the peak, but not among the arguments), all else the sum over the
    graphs. What follows from a schedule is None if a graph does not fit: that has none.
    """
    chip = topology.chip
    peak, largest, compiled = max(
        (
            (graph.resident_bytes + graph.compiled.peak_bytes, graph, graph.compiled)
            for graph in graphs
            if graph.compiled
        ),
        key=lambda each: each[0],
    )
    flops = sum(graph.runs * graph.flops for graph in graphs)
    traffic, expected, is_scheduled = Traffic(), Expected(), True
    for graph in graphs:
        if graph.traffic is None or graph.expected is None:
            is_scheduled = False
            continue
        traffic.add(graph.traffic, graph.runs)
        expected = expected.plus(graph.expected, graph.runs)

    compute_s = flops / topology.devices / chip.peak_flops
    hbm_s = traffic.hbm_bytes / chip.hbm_bandwidth
    collective_s = sum(traffic.collective_bytes.values()) / chip.ici_bandwidth
    dcn_s = traffic.dcn_bytes / chip.dcn_bandwidth
    # All four at once, each at its best: no step can be shorter.
    roofline_s = max(compute_s, hbm_s, collective_s, dcn_s)
    expected_s = expected.seconds or math.inf  # 0 if no graph has a schedule
    products_s = model_flops / topology.devices / chip.peak_flops  # of the model alone, at peak
    scheduled = {
        "hbm_bytes": traffic.hbm_bytes,
        "collective_bytes": dict(traffic.collective_bytes),
        "dcn_bytes": traffic.dcn_bytes,
        "collectives": dict(traffic.collectives),
        "asynchronous_collectives": dict(traffic.asynchronous),
        "hbm_s": hbm_s,
        "collective_s": collective_s,
        "dcn_s": dcn_s,
        "roofline_step_s": roofline_s,
        "roofline_mfu": products_s / roofline_s,
        "expected_step_s": expected_s,
        "expected_mfu": products_s / expected_s,
        "expected_images_per_s": batch_size / expected_s,
        "expected_kernels_s": expected.kernels_s,
        "expected_waiting_s": expected.waiting_s,
        "expected_dma_s": expected.dma_s,
        "expected_host_s": expected.host_s,
        "expected_dcn_s": expected.dcn_s,
        "expected_unknown": expected.unknown,
    }
    return {
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "batch_size": batch_size,
        **facts,
        "graphs": sum(graph.runs for graph in graphs),
        "distinct_graphs": len(graphs),
        "fits": is_scheduled and peak <= compiled.capacity_bytes,
        "peak_hbm_bytes": peak,
        "hbm_capacity_bytes": compiled.capacity_bytes,
        "resident_bytes": largest.resident_bytes,
        "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes,
        "temporary_bytes": compiled.temporary_bytes,
        "flops_per_chip": flops / topology.chips,
        "model_flops": model_flops,
        "compute_s": compute_s,
        "compile_s": sum(graph.compiled.seconds for graph in graphs if graph.compiled),
        **(scheduled if is_scheduled else dict.fromkeys(scheduled)),
    }


def as_table(report: Report) -> str:
    def gib(name: str) -> str:
        return "" if report[name] is None else f"{report[name] / _GIB:.2f} GiB"

    def ms(name: str) -> str:
        return f"{report[name] * 1e3:.1f} ms"

    to_spare = (report["hbm_capacity_bytes"] - report["peak_hbm_bytes"]) / 1e9
    if report["fits"]:
        verdict = f"fits, {to_spare:.1f} GB to spare"
    elif to_spare > 0:  # the user has set a limit
        verdict = "does not fit in what LIBTPU_INIT_ARGS leaves"
    else:
        verdict = f"does not fit by {-to_spare:.1f} GB or more"
    slices, chips, several = report["slices"], report["chips"], report["graphs"] > 1
    devices = report["devices"]
    unit = "chip" if devices == chips else "device"
    rows = {
        "slice" if slices == 1 else f"{slices} slices": (
            f"{report['topology']}, {chips} chip"
            + ("s" if chips > 1 else "")
            + (f", {devices} devices" if devices > chips else "")
        ),
        "model": f"{report['parameters']:,} parameters, global batch {report['batch_size']}",
        "sharding": report["sharding"],
    }
    if several:
        rows["graphs a step"] = (
            f"{report['graphs']}, {report['distinct_graphs']} different; below, memory "
            "of the largest, all else of the step"
        )
    rows |= {
        "verdict": verdict,
        f"HBM a {unit}, peak": f"{gib('peak_hbm_bytes')} of {gib('hbm_capacity_bytes')}",
        "  arguments": gib("argument_bytes"),
        "  of these, state": gib("state_bytes"),
        "  outputs": gib("output_bytes"),
        "  temporaries": gib("temporary_bytes"),
    }
    if several:
        rows["  resident beside it"] = gib("resident_bytes")
    rows["FLOPs a chip"] = f"{report['flops_per_chip']:.3e}, at peak {ms('compute_s')}"

    if report["expected_step_s"] is not None:
        rows[f"HBM traffic a {unit}"] = f"{gib('hbm_bytes')}, at peak {ms('hbm_s')}"
        rows[f"collectives a {unit}"] = f"at peak {ms('collective_s')}"
        for kind, size in sorted(report["collective_bytes"].items()):
            count, asynchronous = (
                report[name][kind] for name in ("collectives", "asynchronous_collectives")
            )
            rows[f"  {kind}"] = f"{size / _GIB:.2f} GiB in {count}, {asynchronous} asynchronous"
        if slices > 1:
            rows["between slices (DCN)"] = f"{gib('dcn_bytes')}, at peak {ms('dcn_s')}"
        parts = {
            "kernels": "expected_kernels_s",
            "waiting for collectives": "expected_waiting_s",
            "for DMA": "expected_dma_s",
            "for the host's memory": "expected_host_s",
            "for other slices": "expected_dcn_s",
        }
        within = ", ".join(f"{text} {ms(name)}" for text, name in parts.items() if report[name])
        how = "by the compiler's cycles" + (f"; of it {within}" if within else "")
        if report["expected_unknown"]:
            how += f"; {report['expected_unknown']} instructions by their bytes"
        if report["topology"].startswith("tpu7x:"):
            error = "not compared with a measured step"
        elif report["topology"].startswith("v6e:"):
            error = "13 points too low for both published runs on v6e"
        else:
            error = "within 3 points for half of 15 published runs"
        rows |= {
            "shortest step": f"{ms('roofline_step_s')} (roofline)",
            "highest MFU": f"{100 * report['roofline_mfu']:.1f} %",
            "expected step": f"{ms('expected_step_s')} ({how})",
            "expected MFU": f"{100 * report['expected_mfu']:.1f} % ({error}: docs/tpu.md)",
            "expected images/s": f"{report['expected_images_per_s']:.4g}",
        }
    rows["trace, compile"] = f"{report['trace_s']:.1f} s, {report['compile_s']:.1f} s"
    rows["versions"] = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
