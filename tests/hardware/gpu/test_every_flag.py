"""Two steps with every value of every flag on one GPU, by both forms.

The values come from the flags' fields (``tests/support/every_flag.py``), as for the other backends.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpu_fsdp import resolve_gpu
from run_vit_training import check_mode_flags, read_flags
from tests.hardware.gpu.helpers import need_form, need_te, need_torchao
from tests.support.cli import Result, run_program, train_tiny_gpu
from tests.support.flag_values import (
    BASE,
    CUDA_ONLY,
    FSDP2_ONLY,
    NOT_IN_FORM,
    NOT_ON_GPUS,
    assert_trained,
    lines_of,
    write_sources,
)

pytestmark = [pytest.mark.gpu, pytest.mark.long]

AT_ONCE = 8
"""Programs on the GPU: they are small, and start for longer than they train."""
SEVERAL = "more than one process"
NOT_ON_ONE_GPU = {
    **{flag: why for flag, why in NOT_ON_GPUS.items() if why != CUDA_ONLY},
    **dict.fromkeys(("--mesh_dcn 2", "--mesh_fsdp 2", "--mesh_domain 2"), SEVERAL),
    **{f"--domain_attention {how}": SEVERAL for how in ("auto", "ring", "ulysses")},
}
NOT_IN_FORM_ON_ONE = {
    "fsdp2": {},
    "megatron": {
        "--precision fp16": FSDP2_ONLY,
        "--cpu_offload": FSDP2_ONLY,
        **{f"--outer_dp_sharding_strategy {how}": SEVERAL for how in (0, 1)},
        **{f"--reduce_dtype {dtype}": SEVERAL for dtype in ("bf16", "fp16")},
        "--no_preserve_fp32_weights": SEVERAL,
    },
}


@pytest.fixture(scope="module")
def data(digits, tmp_path_factory):
    """A folder with the data and weights that ``tests/support/every_flag.py`` names."""
    folder = tmp_path_factory.mktemp("sweep")
    write_sources(digits, folder)
    train_tiny_gpu(folder / "teacher", "--fsdp", "fsdp2")
    return folder


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
def test_on_one_gpu(form, data, tmp_path, monkeypatch):
    need_form(form)
    need_te()
    need_torchao()
    monkeypatch.setenv("WANDB_MODE", "offline")

    def resolve(words):
        flags = read_flags(words)
        check_mode_flags(flags)
        return resolve_gpu.resolve(flags.run, flags.torch)

    refused = NOT_ON_ONE_GPU | NOT_IN_FORM[form] | NOT_IN_FORM_ON_ONE[form]
    if torch.cuda.get_device_capability() < (10, 0):
        refused["--fp8 mxfp8"] = "Blackwell and newer"
    if importlib.util.find_spec("wandb") is None:
        refused["--wandb project"] = "wandb is not installed"
    base = BASE | {"backend": "--backend cuda", "fsdp": f"--fsdp {form}"}
    base["compile"] = "--no-compile"  # compilations take longer than two steps
    lines = lines_of("torch", data, resolve, refused, base=base, form=("backend", "fsdp"))

    def run(number):
        line = lines[number]
        folder = tmp_path / f"run_{number}"
        done = run_program("run_vit_training.py", *line, "--ckpt_dir", str(folder))
        if done.returncode:
            return f"{' '.join(line)}\n{done.stderr[-3000:]}"
        assert_trained(Result(folder), line)
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        said = [*filter(None, pool.map(run, range(len(lines))))]
    assert not said, "\n\n".join(said)
