"""The reference for --features: timm's forward_features in plain PyTorch."""

import json

import numpy as np
import pyarrow.parquet as pq
import torch
import torchvision.transforms as T
from PIL import Image
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer

from tests.support.cli import TINY_SIZES, need_xla, run_program

SIZES = "--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2".split()
FLAGS = [*SIZES, "--class_token", "--global_pool", "token", "--reg_tokens", "2"]
LOADER = "--batch_size 16 --num_workers 0 --max_bad_images 1".split()


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


TRAIN, VAL = 37, 13


def backbone():
    """A model without a head, of other values than new ones have."""
    torch.manual_seed(0)
    return changed(VisionTransformer(**TINY_SIZES, num_classes=0, reg_tokens=2))


def changed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def pixels_of(paths):
    """Images as timm's models of ImageNet see them, by torchvision."""
    transform = T.Compose(
        [
            T.Resize(16 * 256 // 224, interpolation=T.InterpolationMode.BICUBIC),
            T.CenterCrop(16),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
        ]
    )
    return torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])


def tokens_of(model, paths):
    with torch.no_grad():
        return model.forward_features(pixels_of(paths))


def read(folder, split):
    """All columns of a split, the images in order: arrays by name, "path" a list."""
    found = {}
    for file in sorted(folder.glob(f"{split}-*")):
        if file.suffix == ".parquet":
            columns = pq.read_table(file).to_pydict()
        else:
            with safe_open(file, "np") as opened:
                columns = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                columns["path"] = json.loads(opened.metadata()["paths"])
        for name, values in columns.items():
            found.setdefault(name, []).extend(values)
    order = np.argsort(found["number"])
    return {name: [values[place] for place in order] for name, values in found.items()}


FEATURES = ("class", "mean", "patches")
FORMS = {
    "SPMD, one device": ["--cpu_devices", "1"],
    "SPMD, four devices": ["--cpu_devices", "4"],
    "SPMD, four devices, bf16": ["--cpu_devices", "4", "--precision", "bf16"],
    "nested": ["--cpu_devices", "1", "--xla_fsdp", "nested"],
    "FSDP2, two processes": ["--backend", "cuda"],
    "Megatron-FSDP, two processes": ["--backend", "cuda", "--fsdp", "megatron"],
}


def run_form(form, *flags):
    """The finished program, on a form of sharding."""
    if "SPMD" in form or "nested" in form:
        need_xla()
    words = map(str, (*LOADER, *FORMS[form], *flags))
    done = run_program("run_vit_training.py", *words, processes=2 if "two" in form else 1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
