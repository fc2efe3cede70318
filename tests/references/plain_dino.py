"""Self-distillation in plain PyTorch, written from the papers (DINO arXiv 2104.14294, iBOT
2111.07832, DINOv2 2304.07193, KoLeo 1806.03198, DINOv3 2508.10104): a reference.

One image, crop and patch at a time, by indices. Prints one JSON line. Takes the flags of the run;
everything else is as in tests/support/cli.py.
"""

import copy
import itertools
import json
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import nn

from data.batch import BatchShard
from data.open import open_data
from features.dino.config import DinoConfig
from tests.fakes.filled import filled
from tests.references.plain_mae import Block
from tests.references.plain_steps import warm_cosine
from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.support.resolved import on_xla
from tools.self_check.plain import backward, clip_and_step, normalized
from training.data import dataset_request


class Head(nn.Module):
    def __init__(self, width, hidden, bottleneck, prototypes):
        super().__init__()
        self.mlp = nn.ModuleList(
            [
                nn.Linear(width, hidden),
                nn.Identity(),
                nn.Linear(hidden, hidden),
                nn.Identity(),
                nn.Linear(hidden, bottleneck),
            ]
        )
        self.prototypes = nn.ParameterDict({"weight": torch.zeros(prototypes, bottleneck)})

    def forward(self, x):
        """The cosine of a vector (width,) with each prototype."""
        x = F.gelu(self.mlp[0](x))
        x = self.mlp[4](F.gelu(self.mlp[2](x)))
        rows = self.prototypes["weight"]
        return (rows / rows.norm(dim=1, keepdim=True)) @ (x / x.norm())


class PlainDino(nn.Module):
    """A student, or a teacher: square images of square patches, a class token."""

    def __init__(self, *, patch, side, width, heads, depth, dino):
        super().__init__()
        self.patch, self.side = patch, side
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + side * side, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        sizes = (width, dino.dino_head_hidden, dino.dino_head_bottleneck)
        self.dino_head = Head(*sizes, dino.dino_prototypes)
        self.ibot_head = Head(*sizes, dino.ibot_prototypes)

    def tokens(self, crop, masked=()):
        """The tokens of one crop, (1 + patches, width); the class token is the first."""
        x = self.patch_embed["proj"](crop[None]).flatten(2).transpose(1, 2)[0]
        rows = [self.mask_token[0, 0] if i in masked else x[i] for i in range(len(x))]
        side = crop.shape[-1] // self.patch
        positions = resample_abs_pos_embed(
            self.pos_embed, [side, side], [self.side, self.side], num_prefix_tokens=1
        )
        x = torch.stack([self.cls_token[0, 0], *rows])[None] + positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[0]


def sinkhorn(logits, temperature):
    """Sinkhorn and Knopp's iteration of (samples, prototypes), as the papers write it."""
    q = torch.exp(logits.double() / temperature).T
    prototypes, samples = q.shape
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / prototypes
        q = q / q.sum(0, keepdim=True) / samples
    return (q * samples).T.float()


def of_grid(features, side):
    """Features of a larger crop's patches, (patches, width), for a crop of side x side patches."""
    own = math.isqrt(len(features))
    grid = features.T.reshape(1, -1, own, own)
    resampled = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return resampled.reshape(-1, side * side).T


def losses_of(student, teacher, gram, batch, temperature, dino):
    """The parts of the loss of a batch: a list of (global crops, the Gram teacher's, local crops,
    masked patches)."""
    with torch.no_grad():
        of_teacher = [[teacher.tokens(crop) for crop in crops] for crops, *_ in batch]
        logits = [teacher.dino_head(tokens[0]) for image in of_teacher for tokens in image]
        classes = sinkhorn(torch.stack(logits), temperature).view(len(batch), 2, -1)
        of_each = np.array([-np.sum(p * np.log(p)) for p in classes.flatten(0, 1).double().numpy()])
        logits = [
            teacher.ibot_head(image[0][1 + patch])
            for image, (*_, masked) in zip(of_teacher, batch, strict=True)
            for patch in masked
        ]
        patches = iter(sinkhorn(torch.stack(logits), temperature))

    def cross_entropy(target, logits):
        return -(target * torch.log_softmax(logits / dino.student_temp, 0)).sum()

    pairs, of_patches, class_tokens, anchored = [], [], [[], []], []
    for number, (global_crops, gram_crops, local_crops, masked) in enumerate(batch):
        seen = [student.tokens(global_crops[0], masked), student.tokens(global_crops[1])]
        answers = [student.dino_head(tokens[0]) for tokens in seen]
        answers += [student.dino_head(student.tokens(crop)[0]) for crop in local_crops]
        pairs += [
            cross_entropy(classes[number, t], answer)
            for t in range(2)
            for s, answer in enumerate(answers)
            if s != t
        ]
        found = [
            cross_entropy(next(patches), student.ibot_head(seen[0][1 + patch])) for patch in masked
        ]
        of_patches.append(sum(found) / len(found))
        for crop in range(2):
            class_tokens[crop].append(seen[crop][0])
            if gram is not None:
                anchor = gram.tokens((gram_crops or global_crops)[crop])[1:]
                if gram_crops:
                    anchor = of_grid(anchor, math.isqrt(len(seen[crop]) - 1))
                cosines = [
                    torch.stack([torch.cosine_similarity(each, rows) for each in rows])
                    for rows in (seen[crop][1:], anchor)
                ]
                anchored.append(((cosines[0] - cosines[1]) ** 2).mean())

    koleo = 0.0
    for tokens in class_tokens:
        points = [token / token.norm() for token in tokens]
        for start in range(0, len(points), dino.koleo_group):
            group = points[start : start + dino.koleo_group]
            for point in group:
                others = [(point - other).norm() for other in group if other is not point]
                koleo = koleo - torch.stack(others).min().log() / len(points)
    # iBOT's loss is a mean over all global crops, of which half have masked patches.
    parts = {
        "loss_dino": torch.stack(pairs).mean(),
        "loss_ibot": torch.stack(of_patches).mean() / 2,
        "loss_koleo": koleo,
    }
    spreads = []
    for tokens in class_tokens:
        units = np.stack([(x / x.norm()).detach().double().numpy() for x in tokens])
        spreads.append(units.std(axis=0).mean() * math.sqrt(units.shape[1]))
    measured = {
        "teacher_entropy": torch.tensor(of_each.mean() / math.log(classes.shape[-1])),
        "token_std": torch.tensor(np.mean(spreads)),
    }
    weights = [1.0, dino.ibot_weight, dino.koleo_weight]
    if gram is not None:
        parts["loss_gram"] = torch.stack(anchored).mean()
        weights.append(dino.gram_weight)
    loss = sum(w * part for w, part in zip(weights, parts.values(), strict=True))
    return loss, parts | measured


