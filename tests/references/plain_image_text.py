"""SigLIP or CLIP in plain PyTorch, on one device with all pairs at once: a reference.

Prints one JSON line: the losses and gradient norms of a run with these flags. The towers are those
of transformers, so nothing of the program's model computes here.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from data.batch import PADDING, BatchShard
from data.open import open_data
from features.image_text.config import ImageTextConfig
from tests.fakes.filled import filled
from tests.references.plain_steps import train_by, warm_cosine
from tests.references.text_towers import text_tower
from tests.support.native_images import images_in, logits_of
from tests.support.resolved import on_gpus
from tools.self_check.plain import normalized
from training.data import dataset_request


class PlainPairs(nn.Module):
    """timm's ViT without a head, transformers' text tower, scale and bias."""

    def __init__(self, run, first):
        super().__init__()
        spec, flags = run.model, run.config.of(ImageTextConfig)
        self.kind = run.config.objective.objective
        if spec.segments is None:
            arguments = {"num_classes": 0, "dynamic_img_size": True}  # images of any size
            self.image = VisionTransformer(**spec.arguments | arguments)
        else:
            self.image = NaFlexVit(**spec.arguments | {"num_classes": 0, "weight_init": ""})
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

    def forward(self, pooled, texts):
        """The loss of pooled images, (pairs, width), and tokens, (pairs, length)."""
        x = F.normalize(self.image_projection(pooled), dim=-1)
        y = F.normalize(self.projection(self.text(texts)), dim=-1)
        logits = self.logit_scale.exp() * x @ y.T
        own = torch.arange(len(x))
        different = logits.detach().clone().fill_diagonal_(-math.inf)
        larger = [logits.diag() > different.amax(side) for side in (1, 0)]
        self.shares = [100 * each.float().mean().item() for each in larger]
        if self.kind == "siglip":
            labels = 2 * torch.eye(len(x)) - 1
            return -F.logsigmoid(labels * (logits + self.logit_bias)).sum() / len(x)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def train(flags):
    """Losses, gradient norms and numbers of images of the steps of a run with these flags."""
    run = on_gpus(flags)
    first = {n: v.detach() for n, v in filled(run.model, run.config.seed).state_dict().items()}
    model, how = PlainPairs(run, first), run.config.optimizer

    def decays(name, parameter):
        # Neither norms, biases, scale and bias nor embeddings, as timm and open_clip have it.
        is_projection = name in ("image.patch_embed.proj.weight", "image.embeds.proj.weight")
        return parameter.dim() > 1 and (is_projection or "embed" not in name)

    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": how.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=how.lr)

    counts, shares = [], []

    def losses_of(step, batch):
        pooled, texts = pairs_of(batch, model, run)
        counts.append(len(pooled))
        yield model(pooled, texts)
        shares.append(model.shares)

    losses, norms = train_by(losses_of, optimizer, run, run.config.max_steps, warm_cosine(how))
    found = {"loss": losses, "grad_norm": norms, "images": counts}
    to_text, to_image = zip(*shares, strict=True)
    found |= {"batch_image_to_text_r1": to_text, "batch_text_to_image_r1": to_image}
    return found | {"val_loss": val_loss(model, run)}


def pairs_of(batch, model, run):
    """The pooled images and the tokens of the pairs in a batch, without padding."""
    texts = batch["text"].long()
    if "image" in batch:
        is_pair = batch["index"] != PADDING if "index" in batch else slice(None)
        images = normalized(batch["image"][is_pair], run.config.data.preprocessing)
        return model.image(images), texts[is_pair]
    # Of sequences, each image alone.
    images = images_in(batch)
    pooled = [logits_of(model.image, *image, run) for image in images]
    places = batch["segment_ids"].amax(1, keepdim=True)
    texts = texts[torch.arange(texts.shape[1]) < places]
    return torch.cat(pooled or [texts.new_empty(0, model.image.embed_dim).float()]), texts


@torch.no_grad()
def val_loss(model, run):
    """The loss of all validation pairs, compared with each other."""
    data = open_data(dataset_request(run, labels=False))
    batches = data.val_loader(run.config.data.batch_size, BatchShard()).epoch(0)
    pooled, texts = zip(*(pairs_of(batch, model, run) for batch in batches), strict=True)
    return model(torch.cat(pooled), torch.cat(texts)).item()


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1:])))
