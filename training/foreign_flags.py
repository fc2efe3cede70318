"""What to type here in place of the flags and settings of other programs.

A table per program: its words, as its users type them, and what they mean here. ``{}`` stands for
the word's value. docs/coming_from.md explains the same words;
tests/unit/training/test_foreign_flags.py holds both together.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class Meaning(NamedTuple):
    """What a word of another program means here."""

    flags: str = ""
    """What to type; "" if nothing."""
    note: str = ""
    by_value: Mapping[str, str] = MappingProxyType({})
    """What to type for certain values of the word, in lower case."""

    @property
    def takes_value(self) -> bool:
        return "{}" in self.flags or bool(self.by_value)

    def typed(self, value: str) -> str:
        """Return what to type for a value of the word, with the note."""
        name = value.lower().rpartition(".")[2]  # of ShardingStrategy.NO_SHARD, for example
        if name in self.by_value:
            flags = self.by_value[name]
        elif name in ("false", "null", "none", "-1"):
            flags = ""
        else:  # Hydra writes several as [0.9,0.98]
            several = " ".join(re.findall(r"[^][,\s]+", value))
            flags = self.flags.replace("{}", several or "VALUE")
        text = f"use {flags}" if flags else "leave it out"
        return f"{text} ({self.note})" if self.note else text


def switch(name: str) -> Meaning:
    """Return the meaning of a setting that is true or false, as our flag with a ``--no-`` form."""
    return Meaning(f"--{name}", by_value={"false": f"--no-{name}"})


_ON_THE_CPU = Meaning(
    note="CUDA_VISIBLE_DEVICES= before the command hides the GPUs: it then trains on the CPU"
)

RECIPE = {
    # Hydra's own.
    "--config-name": Meaning("@recipes/bionemo_vit_base.args", "vit_te_...: with --block te"),
    "-cn": Meaning("@recipes/bionemo_vit_base.args", "vit_te_...: with --block te"),
    "--config-path": Meaning("@FILE", "a file of flags"),
    "--multirun": Meaning(note="one run per command and --ckpt_dir"),
    # model
    **{f"model.vit.{name}": Meaning(f"--{name} {{}}") for name in (
        "img_size patch_size in_chans num_classes global_pool embed_dim depth num_heads mlp_ratio "
        "init_values reg_tokens drop_rate pos_drop_rate patch_drop_rate proj_drop_rate "
        "attn_drop_rate drop_path_rate"
    ).split()},
    **{f"model.vit.{name}": switch(name) for name in (
        "qkv_bias qk_norm scale_attn_norm scale_mlp_norm proj_bias class_token no_embed_class "
        "pre_norm final_norm fc_norm pool_include_prefix"
    ).split()},
    "model.vit.pos_embed": Meaning("--pos_embed learn", by_value={"false": "--pos_embed none"}),
    "model.vit.weight_init": Meaning("--weight_init {}", "timm is the default", {"timm": ""}),
    "model.vit.init_variance_rescale": Meaning(note="no flag: models that need it have it"),
    "model.transformer_engine": Meaning("--block te"),
    "model.channels_last": Meaning("--channels_last"),
    # optimizer
    "optimizer.lr": Meaning("--lr {}"),
    "optimizer.betas": Meaning("--betas {}"),
    "optimizer.eps": Meaning("--eps {}"),
    "optimizer.weight_decay": Meaning("--weight_decay {}"),
    # distributed
    "distributed.dp_outer": Meaning("--dp_outer {}"),
    "distributed.dp_shard": Meaning("--dp_shard {}", "default: all other devices"),
    "distributed.cp": Meaning("--mesh_domain {}", "it splits the rows of images"),
    "distributed.tp": Meaning("--mesh_tensor {}", "XLA only"),
    # fsdp
    "fsdp.init_model_with_meta_device": switch("meta_init"),
    "fsdp.zero_dp_strategy": Meaning("--zero_dp_strategy {}"),
    "fsdp.fsdp_unit_modules": Meaning(note="each block is a unit, and what is around them"),
    "fsdp.outer_dp_sharding_strategy": Meaning("--outer_dp_sharding_strategy {}"),
    "fsdp.grad_reduce_in_fp32": Meaning(
        "--reduce_dtype fp32", "default", {"false": "--reduce_dtype bf16"}
    ),
    "fsdp.preserve_fp32_weights": Meaning(by_value={"false": "--no_preserve_fp32_weights"}),
    # training
    "training.steps": Meaning("--max_steps {}"),
    "training.val_interval": Meaning(
        "--test_step_interval {} --ckpt_step_interval {}", "checkpoints are not tied to evaluations"
    ),
    "training.log_interval": Meaning("--log_step_interval {}"),
    "training.checkpoint.path": Meaning("--ckpt_dir {}"),
    "training.checkpoint.resume_from_metric": Meaning(
        "--resume auto", by_value={"-": "--resume lowest_loss", "+": "--resume best"}
    ),
    "inference.checkpoint.path": Meaning("--predict IMAGE --resume {}"),
    "inference.checkpoint.format": Meaning(note="--resume detects the format"),
    "inference.checkpoint.megatron_fsdp": Meaning(note="--resume removes the prefix module."),
    # dataset
    "dataset.num_classes": Meaning("--num_classes {}"),
    "dataset.num_workers": Meaning("--num_workers {}"),
    "dataset.train.batch_size": Meaning("--batch_size {}", "times the GPUs: it is global"),
    "dataset.val.batch_size": Meaning(note="evaluation uses --batch_size"),
    "dataset.train.shuffle": Meaning(note="training images are always shuffled"),
    "dataset.val.shuffle": Meaning(note="evaluation reads each image of val/ once"),
    "random.seed": Meaning("--seed {}"),
    # profiling
    "profiling.torch_memory_profile": Meaning("--profile 10:12", "steps; with a memory snapshot"),
    "profiling.wandb": Meaning("--wandb PROJECT"),
    "profiling.wandb_kwargs.project": Meaning("--wandb {}"),
}  # fmt: skip
"""NVIDIA's ViT recipe (BioNeMo): the keys of its configuration, and Hydra's flags."""

SHARD_TENSOR = {
    "--domain_size": Meaning("--mesh_domain {}"),
    "--ddp_size": Meaning("--dp_outer {}", "or, with their --fsdp, --dp_shard"),
    "--use_mixed_precision": Meaning("--precision bf16", "or fp16, on GPUs with --fsdp fsdp2"),
    "--image_size_start": Meaning("--image_size {}", "ranges: benchmarks/domain_parallel.py"),
    "--image_size_stop": Meaning(note="benchmarks/domain_parallel.py has it"),
    "--image_size_step": Meaning(note="benchmarks/domain_parallel.py has it"),
    "--num_warmup": Meaning(note="benchmarks/domain_parallel.py has it"),
    "--num_iterations": Meaning("--max_steps {}", "to measure: benchmarks/domain_parallel.py"),
    "--inference_only": Meaning(note="benchmarks/domain_parallel.py has it"),
}
"""PhysicsNeMo's tutorial of ShardTensor and its example 5_vit_training_loop."""