def half_cosine(first, last, share):
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * share))


def plain_of(run):
    """The student of a run, with its first weights."""
    sizes = run.model.sizes
    model = PlainDino(
        patch=sizes.input_shape[1] // sizes.grid[0],
        side=sizes.grid[0],
        width=sizes.embed_dim,
        heads=sizes.num_heads,
        depth=sizes.depth,
        dino=run.config.of(DinoConfig),
    )
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    return model


def train(flags, steps=6, taught_by=None):
    """Losses, their parts and gradient norms of a run with these flags; its student and the average
    of it, which is the teacher unless there is another one: a ``PlainDino``."""
    source = ["--data_dir", str(DIGITS), "--hflip", "0", "--objective", "dino"]
    run = on_xla([*source, *TINY_MODEL, *TINY_RUN, *flags])
    how, dino, student = run.config.optimizer, run.config.of(DinoConfig), plain_of(run)
    teacher = copy.deepcopy(student).requires_grad_(False)
    prototypes = [head.prototypes["weight"] for head in (student.dino_head, student.ibot_head)]
    others = [p for p in student.parameters() if not any(p is each for each in prototypes)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": prototypes}])
    request = dataset_request(run)
    loader = open_data(request).train_loader(run.config.data.batch_size, BatchShard())
    total, epoch_steps = len(loader) * run.config.num_epochs, len(loader)
    gram = None
    if dino.gram_weights:
        gram = copy.deepcopy(teacher)
        gram.load_state_dict(torch.load(dino.gram_weights), strict=False)  # without heads
    columns, rate, preprocessing = {}, warm_cosine(how), run.config.data.preprocessing
    for step, fields in enumerate(itertools.islice(loader.epoch(0), steps)):
        decay = run.config.schedule.weight_decay_end
        decay = (
            how.weight_decay
            if decay is None
            else half_cosine(how.weight_decay, decay, step / total)
        )
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate(step, total), decay
        if step < round(dino.freeze_last_layer_epochs * epoch_steps):
            optimizer.param_groups[1]["lr"] = 0.0
        warmup = round(dino.warmup_teacher_temp_epochs * epoch_steps)
        rise = dino.teacher_temp - dino.warmup_teacher_temp
        temperature = dino.warmup_teacher_temp + rise * (min(1, step / warmup) if warmup else 1)

        kinds = ("global_crops", "gram_crops", "local_crops")
        batch = [
            (
                *(
                    [*normalized(fields[kind][i], preprocessing)] if kind in fields else []
                    for kind in kinds
                ),
                mask.nonzero().flatten().tolist(),
            )
            for i, mask in enumerate(fields["mask"])
        ]
        asked = taught_by or teacher
        loss, parts = losses_of(student, asked, gram, batch, temperature, dino)
        backward([loss])
        norm = clip_and_step(optimizer, how.clip_grad_norm)
        for name, value in {"loss": loss, "grad_norm": norm, **parts}.items():
            columns.setdefault(name, []).append(value.item())
        kept = half_cosine(dino.teacher_momentum, dino.teacher_momentum_end, step / total)
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.copy_(kept * old + (1 - kept) * new)
        if gram is not None and dino.gram_update_steps and (step + 1) % dino.gram_update_steps == 0:
            gram.load_state_dict(teacher.state_dict())
    return columns, student, teacher


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1:])[0]))
