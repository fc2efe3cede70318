"""HybridViT in plain PyTorch, with the parameter names of PhysicsNeMo's tutorial, written from the
tutorial's printed model: a reference. Attention is written out, head by head."""

import torch
import torch.nn.functional as F
from torch import nn


def module(**parts):
    made = nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


class PlainHybridViT(nn.Module):
    def __init__(self, size, patch, channels, width, depth, heads, hidden, classes):
        super().__init__()
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(size)]
        tokens = torch.Size(side // patch for side in size).numel()
        self.heads = heads
        self.patch_embed = module(
            conv=convolution(channels, width, patch, stride=patch), norm=nn.LayerNorm(width)
        )
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.stages = nn.ModuleList(
            module(
                norm1=nn.LayerNorm(width),
                attn=module(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width)),
                norm2=nn.LayerNorm(width),
                mlp=module(fc1=nn.Linear(width, hidden), fc2=nn.Linear(hidden, width)),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        patches = self.patch_embed.conv(images).flatten(2).mT
        tokens = F.relu(self.patch_embed.norm(patches)) + self.pos_embed
        for stage in self.stages:
            query, key, value = stage.attn.qkv(stage.norm1(tokens)).chunk(3, dim=-1)
            mixed = [
                (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
                for q, k, v in zip(
                    *(each.chunk(self.heads, dim=-1) for each in (query, key, value)), strict=True
                )
            ]
            tokens = tokens + stage.attn.proj(torch.cat(mixed, dim=-1))
            tokens = tokens + stage.mlp.fc2(F.gelu(stage.mlp.fc1(stage.norm2(tokens))))
        return self.head(tokens.mean(dim=1))


def random_hybrid_vit(*sizes, seed=0):
    """One in which every parameter matters."""
    torch.manual_seed(seed)
    model = PlainHybridViT(*sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
