"""Google's machine types with TPUs, for the program and its launchers. Imports nothing."""

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
