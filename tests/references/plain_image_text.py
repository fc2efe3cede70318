"""SigLIP or CLIP in plain PyTorch, on one device with all pairs at once: a reference.

Prints one JSON line: the losses and gradient norms of a run with these flags. The towers are those
of transformers, so nothing of the program's model computes here.
"""

import json
import sys

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from features.image_text.config import ImageTextConfig
from tests.fakes.filled import filled
from tests.references.plain_steps import train_by, warm_cosine
from tests.references.text_towers import text_tower
from tests.support.resolved import on_gpus
from tools.self_check.plain import normalized


class PlainPairs(nn.Module):
    """timm's ViT without a head, transformers' text tower, scale and bias."""

    def __init__(self, run, first):
        super().__init__()
        spec, flags = run.model, run.config.of(ImageTextConfig)
        self.kind = run.config.objective.objective
        self.image = VisionTransformer(**spec.arguments | {"num_classes": 0})
        names = self.image.state_dict()
        self.image.load_state_dict({name: first[name] for name in names})
        self.text, self.projection = text_tower(flags.text, first)
        self.image_projection = nn.Identity()
        if "image_projection.weight" in first:
            weight = first["image_projection.weight"]
            self.image_projection = nn.Linear(*weight.shape[::-1], bias=False)
            self.image_projection.weight = nn.Parameter(weight.clone())
        self.logit_scale = nn.Parameter(first["logit_scale"].clone())
        bias = first.get("logit_bias")
        self.logit_bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, images, texts):
        x = F.normalize(self.image_projection(self.image(images)), dim=-1)
        y = F.normalize(self.projection(self.text(texts)), dim=-1)
        logits = self.logit_scale.exp() * x @ y.T
        if self.kind == "siglip":
            labels = 2 * torch.eye(len(x)) - 1
            return -F.logsigmoid(labels * (logits + self.logit_bias)).sum() / len(x)
        labels = torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def train(flags, steps=6):
    """Losses and gradient norms of a run with these flags."""
    run = on_gpus(flags)
    first = {n: v.detach() for n, v in filled(run.model, run.config.seed).state_dict().items()}
    model, how = PlainPairs(run, first), run.config.optimizer

    def decays(name, parameter):
        # Neither norms, biases, scale and bias nor embeddings, as timm and open_clip have it.
        return parameter.dim() > 1 and "embed" not in name.removeprefix("image.patch_embed")

    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": how.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=how.lr)

    def losses_of(step, batch):
        images = normalized(batch["image"], run.config.data.preprocessing)
        yield model(images, batch["text"].long())

    losses, norms = train_by(losses_of, optimizer, run, steps, warm_cosine(how))
    return {"loss": losses, "grad_norm": norms}


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1:])))
