"""The compiler's figures as a table to read and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tools.compile_only.compiler import Compiled
from tools.compile_only.expected import Expected
from tools.compile_only.hlo import Traffic
from xla_fsdp.tpu import Topology

_GIB = 2**30


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
    """Operations of the whole slice in one run, at the pace of bf16 products."""
    resident_bytes: int
    """Bytes on a device of what is there meanwhile without being an argument."""


@dataclass(frozen=True)
class Report:
    """Bytes, operations and seconds of one training step; bytes and FLOPs are a device's.

    A step may be several graphs: the memory is that of the one that needs most (``resident``: on
    the device meanwhile, in the peak, but not among its arguments), all else the sum over them.
    """

    topology: str
    slices: int
    chips: int
    devices: int
    parameters: int
    batch_size: int
    input_shape: tuple[int, ...]
    """Of one image."""
    precision: str
    mesh: dict[str, int]
    sharding: str
    graphs: int
    distinct_graphs: int
    fits: bool
    peak_hbm_bytes: int
    hbm_capacity_bytes: int
    state_bytes: int
    resident_bytes: int
    argument_bytes: int | None
    output_bytes: int | None
    temporary_bytes: int | None
    flops_per_chip: float
    model_flops: float
    hbm_bytes: float | None
    collective_bytes: dict[str, float] | None
    dcn_bytes: float | None
    collectives: dict[str, int] | None
    asynchronous_collectives: dict[str, int] | None
    compute_s: float
    hbm_s: float | None
    collective_s: float | None
    dcn_s: float | None
    roofline_step_s: float | None
    roofline_mfu: float | None
    expected_step_s: float | None
    expected_mfu: float | None
    expected_images_per_s: float | None
    expected_kernels_s: float | None
    expected_waiting_s: float | None
    expected_dma_s: float | None
    expected_host_s: float | None
    expected_dcn_s: float | None
    expected_unknown: int | None
    trace_s: float
    compile_s: float
    versions: dict[str, str]


def make_report(
    *, topology: Topology, graphs: list[CompiledGraph], model_flops: float, **facts
) -> Report:
    """Put the graphs of a step together; ``model_flops`` are those of the whole slice."""
    chip, devices = topology.chip, topology.devices
    peak, largest, compiled = max(
        (
            (graph.resident_bytes + graph.compiled.peak_bytes, graph, graph.compiled)
            for graph in graphs
            if graph.compiled
        ),
        key=lambda each: each[0],
    )
    fits = all(graph.traffic for graph in graphs) and peak <= compiled.capacity_bytes
    flops = sum(graph.runs * graph.flops for graph in graphs)
    compute_s = flops / devices / chip.peak_flops
    traffic = _total(graphs)
    all_at_peak_s = model_flops / devices / chip.peak_flops
    hbm_s = collective_s = dcn_s = step_s = mfu = None
    if traffic:
        hbm_s = traffic.hbm_bytes / chip.hbm_bandwidth
        collective_s = sum(traffic.collective_bytes.values()) / chip.ici_bandwidth
        dcn_s = traffic.dcn_bytes / chip.dcn_bandwidth
        # All four at once, each at its best: no step can be shorter.
        step_s = max(compute_s, hbm_s, collective_s, dcn_s)
        mfu = all_at_peak_s / step_s
    return Report(
        topology=topology.name,
        slices=topology.slices,
        chips=topology.chips,
        devices=devices,
        graphs=sum(graph.runs for graph in graphs),
        distinct_graphs=len(graphs),
        fits=fits,
        peak_hbm_bytes=peak,
        hbm_capacity_bytes=compiled.capacity_bytes,
        resident_bytes=largest.resident_bytes,
        argument_bytes=compiled.argument_bytes,
        output_bytes=compiled.output_bytes,
        temporary_bytes=compiled.temporary_bytes,
        flops_per_chip=flops / topology.chips,
        model_flops=model_flops,
        hbm_bytes=traffic.hbm_bytes if traffic else None,
        collective_bytes=dict(traffic.collective_bytes) if traffic else None,
        dcn_bytes=traffic.dcn_bytes if traffic else None,
        collectives=dict(traffic.collectives) if traffic else None,
        asynchronous_collectives=dict(traffic.asynchronous) if traffic else None,
        compute_s=compute_s,
        hbm_s=hbm_s,
        collective_s=collective_s,
        dcn_s=dcn_s,
        roofline_step_s=step_s,
        roofline_mfu=mfu,
        **_expected_figures(graphs, all_at_peak_s, facts["batch_size"]),
        compile_s=sum(graph.compiled.seconds for graph in graphs if graph.compiled),
        **facts,
    )


def _total(graphs: list[CompiledGraph]) -> Traffic | None:
    """Return the traffic of all runs; None if a graph does not fit and so has no schedule."""
    total = Traffic()
    for graph in graphs:
        if graph.traffic is None:
            return None
        total.add(graph.traffic, graph.runs)
    return total


def _expected_figures(
    graphs: list[CompiledGraph], all_at_peak_s: float, batch_size: int
) -> dict[str, Any]:
    """Return the fields of the report that say how long all runs are expected to take.

    They are None if a graph does not fit and so has no schedule. With the model's products alone,
    at the chip's peak, a step would take ``all_at_peak_s``.
    """
    total, unknown = Expected(), False
    for graph in graphs:
        total = total.plus(graph.expected or Expected(), graph.runs)
        unknown = unknown or graph.expected is None
    figures = {
        "step_s": total.seconds,
        "mfu": all_at_peak_s / total.seconds if total.seconds else None,
        "images_per_s": batch_size / total.seconds if total.seconds else None,
        "kernels_s": total.kernels_s,
        "waiting_s": total.waiting_s,
        "dma_s": total.dma_s,
        "host_s": total.host_s,
        "dcn_s": total.dcn_s,
        "unknown": total.unknown,
    }
    return {f"expected_{name}": None if unknown else value for name, value in figures.items()}


def as_json(report: Report) -> dict:
    return asdict(report)


def as_table(report: Report) -> str:
    def gib(count: float | None) -> str:
        return "" if count is None else f"{count / _GIB:.2f} GiB"

    to_spare = (report.hbm_capacity_bytes - report.peak_hbm_bytes) / 1e9
    if report.fits:
        verdict = f"fits, {to_spare:.1f} GB to spare"
    elif to_spare > 0:  # the user has set a limit
        verdict = "does not fit in what LIBTPU_INIT_ARGS leaves"
    else:
        verdict = f"does not fit by {-to_spare:.1f} GB or more"
    rows = [
        (
            "slice" if report.slices == 1 else f"{report.slices} slices",
            f"{report.topology}, {report.chips} chip" + ("s" if report.chips > 1 else ""),
        ),
        ("model", f"{report.parameters:,} parameters, global batch {report.batch_size}"),
        ("sharding", report.sharding),
        *(
            [
                (
                    "graphs a step",
                    f"{report.graphs}, {report.distinct_graphs} different; below, memory "
                    "of the largest, all else of the step",
                )
            ]
            if report.graphs > 1
            else []
        ),
        ("verdict", verdict),
        ("HBM a chip, peak", f"{gib(report.peak_hbm_bytes)} of {gib(report.hbm_capacity_bytes)}"),
        ("  arguments", gib(report.argument_bytes)),
        ("  of these, state", gib(report.state_bytes)),
        ("  outputs", gib(report.output_bytes)),
        ("  temporaries", gib(report.temporary_bytes)),
        *([("  resident beside it", gib(report.resident_bytes))] if report.graphs > 1 else []),
        ("FLOPs a chip", f"{report.flops_per_chip:.3e}, at peak {report.compute_s * 1e3:.1f} ms"),
    ]
    if report.roofline_step_s is not None:
        assert report.hbm_s is not None
        assert report.collective_s is not None
        assert report.roofline_mfu is not None
        rows += [
            (
                "HBM traffic a chip",
                f"{gib(report.hbm_bytes)}, at peak {report.hbm_s * 1e3:.1f} ms",
            ),
            ("collectives a chip", f"at peak {report.collective_s * 1e3:.1f} ms"),
            *_collective_rows(report),
            *_dcn_rows(report),
            ("shortest step", f"{report.roofline_step_s * 1e3:.1f} ms (roofline)"),
            ("highest MFU", f"{100 * report.roofline_mfu:.1f} %"),
            *_expected_rows(report),
        ]
    rows += [
        ("trace, compile", f"{report.trace_s:.1f} s, {report.compile_s:.1f} s"),
        ("versions", ", ".join(f"{k} {v}" for k, v in report.versions.items())),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _collective_rows(report: Report) -> list[tuple[str, str]]:
    assert report.collective_bytes is not None
    assert report.collectives is not None
    assert report.asynchronous_collectives is not None
    return [
        (
            f"  {kind}",
            f"{size / _GIB:.2f} GiB in {report.collectives[kind]}, "
            f"{report.asynchronous_collectives[kind]} asynchronous",
        )
        for kind, size in sorted(report.collective_bytes.items())
    ]


def _dcn_rows(report: Report) -> list[tuple[str, str]]:
    if report.slices == 1:
        return []
    assert report.dcn_bytes is not None
    assert report.dcn_s is not None
    size = report.dcn_bytes / _GIB
    return [("between slices (DCN)", f"{size:.2f} GiB, at peak {report.dcn_s * 1e3:.1f} ms")]


def _how_good(report: Report) -> str:
    """Return how far expected MFUs were from published ones, by ``make tpu-calibrate``."""
    if report.topology.startswith("v6e:"):
        return "13 points too low for both published runs on v6e"
    return "within 3 points for half of 15 published runs"


def _expected_rows(report: Report) -> list[tuple[str, str]]:
    assert report.expected_step_s is not None
    assert report.expected_mfu is not None
    assert report.expected_images_per_s is not None
    parts = {
        "kernels": report.expected_kernels_s,
        "waiting for collectives": report.expected_waiting_s,
        "for DMA": report.expected_dma_s,
        "for the host's memory": report.expected_host_s,
        "for other slices": report.expected_dcn_s,
    }
    within = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in parts.items() if s)
    how = "by the compiler's cycles" + (f"; of it {within}" if within else "")
    if report.expected_unknown:
        how += f"; {report.expected_unknown} instructions by their bytes"
    return [
        ("expected step", f"{report.expected_step_s * 1e3:.1f} ms ({how})"),
        ("expected MFU", f"{100 * report.expected_mfu:.1f} % ({_how_good(report)}: docs/tpu.md)"),
        ("expected images/s", f"{report.expected_images_per_s:.4g}"),
    ]
