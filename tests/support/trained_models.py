"""The trained models and images that documents speak of, on a new user's machine."""

import shutil
from pathlib import Path

import timm
import torch.distributed.checkpoint as dcp
from PIL import Image
from safetensors.torch import save_file

from tests.fakes.new_machine import Machine
from tests.support.cli import ALL_DIGITS
from training.checkpoints.format import quiet_dcp


def put_trained(machine: Machine, ckpt_dir: Path) -> None:
    """``ckpt_dir`` is that of a finished run of digits."""
    (checkpoint,) = ckpt_dir.glob("step_*")
    for name in ("vit_10b/step_1000", "vit_large/step_12510", "vit_s16/step_12510"):
        copy = shutil.copytree(checkpoint, machine.home / name)
        for file in ("events.jsonl", "metrics.jsonl", "run.json"):
            shutil.copy(ckpt_dir / file, copy.parent)
    downloaded = machine.home / "downloads" / "vit_large"
    downloaded.mkdir(parents=True)
    weights = timm.create_model("vit_tiny_patch16_224", embed_dim=12, depth=1).state_dict()
    save_file(weights, downloaded / "model.safetensors")
    content = {"model": {f"module.{n}": t for n, t in weights.items()}, "optimizer": {"lr": 0.1}}
    with quiet_dcp():
        dcp.save(content, checkpoint_id=downloaded.parent / "vit_recipe/step_500_loss_1.234")
    shutil.copytree(ALL_DIGITS, machine.datasets / "imagenet-1k")
    image = next((ALL_DIGITS / "val" / "7").glob("*.png"))
    (machine.project / "holiday" / "beach").mkdir(parents=True)
    shutil.copy(image, machine.project / "holiday" / "beach" / "1.png")
    Image.open(image).convert("RGB").save(machine.project / "cat.jpg")
