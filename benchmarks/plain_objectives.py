"""DINO and MAE in plain PyTorch and timm, each a module that returns the loss of a micro-batch.

The models and losses of ``gpu_peers.py``, written as a user would write them for one GPU: all crops
of one size are a batch, and the forward pass runs under autocast.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from features.dino.config import DinoConfig
from features.mae.config import MaeConfig
from features.mae.model import patches_of, sines_and_cosines
from training.optimizers import hashed

Normalize = Callable[[Tensor], Tensor]
"""Converts uint8 images to normalized fp32 images."""
Autocast = Callable[[], torch.autocast]
"""Returns an autocast context in the precision of the run."""

_WITHOUT_HEAD = {"num_classes": 0, "weight_init": "skip"}
_EPS = 1e-8
"""Added to the distances of class tokens, as in DINOv2's code."""


# -- DINO ------------------------------------------------------------------------------------------


class CropBatch(NamedTuple):
    """A micro-batch, prepared as by DINOv2's collate function. Crops are sorted by their index
    within the image, then by image."""

    global_crops: Tensor
    """(2 x images, channels, height, width), uint8."""
    local_crops: Tensor | None
    """(number x images, channels, height, width), uint8."""
    mask: Tensor
    """The masked patches of the global crops: (2 x images, rows, columns), boolean."""
    masked: Tensor
    """The indices of the masked patches among all tokens of the global crops."""
    weights: Tensor
    """The weights of the masked patches in the iBOT loss."""


class Head(nn.Module):
    """An MLP, and prototypes with weight normalization."""

    def __init__(self, width: int, config: DinoConfig, prototypes: int) -> None:
        super().__init__()
        hidden, bottleneck = config.dino_head_hidden, config.dino_head_bottleneck
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        self.prototypes = nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.mlp(x), dim=-1)
        return F.linear(x, F.normalize(self.prototypes.weight, dim=-1))


