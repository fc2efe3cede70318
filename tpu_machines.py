"""What all stacks of TPUs and the launchers know: Google's machine types with TPUs, and the flags
with which libtpu, the compiler and runtime, starts. Imports nothing."""

MACHINE_TYPES = {
    "ct4p-hightpu-4t": "v4:2x2x1",
    "ct5l-hightpu-1t": "v5e:1x1",
    "ct5l-hightpu-4t": "v5e:2x2",
    "ct5l-hightpu-8t": "v5e:2x4",
    "ct5lp-hightpu-1t": "v5e:1x1",
    "ct5lp-hightpu-4t": "v5e:2x2",
    "ct5lp-hightpu-8t": "v5e:2x4",
    "ct5p-hightpu-1t": "v5p:1x1x1",
    "ct5p-hightpu-2t": "v5p:1x2x1",
    "ct5p-hightpu-4t": "v5p:2x2x1",
    "ct6e-standard-1t": "v6e:1x1",
    "ct6e-standard-4t": "v6e:2x2",
    "ct6e-standard-8t": "v6e:2x4",
    "tpu7x-standard-4t": "tpu7x:2x2x1",
}
"""The slice that one host of each type is. Sources: the page "Plan TPUs in GKE" of Google Cloud's
documentation; of Compute Engine's, docs/evidence/compute_engine.md."""

LIBTPU_VARIABLE = "LIBTPU_INIT_ARGS"

_OURS = {
    # Without it v4 and v5p gather weights by all-reduces of zero-padded whole ones. (torch_xla 2.9
    # sets it, too.) libtpu 0.0.52 does so on tpu7x.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    # Never a product in as many pieces as devices exchange: each reads its other side from HBM
    # again, with --mesh_tensor as much as all the rest of the step.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
_NOT_ON_V4 = {
    # Vector memory that a fusion may use, twice libtpu's own limit: products then have larger
    # tiles (docs/evidence/tpu_speed.md). It is half of what a v5p has, a quarter of v5e's.
    "xla_tpu_scoped_vmem_limit_kib": "32768",
    # Whole gradients are reduced while the next ones are computed, not in between. For v4 the
    # compiler takes many times as long with it (libtpu 0.0.21).
    "xla_enable_async_all_reduce": "true",
}
_OF_CHIP = {
    # The other half of that: products that reduce on the side. libtpu 0.0.52 says that on other
    # chips than v5e it may lead to incorrect results; 0.0.21 takes it there and says nothing.
    "v5litepod": {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true"},
    # Half of what it has: its matrix units are the fastest beside their HBM.
    "v6e": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    # As in Google's own recipes (AI-Hypercomputer/tpu-recipes, training/ironwood).
    "tpu7x": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
}


def libtpu_flags(set_flags: str, kind: str) -> str:
    """Return the flags that are set, and our own for chips of this kind, such as "v5litepod" ("":
    unknown), that are not among them: a value of ``LIBTPU_VARIABLE``."""
    ours = _OURS | ({} if kind == "v4" else _NOT_ON_V4) | _OF_CHIP.get(kind, {})
    return add_flags(set_flags, ours)


def add_flags(set_flags: str, ours: dict[str, str]) -> str:
    """Return the flags that are set, and our own that are not among them."""
    names = {flag.lstrip("-").partition("=")[0] for flag in set_flags.split()}
    added = [f"--{name}={value}" for name, value in ours.items() if name not in names]
    return " ".join([*set_flags.split(), *added])
