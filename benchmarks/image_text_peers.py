"""open_clip's training step of SigLIP and CLIP, for gpu_step.py: its text tower, losses and DDP.

The image tower is the run's, as open_clip takes it from timm too.

Requires open_clip: pip install --no-deps open_clip_torch ftfy wcwidth. Initial weights are those of
the run, so the first loss equals that of the program's own step.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from open_clip.transformer import LayerNorm, TextTransformer
from timm.layers import get_act_layer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_peers import Step, autocast, initial_weights
from data.batch import Batch
from features.image_text.model import ImageTextSpec
from models.timm_models import TimmSpec
from tools.self_check.plain import clip_and_step
from torch_fsdp.parallel_plan import TorchRun
from training.backend import Backend
from training.data import normalizer
from training.errors import UsageError

_IN_BLOCK = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.in_proj_": "attn.qkv.",
    "attn.out_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
"""Parts of open_clip's names in a block, and the run's."""


class Towers(nn.Module):
    """Both towers, scale and bias, as in open_clip's ``CustomTextCLIP``."""

    def __init__(self, spec: ImageTextSpec) -> None:
        super().__init__()
        assert isinstance(spec.image, TimmSpec)
        self.visual = VisionTransformer(**{**spec.image.arguments, "num_classes": 0})
        text, width = spec.config.text, spec.embedding_width
        self.text = TextTransformer(
            text.length,
            text.vocab_size,
            text.width,
            text.heads,
            text.depth,
            text.mlp_ratio,
            output_dim=width,
            no_causal_mask=not text.causal,
            pool_type=text.pool,
            proj_bias=spec.objective == "siglip",
            act_layer=get_act_layer(text.act),
            norm_layer=functools.partial(LayerNorm, eps=text.norm_eps),
        )
        self.projection: nn.Module = nn.Identity()
        if "image_projection.weight" in dict(spec.meta.named_parameters()):
            self.projection = nn.Linear(self.visual.embed_dim, width, bias=False)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if spec.objective == "siglip" else None

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of the run's model."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                value = weights[_name_in_run(name)]
                if name == "text.text_projection" and value.dim() == 2:  # not a Linear there
                    value = value.T
                parameter.copy_(value.reshape(parameter.shape))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normalize = functools.partial(nn.functional.normalize, dim=-1)
        found = (
            normalize(self.projection(self.visual(images))),
            normalize(self.text(texts)),
            self.logit_scale.exp(),
        )
        return found if self.logit_bias is None else (*found, self.logit_bias)


def _name_in_run(name: str) -> str:
    """Return the name in the run's model of a parameter of ``Towers``."""
    tower, _, rest = name.partition(".")
    if tower == "visual":
        return rest
    if tower == "projection":
        return f"image_{name}"
    rest = rest.replace("transformer.resblocks", "text_blocks")
    for theirs, ours in _IN_BLOCK.items():
        rest = rest.replace(theirs, ours)
    around = {
        "token_embedding.weight": "text_embed.weight",
        "positional_embedding": "text_pos_embed",
        "text_projection": "text_projection.weight",
    }
    return around.get(rest, rest.replace("ln_final", "text_norm")) if rest else name


def open_clip_step(
    run: TorchRun, backend: Backend, batches: list[Batch], *, compile_mode: str | None = None
) -> Step:
    """Return the step, on each process's part of a batch; the towers are compiled, with the mode of
    torch.compile, if any. Raises UsageError."""
    spec, config, device = run.model, run.config.optimizer, batches[0]["image"].device
    assert isinstance(spec, ImageTextSpec)
    assert config.betas is not None  # resolved
    if len(batches) > 1 or config.optimizer != "adamw" or spec.config.text.pool == "mean":
        raise UsageError(
            "open_clip's step requires --grad_accum_steps 1, --optimizer adamw and another "
            "--text_pool than mean",
            agreed=True,
        )
    model: Any = Towers(spec)
    model.load(initial_weights(run))
    model = model.to(device).train()
    if run.config.sharding.grad_ckpt == "full":
        model.visual.set_grad_checkpointing()
        model.text.set_grad_checkpointing()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    if backend.batch_shards > 1:
        model = DistributedDataParallel(model)
    if compile_mode:
        model = torch.compile(model, mode=compile_mode)
    share = {"rank": backend.batch_shard, "world_size": backend.batch_shards}
    loss_of: nn.Module = SigLipLoss(**share)
    if spec.objective == "clip":
        loss_of = ClipLoss(**share, local_loss=True, gather_with_grad=True)
    lower, normalize = autocast(run, device), normalizer(run, backend.constant)
    images, texts = batches[0]["image"], batches[0]["text"].long()

    def step(number: int) -> torch.Tensor:
        with lower():
            loss = loss_of(*model(normalize(images), texts))
        loss.backward()
        clip_and_step(optimizer, config.clip_grad_norm)
        return backend.mean(loss.detach())

    return step