FSDP_TUTORIAL = {
    "--nproc_per_node": Meaning(note="NPROC_PER_NODE=N before launch/torchrun.sh"),
    "--nnodes": Meaning(note="NNODES=N before launch/torchrun.sh"),
    "--batch-size": Meaning("--batch_size {}", "times the devices: it is global"),
    "--test-batch-size": Meaning(note="evaluation uses --batch_size"),
    "--epochs": Meaning("--num_epochs {}"),
    "--gamma": Meaning("--lr_schedule step --decay_epochs 1 --decay_rate {}"),
    "--no-cuda": _ON_THE_CPU,
    "--no-accel": _ON_THE_CPU,
    "--track_memory": Meaning(note="log lines on GPUs have the peak memory; details: --profile"),
    "--run_validation": Meaning("--test_epoch_interval 1", "or fewer; the last epoch is evaluated"),
    "--save-model": Meaning("--ckpt_best", "checkpoints are always saved"),
    "--log-interval": Meaning("--log_step_interval {}"),
    "--dry-run": Meaning("--max_steps 1"),
    "--model_name": Meaning("--model {}"),
    "--mixed-precision": Meaning("--precision bf16"),
    "--use_fp16": Meaning("--precision fp16 --fsdp fsdp2"),
    "--buffer_dtype": Meaning(note="no buffers to cast; rotary positions stay fp32"),
    "--sharding_strategy": Meaning(
        "--zero_dp_strategy 3",
        by_value={
            "shard_grad_op": "--zero_dp_strategy 2",
            "no_shard": "--zero_dp_strategy 0",
            "hybrid_shard": "--dp_outer 2",
        },
    ),
    "--limit_all_gathers": Meaning("--forward_prefetch 1", "default"),
    "--explicit-prefetching": Meaning("--forward_prefetch 2 --backward_prefetch 2"),
    "--explicit-prefetch": Meaning("--forward_prefetch 2 --backward_prefetch 2"),
    "--fsdp_activation_checkpointing": Meaning(
        "--grad_ckpt full", "default", {"false": "--grad_ckpt none"}
    ),
    "--checkpoint_type": Meaning(note="always sharded; one file: tools.convert"),
    "--save_optimizer": Meaning(note="checkpoints always have the optimizer"),
    "--dcp-api": Meaning(note="checkpoints are always DCP"),
    "--num_workers_dataloader": Meaning("--num_workers {}"),
    "--batch_size_training": Meaning("--batch_size {}", "times the devices: it is global"),
}
"""PyTorch's FSDP tutorials, and their code in pytorch/examples (FSDP, FSDP2, mnist)."""

TABLES = (RECIPE, SHARD_TENSOR, FSDP_TUTORIAL)


def meanings(unknown: Sequence[str]) -> dict[str, str]:
    """Return what to type in place of those unknown words that are other programs', keyed by word.

    A word's value follows its "=", or is the next word.
    """
    known = {_plain(word): meaning for table in TABLES for word, meaning in table.items()}
    texts = {}
    for word, following in zip(unknown, [*unknown[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        meaning = known.get(_plain(name))
        if not meaning or not (equals or name.startswith("-")):
            continue
        if not equals and meaning.takes_value and not re.match(r"-\D|.*=", following):
            value = following
        texts[word] = f"{name}: {meaning.typed(value)}"
    return texts


def _plain(word: str) -> str:
    """Return a flag or a key of Hydra's without its signs, with underscores."""
    return word.lstrip("-+~").replace("-", "_")
