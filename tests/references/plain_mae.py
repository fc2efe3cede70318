"""A masked autoencoder in plain PyTorch, written from the paper (arXiv 2111.06377): a reference.

It embeds all patches and then picks by indices, and it computes attention step by step. Prints one
JSON line. Takes the flags of the run; everything else is as in tests/support/cli.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from data.batch import PADDING, BatchShard
from data.open import open_data
from features.mae.config import MaeConfig
from features.mae.objective import ranks_of
from tests.fakes.filled import filled
from tests.references.plain_steps import train_by, warm_cosine
from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.support.resolved import on_xla
from tools.self_check.plain import normalized
from training.data import dataset_request
from training.optimizers import key_of


class Block(nn.Module):
    """Norm, attention, norm, MLP, with residuals."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
        )

    def forward(self, x):
        images, tokens, width = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).view(images, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.attn["proj"]((scores @ v).transpose(1, 2).reshape(images, tokens, width))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class PlainMae(nn.Module):
    """An encoder with a class token, and a decoder; square images of square patches."""

    def __init__(self, *, image, patch, width, heads, depth, decoder):
        super().__init__()
        patches, (decoder_width, decoder_heads, decoder_depth) = (image // patch) ** 2, decoder
        self.patch = patch
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(positions(image // patch, width), requires_grad=False)
        self.decoder_positions = positions(image // patch, decoder_width)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_width, decoder_heads) for _ in range(decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_width, patch * patch * 3)
        assert self.pos_embed.shape[1] == patches + 1

    def loss(self, images, ranks, ratio, normalize):
        """The loss of each image. ``ranks``: each patch's place in a random order."""
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        order = ranks.long().argsort(1)
        kept = order[:, : int(x.shape[1] * (1 - ratio))]
        x = torch.stack([of_image[at] for of_image, at in zip(x, kept, strict=True)])
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))

        whole = []
        for of_image, at in zip(x, kept, strict=True):
            tokens = self.mask_token[0].repeat(ranks.shape[1], 1)
            tokens = tokens.index_copy(0, at, of_image[1:])
            whole.append(torch.cat([of_image[:1], tokens]))
        x = torch.stack(whole) + self.decoder_positions
        for block in self.decoder_blocks:
            x = block(x)
        predicted = self.decoder_pred(self.decoder_norm(x))[:, 1:]

        side = self.patch
        pixels = F.unfold(images, side, stride=side).transpose(1, 2)  # channels, rows, columns
        pixels = pixels.unflatten(2, (3, side * side)).transpose(2, 3).flatten(2)
        if normalize:
            deviation = (pixels.var(-1, keepdim=True) + 1e-6) ** 0.5
            pixels = (pixels - pixels.mean(-1, keepdim=True)) / deviation
        hidden = torch.ones(ranks.shape).scatter(1, kept, 0.0)
        return ((predicted - pixels) ** 2).mean(-1).mul(hidden).sum(1) / hidden.sum(1)


def positions(side, width):
    """Sines and cosines of columns, then of rows; zeros for the class token."""
    found = torch.zeros(1, 1 + side * side, width)
    for patch in range(side * side):
        for half, place in enumerate((patch % side, patch // side)):
            for i in range(width // 4):
                angle = torch.tensor(place / 10000 ** (i / (width // 4)), dtype=torch.float64)
                found[0, 1 + patch, half * width // 2 + i] = angle.sin()
                found[0, 1 + patch, half * width // 2 + width // 4 + i] = angle.cos()
    return found


def train(flags, steps=6):
    """Losses, gradient norms and the validation loss of a run with these flags, and its model."""
    source = ["--data_dir", str(DIGITS), "--hflip", "0", "--objective", "mae"]
    run = on_xla([*source, *TINY_MODEL, *TINY_RUN, *flags])
    how, objective, sizes = run.config.optimizer, run.config.of(MaeConfig), run.model.sizes
    decoder = run.model.stacks["decoder_blocks"]
    model = PlainMae(
        image=sizes.input_shape[1],
        patch=sizes.input_shape[1] // sizes.grid[0],
        width=sizes.embed_dim,
        heads=sizes.num_heads,
        depth=sizes.depth,
        decoder=(decoder.embed_dim, decoder.num_heads, decoder.depth),
    )
    first = filled(run.model, run.config.seed).state_dict()
    assert torch.equal(first["pos_embed"], model.pos_embed)
    model.load_state_dict(first)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=how.lr, weight_decay=how.weight_decay)
    batch_size = run.config.data.batch_size

    def loss(images, numbers, *draw):
        key = torch.tensor([key_of(run.config.seed, "mask", *draw)], dtype=torch.int32)
        ranks = ranks_of(numbers, key, sizes.num_patches)
        images = normalized(images, run.config.data.preprocessing)
        return model.loss(images, ranks, objective.mask_ratio, objective.norm_pix_loss)

    def losses_of(step, batch):
        yield loss(batch["image"], torch.arange(batch_size), "step", step).mean()

    losses, norms = train_by(losses_of, optimizer, run, steps, warm_cosine(how))
    found, number, data = [], 0, open_data(dataset_request(run))
    with torch.no_grad():
        for batch in data.val_loader(batch_size, BatchShard()).epoch(0):
            images, labels = batch["image"], batch["target"]
            numbers = torch.arange(number, number + len(images))
            found.append(loss(images, numbers, "validation")[labels != PADDING])
            number += len(images)
    return {"loss": losses, "grad_norm": norms, "val_loss": torch.cat(found).mean().item()}, model
