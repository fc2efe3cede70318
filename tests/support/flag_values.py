"""What a run with one value of one flag must do, and where it is refused."""

import csv
import math

import numpy as np

from data.pack import pack
from gpu_fsdp.config import FP8_MULTIPLE
from run_vit_training import BACKEND_CONFIGS
from tests.support.cli import DIGITS
from tests.support.every_flag import command_lines, complaint_of, items
from tests.support.masked_images import write_masked
from tests.support.table_files import write_tables

BASE = {
    "data_dir": f"--data_dir {DIGITS}",
    "img_size": "--image_size 16",
    "patch_size": "--patch_size 4",
    "embed_dim": "--embed_dim 32",
    "num_heads": "--num_heads 2",
    "depth": "--num_blocks 2",
    "num_classes": "--num_classes 10",
    "batch_size": "--batch_size 16",
    "max_steps": "--max_steps 2",
    "num_workers": "--num_workers 0",
    "eval_batches": "--eval_batches 1",
    "log_step_interval": "--log_step_interval 1",
}


def write_sources(digits, folder):
    pack(str(DIGITS), str(folder / "shards"), 100_000, 1)
    write_tables(digits, folder / "tables")
    write_volumes(folder / "volumes")
    write_masked(folder / "masked", "pairs", [(16, 20)] * 6, [(16, 20)] * 3)
    (folder / "classes.txt").write_text("\n".join(map(str, range(10))))
    (folder / "prompts.txt").write_text("the digit {}\n")
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "writer"), *_images()])


def _images():
    for number, path in enumerate(sorted(DIGITS.glob("*/*/*.png"))):
        yield path.relative_to(DIGITS), path.parent.name, number % 50


def write_volumes(root):
    rows = []
    for number in range(60):
        path = f"{'train' if number < 40 else 'val'}/{number % 10}/{number}.npy"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (8, 16, 16))
        np.save(root / path, noise.astype(np.uint8))
        rows.append({"path": path, "label": number % 10, "split": path.partition("/")[0]})
    with (root / "labels.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=rows[0])
        table.writeheader()
        table.writerows(rows)


def lines_of(own, data, resolve, refused, fields=None, base=BASE, form=()):
    """The command lines that hold every value but those that are refused.

    ``form``: fields that no command line sets otherwise than ``base``.
    """
    values = [
        each
        for each in items(BACKEND_CONFIGS[own], data, fields)
        if each.name not in refused
        and all(each.words.get(field, base[field]) == base[field] for field in form)
    ]
    lines, complaints = command_lines(values, complaint_of(resolve), base)
    assert not complaints, complaints
    return [" ".join(line).split() for line in lines]


def assert_trained(result, line):
    losses = result.column("loss")
    assert losses, line
    assert all(math.isfinite(loss) for loss in losses), line


XLA_ONLY, CUDA_ONLY, FSDP2_ONLY = "XLA only", "CUDA only", "FSDP2 only"


NOT_ON_GPUS = {
    **{f"--attention {how}": "TPUs only" for how in ("auto", "sdpa", "plain", "flash", "whole")},
    "--grad_ckpt offload": XLA_ONLY,
    "--domain_attention gather": XLA_ONLY,
    "--mesh_tensor 2": "--fsdp simple only",
    "--mesh_dcn slices": XLA_ONLY,
    "--mesh_fsdp 4": "there are two processes",
    "--precision fp16": CUDA_ONLY,
    "--reduce_dtype fp16": CUDA_ONLY,
    "--cpu_offload": CUDA_ONLY,
    "--tf32": CUDA_ONLY,
    "--block te": CUDA_ONLY,
    **{f"--fp8 {recipe}": CUDA_ONLY for recipe in FP8_MULTIPLE},
}
NOT_IN_FORM = {
    "fsdp2": dict.fromkeys(("--zero_dp_strategy 1", "--no-meta_init"), "Megatron-FSDP only"),
    "megatron": {
        "--linear_probe": FSDP2_ONLY,
        "--mesh_domain 2": FSDP2_ONLY,
        **{f"--domain_attention {how}": FSDP2_ONLY for how in ("auto", "ring", "ulysses")},
    },
    "simple": dict.fromkeys(("--zero_dp_strategy 1", "--no-meta_init"), "Megatron-FSDP only"),
}
