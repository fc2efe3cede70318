"""Detects the device and rejects unsupported environment variables, without importing torch_xla,
whose import on a TPU VM may wait minutes for the metadata server."""

import glob
import importlib.util
import os
import re
import urllib.request
from pathlib import Path

from training.errors import UsageError
from xla_fsdp.torch_xla_private import METADATA_URL, TPU_PCI_DEVICES, TPU_PCI_VENDOR

# -- variables that change what is computed -----------------------------------------------

_OFF = ("", "0", "false")
_BF16 = "unset it and use --precision bf16"
_NO_TORCHRUN = "start without torchrun, or unset RANK and WORLD_SIZE"
_REFUSED = {
    "XLA_USE_BF16": (_OFF, _BF16),
    "XLA_DOWNCAST_BF16": (_OFF, _BF16),
    "XLA_USE_FP16": (_OFF, _BF16),
    "XLA_DOWNCAST_FP16": (_OFF, _BF16),
    "XLA_USE_32BIT_LONG": (_OFF, "unset it, checkpoints contain 64-bit integers"),
    "XLA_RNG_BIT_GENERATOR": (("", "default"), "unset it, it changes dropout's random numbers"),
    "XLA_USE_EAGER_DEBUG_MODE": (_OFF, "unset it, eager tensors cannot be sharded"),
    "PT_XLA_DEBUG": (("0", "1"), "torch_xla parses it as an integer, use 1"),
    "RANK": (("", "0"), _NO_TORCHRUN),
    "WORLD_SIZE": (("", "1"), _NO_TORCHRUN),
}
"""For each variable, the values that are accepted, and what to do about any other value."""


def check_variables() -> None:
    """Raise UsageError for a variable that makes torch_xla crash or compute something other than
    the flags ask for."""
    for name, (harmless, advice) in _REFUSED.items():
        value = os.environ.get(name, harmless[0])
        if value not in harmless:
            raise UsageError(f"--backend xla is incompatible with {name}={value}: {advice}")


# -- the device ---------------------------------------------------------------------------


def device_type() -> str:
    """Return PJRT_DEVICE, or else "TPU" if this host has TPU chips, or "CPU"."""
    if chosen := os.environ.get("PJRT_DEVICE"):
        return chosen
    if not _has_tpu_chips():
        return "CPU"
    # On import, torch_xla would choose the device by itself and print a warning.
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")
    return "TPU"


def check_device() -> None:
    """Raise UsageError if torch_xla could not start the device, or would wait minutes for it."""
    device = device_type()
    if device not in ("TPU", "CPU"):
        others = ", or use --backend cuda for GPUs" if device in ("CUDA", "GPU", "ROCM") else ""
        raise UsageError(
            f"PJRT_DEVICE={device}: --backend xla supports TPU and CPU only: unset it{others}"
        )
    if device == "CPU":
        return
    if not _has_tpu_chips():
        raise UsageError(
            "PJRT_DEVICE=TPU, but this machine has no TPU chips: unset it, or use PJRT_DEVICE=CPU"
        )
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library and not Path(library).is_file():
        raise UsageError(f"TPU_LIBRARY_PATH={library}: file not found: correct or unset it")
    if not library and importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "this host has TPU chips, but the package libtpu is not installed: "
            "python3 -m pip install -r requirements-tpu.txt"
        )
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # torch_xla takes "0" as set, too
        kind = os.environ.get("TPU_ACCELERATOR_TYPE", "")
        if not re.fullmatch(r"(v|tpu)\d[a-z]*-\d+", kind):
            raise UsageError(
                f"TPU_ACCELERATOR_TYPE={kind} does not name a slice, which TPU_SKIP_MDS_QUERY "
                "requires: set it, for example to v5litepod-8, or unset TPU_SKIP_MDS_QUERY"
            )
        return
    try:
        tpu_env = _ask_metadata("tpu-env")
        if "\nACCELERATOR_TYPE:" not in f"\n{tpu_env}":
            _set_compute_engine_variables(tpu_env)
    except OSError as error:
        raise UsageError(
            f"the TPU VM's metadata server does not answer ({getattr(error, 'reason', error)}): "
            "run a container on the host's network (docker run --net host), or set "
            "TPU_SKIP_MDS_QUERY=1, TPU_ACCELERATOR_TYPE (for example v5litepod-8), TPU_WORKER_ID "
            "and TPU_WORKER_HOSTNAMES"
        ) from None


def _ask_metadata(key: str) -> str:
    """Return the VM's metadata for ``key``. Raises OSError if the server does not answer."""
    url, headers = METADATA_URL + key, {"Metadata-Flavor": "Google"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.read().decode()


_FROM_TPU_ENV = {
    "TPU_ACCELERATOR_TYPE": "TPU_ACCELERATOR_TYPE",
    "TPU_WORKER_ID": "TPU_WORKER_ID",
    "TPU_TOPOLOGY": "TOPOLOGY",
    "TPU_HOST_BOUNDS": "HOST_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS": "CHIPS_PER_HOST_BOUNDS",
    "TPU_TOPOLOGY_WRAP": "WRAP",
    "TPU_TOPOLOGY_ALT": "ALT",
}
"""Environment variables, each with its name in the metadata of a Compute Engine VM."""


def _set_compute_engine_variables(tpu_env: str) -> None:
    """Set the variables that torch_xla and libtpu read, as GKE does, from a Compute Engine VM's
    metadata. torch_xla 2.9 supports only the names of the Cloud TPU API and fails on import.

    Variables that are already set are kept. Raises OSError if the metadata server does not answer.
    """
    values = dict(re.findall(r"(?m)^(\w+): *'?(.*?)'?$", tpu_env))
    for variable, name in _FROM_TPU_ENV.items():
        if values.get(name):
            os.environ.setdefault(variable, values[name])
    workers = _ask_metadata("worker-network-endpoints")  # host names, resolved by the network
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", workers)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"


def _has_tpu_chips() -> bool:
    vendors = map(Path, glob.glob("/sys/bus/pci/devices/*/vendor"))
    return any(
        vendor.read_text(encoding="utf-8").strip() == TPU_PCI_VENDOR
        and vendor.with_name("device").read_text(encoding="utf-8").strip() in TPU_PCI_DEVICES
        for vendor in vendors
    )