class DinoVit(VisionTransformer):
    """timm's model for crops of several sizes, with a mask token and both heads."""

    def __init__(self, arguments: Mapping[str, Any], config: DinoConfig) -> None:
        super().__init__(**{**arguments, **_WITHOUT_HEAD, "dynamic_img_size": True})
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        self.dino_head = Head(self.embed_dim, config, config.dino_prototypes)
        self.ibot_head = Head(self.embed_dim, config, config.ibot_prototypes)

    def forward(self, crops: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the normalized tokens of crops of one size."""
        x = self.patch_embed(crops)  # (crops, rows, columns, width)
        if mask is not None:
            x = torch.where(mask[..., None], self.mask_token.to(x.dtype), x)
        x = self.blocks(self.norm_pre(self._pos_embed(x)))
        return self.fc_norm(self.norm(x))  # one of the two is the identity


class DinoLoss(nn.Module):
    """The loss of a student, compared with its teacher, which starts as a copy."""

    def __init__(
        self, student: DinoVit, config: DinoConfig, normalize: Normalize, autocast: Autocast
    ) -> None:
        super().__init__()
        self.config, self.normalize, self.autocast = config, normalize, autocast
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def forward(self, batch: CropBatch) -> Tensor:
        config, student, teacher = self.config, self.student, self.teacher
        images, global_crops = len(batch.mask) // 2, self.normalize(batch.global_crops)
        with self.autocast():
            with torch.no_grad():
                tokens = teacher(global_crops)
                class_targets = sinkhorn(teacher.dino_head(tokens[:, 0]), config.teacher_temp)
                patches = tokens.flatten(0, 1).index_select(0, batch.masked)
                patch_targets = sinkhorn(teacher.ibot_head(patches), config.teacher_temp)
            tokens = student(global_crops, batch.mask)
            class_tokens = [tokens[:, 0]]
            if batch.local_crops is not None:
                class_tokens.append(student(self.normalize(batch.local_crops))[:, 0])
            class_logits = student.dino_head(torch.cat(class_tokens))
            patches = tokens.flatten(0, 1).index_select(0, batch.masked)
            patch_logits = student.ibot_head(patches)

        logs, targets = (
            x.unflatten(0, (-1, images))
            for x in (log_probabilities(class_logits, config.student_temp), class_targets)
        )
        loss = class_loss(logs, targets)
        if config.ibot_weight:
            logs = log_probabilities(patch_logits, config.student_temp)
            loss = loss - config.ibot_weight * ((patch_targets * logs).sum(-1) @ batch.weights)
        if config.koleo_weight:
            spread = koleo_loss(tokens[:, 0].float(), config.koleo_group)
            loss = loss + config.koleo_weight * 2 * spread
        return loss


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(logits.float() / temperature, dim=-1)


def sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities, (samples, prototypes), after three iterations of Sinkhorn-Knopp."""
    shares = (logits.float() / temperature).exp()
    for _ in range(3):
        shares /= shares.sum(0)
        shares /= shares.sum(1, keepdim=True)
    return shares


def class_loss(logs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of all pairs of a teacher's crop in ``targets``, (2, images,
    prototypes), and a different crop of the student in ``logs``, (crops, images, prototypes)."""
    crops, images, _ = logs.shape
    global_part = (targets.flip(0) * logs[:2]).sum()
    local_part = (targets.sum(0) * logs[2:]).sum()
    return -(global_part + local_part) / (2 * (crops - 1) * images)


def koleo_loss(tokens: Tensor, group: int) -> Tensor:
    """Return the mean negative log distance of tokens, (tokens, width), to the nearest one in their
    group of consecutive tokens."""
    tokens = F.normalize(tokens, dim=-1).unflatten(0, (-1, group))
    with torch.no_grad():
        itself = torch.eye(group, dtype=torch.bool, device=tokens.device)
        nearest = (tokens @ tokens.mT).masked_fill(itself, -2).argmax(-1, keepdim=True)
    neighbors = tokens.take_along_dim(nearest, dim=1)
    return -(F.pairwise_distance(tokens, neighbors, eps=_EPS) + _EPS).log().mean()


# -- MAE -------------------------------------------------------------------------------------------


class MaeLoss(VisionTransformer):
    """timm's model as the encoder, the decoder, and their loss, as in the authors' code."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        config: MaeConfig,
        normalize: Normalize,
        autocast: Autocast,
    ) -> None:
        super().__init__(**{**arguments, **_WITHOUT_HEAD})
        self.config, self.normalize, self.autocast = config, normalize, autocast
        grid, patch_size = self.patch_embed.grid_size, self.patch_embed.patch_size
        self.patches = math.prod(grid)
        self.shown = int(self.patches * (1 - config.mask_ratio))
        width, heads = config.decoder_embed_dim, config.decoder_num_heads
        self.decoder_embed = nn.Linear(self.embed_dim, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_blocks = nn.Sequential(
            *(Block(width, heads, qkv_bias=True) for _ in range(config.decoder_depth))
        )
        self.decoder_norm = LayerNorm(width)
        self.decoder_pred = nn.Linear(width, self.in_chans * math.prod(patch_size))
        positions = sines_and_cosines(self.num_prefix_tokens, grid, width)
        self.register_buffer("decoder_pos_embed", positions, persistent=False)

    def forward(self, images: Tensor, numbers: Tensor, key: Tensor) -> Tensor:
        """``numbers``: the positions of the images in the batch; ``key``: of the step's masks."""
        images = self.normalize(images)
        # The run's own masks, in place of random noise.
        places = torch.arange(self.patches, dtype=torch.int32, device=images.device)
        noise = hashed(hashed(numbers.int() + hashed(key))[:, None] + places)
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1)
        with self.autocast():
            predicted = self.predict(images, order[:, : self.shown], restore)
        target = patches_of(images, self.patch_embed.patch_size)
        if self.config.norm_pix_loss:
            deviation = (target.var(-1, keepdim=True) + 1e-6).sqrt()
            target = (target - target.mean(-1, keepdim=True)) / deviation
        errors, hidden = (predicted.float() - target).square().mean(-1), restore >= self.shown
        return (errors * hidden).sum() / hidden.sum()

    def predict(self, images: Tensor, shown: Tensor, restore: Tensor) -> Tensor:
        """Return the values of all patches, of which the encoder sees those in ``shown``."""
        x = self.patch_embed(images) + self.pos_embed[:, -self.patches :]
        x = x.take_along_dim(shown[..., None], dim=1)
        # The positions of these tokens are zeros.
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in prefix), x], dim=1)
        x = self.decoder_embed(self.fc_norm(self.norm(self.blocks(self.norm_pre(x)))))
        first, x = x.tensor_split([self.num_prefix_tokens], dim=1)
        hidden = self.mask_token.expand(len(x), self.patches - self.shown, -1)
        x = torch.cat([x, hidden], dim=1).take_along_dim(restore[..., None], dim=1)
        x = self.decoder_blocks(torch.cat([first, x], dim=1) + self.decoder_pos_embed)
        return self.decoder_pred(self.decoder_norm(x)[:, self.num_prefix_tokens :])
