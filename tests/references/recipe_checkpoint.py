"""The DCP folder of a training script that is not ours: ``KIND FOLDER`` under torchrun, on gloo.

megatron: as NVIDIA's ViT recipe trains and saves, by the real megatron_fsdp. fsdp2: as PyTorch's
tutorial on distributed checkpoints does, the model and optimizer inside one ``Stateful``.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from tests.fakes.megatron_on_cpu import without_cuda
from tests.support.cli import TINY_SIZES

RECIPES_MODEL = {
    **TINY_SIZES,
    "num_classes": 10,
    "global_pool": "map",
    "qk_norm": True,
    "scale_attn_norm": True,
    "scale_mlp_norm": True,
    "reg_tokens": 8,
    "pre_norm": True,
    "fc_norm": True,
}
"""vit_base_patch16_224 of the recipe, narrower."""


class Tokens(nn.Module):
    """The parameters that the recipe's model has in a module of their own."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.pos_embed = model.pos_embed
        self.cls_token = model.cls_token
        self.reg_token = model.reg_token

    def forward(self, x):
        special = [each.expand(len(x), -1, -1) for each in (self.cls_token, self.reg_token)]
        return torch.cat([*special, x], dim=1) + self.pos_embed


class RecipesViT(VisionTransformer):
    """timm's model with the recipe's names."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        tokens = Tokens(self)
        del self.pos_embed
        self.pos_embed, self.cls_token, self.reg_token = tokens, None, None

    def _pos_embed(self, x):
        return self.pos_embed(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def megatron(folder: str) -> None:
    from megatron_fsdp import fully_shard as fully_shard_by_megatron

    model = RecipesViT(**RECIPES_MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mesh = dist.init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_shard", "tp")
    )
    model, optimizer = fully_shard_by_megatron(
        model,
        optimizer,
        zero_dp_strategy=3,
        fsdp_unit_modules=[Block, PatchEmbed, nn.LayerNorm, nn.Linear],
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        tp_dim="tp",
        device=torch.device("cpu"),
        sync_model_each_microbatch=True,
        preproc_state_dict_for_dcp_ckpt=True,
        calculate_per_token_loss=True,  # gloo cannot scale gradients as it sums them
    )
    train_step(model, optimizer)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(content, checkpoint_id=folder)


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


def fsdp2(folder: str) -> None:
    model = VisionTransformer(**RECIPES_MODEL)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    dcp.save({"app": AppState(model, optimizer), "step": 1}, checkpoint_id=folder)


if __name__ == "__main__":
    without_cuda()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    {"megatron": megatron, "fsdp2": fsdp2}[sys.argv[1]](sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
