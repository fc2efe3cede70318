"""What to type here in place of the flags and settings of other programs.

A table per program: its words, as its users type them, and what they mean here. ``{}`` stands for
the word's value. docs/coming_from.md and docs/coming_from_timm.md explain the same words;
tests/unit/training/test_foreign_flags.py holds both together. Words that are flags here, but for
hyphens in place of underscores, are not in the tables.
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
    "distributed.tp": Meaning("--mesh_tensor {}", "on TPUs"),
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

_ALL_DEVICES = "times the devices: it is global"
_BY_TORCHRUN = Meaning(note="launch/torchrun.sh sets it")
_EXACT_LOSS = Meaning(note="--objective clip and siglip have the loss of all pairs, not gathered")

TIMM = {
    # data
    "--dataset": Meaning(note="hfds/NAME: --data_source huggingface --data_dir NAME"),
    "--input-size": Meaning("--image_size {}", "height and width; channels: --in_chans"),
    "-b": Meaning("--batch_size {}", _ALL_DEVICES),
    "-vb": Meaning(note="evaluation uses --batch_size"),
    "--validation-batch-size": Meaning(note="evaluation uses --batch_size"),
    "-j": Meaning("--num_workers {}"),
    "--workers": Meaning("--num_workers {}"),
    "--pin-mem": Meaning(note="always, on GPUs"),
    "--no-prefetcher": Meaning(note="images are normalized on the devices"),
    "--use-multi-epochs-loader": Meaning(note="always: loader processes live through epochs"),
    "--no-aug": Meaning("--scale 1 1 --ratio 1 1 --hflip 0"),
    "--jsd-loss": Meaning(note="there is no loss of Jensen-Shannon divergence"),
    # model
    "--gp": Meaning("--global_pool {}"),
    "--initial-checkpoint": Meaning("--init_from {}"),
    "--no-resume-opt": Meaning("--init_from CHECKPOINT", "instead of --resume"),
    "--drop": Meaning("--drop_rate {}"),
    "--drop-path": Meaning("--drop_path_rate {}"),
    "--grad-checkpointing": Meaning("--grad_ckpt full", "default"),
    "--torchcompile": Meaning("--compile", "GPUs; XLA always compiles"),
    "--sync-bn": Meaning(note="Vision Transformers have no batch norms"),
    "--amp": Meaning("--precision bf16", "weights and optimizer state stay fp32"),
    "--amp-dtype": Meaning(
        "--precision {}", "", {"bfloat16": "--precision bf16", "float16": "--precision fp16"}
    ),
    # optimizer and schedule
    "--opt": Meaning("--optimizer {}", "adamw, lion or muon"),
    "--opt-eps": Meaning("--eps {}"),
    "--opt-betas": Meaning("--betas {}"),
    "--momentum": Meaning("--betas {} 0.999", "there is no SGD"),
    "--clip-grad": Meaning("--clip_grad_norm {}", "default: 1"),
    "--clip-mode": Meaning(note="--clip_grad_norm clips by the global norm"),
    "--lr-base": Meaning("--lr {}", "not scaled by the batch: there it is by sqrt(batch / 256)"),
    "--sched": Meaning("--lr_schedule {}", "cosine, linear, constant, step or wsd"),
    "--sched-on-updates": Meaning(note="always: schedules change at each step"),
    "--cooldown-epochs": Meaning(note="the schedule ends with the last epoch"),
    # runs
    "--output": Meaning("--ckpt_dir {}", "one folder per run"),
    "--experiment": Meaning("--ckpt_dir {}", "one folder per run"),
    "--checkpoint-hist": Meaning("--keep_checkpoints {}"),
    "--recovery-interval": Meaning("--ckpt_step_interval {}"),
    "--eval-metric": Meaning("--ckpt_best", by_value={"loss": "--ckpt_best lowest_loss"}),
    "--tta": Meaning(note="evaluation has no test-time augmentation"),
    "--log-wandb": Meaning("--wandb PROJECT"),
    "--wandb-project": Meaning("--wandb {}"),
}
"""timm's training script."""

OPEN_CLIP = {
    "--train-data": Meaning("--data_dir {}"),
    "--dataset-type": Meaning(
        "--data_source {}", "", {"webdataset": "--data_source webdataset", "auto": ""}
    ),
    "--train-num-samples": Meaning(note="an epoch has all images; --max_steps ends a run earlier"),
    "--imagenet-val": Meaning("--data_dir {}", "the folder above val/, with --eval_only"),
    "--wd": Meaning("--weight_decay {}", "of norms and biases too: --no_decay norms biases"),
    "--beta1": Meaning("--betas {} 0.98", "both in one flag"),
    "--beta2": Meaning("--betas 0.9 {}", "both in one flag"),
    "--warmup": Meaning("--warmup_steps {}"),
    "--lr-scheduler": Meaning("--lr_schedule {}", "", {"const": "--lr_schedule constant"}),
    "--skip-scheduler": Meaning("--lr_schedule constant"),
    "--grad-clip-norm": Meaning("--clip_grad_norm {}", "default: 1"),
    "--accum-freq": Meaning("--grad_accum_steps {}", "--batch_size stays the images of a step"),
    "--force-patch-dropout": Meaning("--patch_drop_rate {}"),
    "--aug-cfg": Meaning(note="each augmentation has a flag: --scale, --color_jitter, --reprob"),
    "--name": Meaning("--ckpt_dir {}"),
    "--logs": Meaning("--ckpt_dir {}", "logs are in it, too"),
    "--save-frequency": Meaning("--ckpt_epoch_interval {}"),
    "--val-frequency": Meaning("--test_epoch_interval {}"),
    "--delete-previous-checkpoint": Meaning("--keep_checkpoints 1"),
    "--save-most-recent": Meaning(note="--resume auto continues from the newest checkpoint"),
    "--report-to": Meaning("--wandb PROJECT", "TensorBoard is always written"),
    "--wandb-project-name": Meaning("--wandb {}"),
    "--ddp-static-graph": Meaning(note="there is no DDP: FSDP, or --run_without_fsdp"),
    "--local-loss": _EXACT_LOSS,
    "--gather-with-grad": _EXACT_LOSS,
    "--siglip": Meaning("--objective siglip"),
    "--coca-caption-loss-weight": Meaning(note="no model writes captions"),
}
"""open_clip's training."""

DINO = {
    "--config-file": Meaning("@FILE", "a file of flags, such as those in recipes/"),
    "--no-resume": Meaning("--resume none"),
    "--output-dir": Meaning("--ckpt_dir {}"),
    "train.batch_size_per_gpu": Meaning("--batch_size {}", _ALL_DEVICES),
    "train.dataset_path": Meaning("--data_dir {}", "ImageNet:split=...:root=FOLDER is a folder"),
    "train.output_dir": Meaning("--ckpt_dir {}"),
    "train.saveckp_freq": Meaning("--ckpt_epoch_interval {}"),
    "train.seed": Meaning("--seed {}"),
    "train.num_workers": Meaning("--num_workers {}"),
    "train.OFFICIAL_EPOCH_LENGTH": Meaning(note="an epoch has all images"),
    "train.compile": switch("compile"),
    "optim.epochs": Meaning("--num_epochs {}"),
    "optim.lr": Meaning("--lr {}", "not scaled by the batch"),
    "optim.base_lr": Meaning(
        "--lr {}", "not scaled by the batch: there it is by sqrt(batch / 1024)"
    ),
    "optim.min_lr": Meaning("--min_lr {}"),
    "optim.warmup_epochs": Meaning("--warmup_epochs {}"),
    "optim.weight_decay": Meaning("--weight_decay {}"),
    "optim.weight_decay_end": Meaning("--weight_decay_end {}"),
    "optim.clip_grad": Meaning("--clip_grad_norm {}"),
    "optim.layerwise_decay": Meaning("--layer_decay {}"),
    "optim.freeze_last_layer_epochs": Meaning("--freeze_last_layer_epochs {}"),
    "optim.adamw_beta1": Meaning("--betas {} 0.999", "both in one flag"),
    "optim.adamw_beta2": Meaning("--betas 0.9 {}", "both in one flag"),
    "student.arch": Meaning("--model {}", "--list_models has the names"),
    "student.patch_size": Meaning("--patch_size {}"),
    "student.drop_path_rate": Meaning("--drop_path_rate {}"),
    "student.layerscale": Meaning("--init_values {}"),
    "student.num_register_tokens": Meaning("--reg_tokens {}"),
    "teacher.momentum_teacher": Meaning("--teacher_momentum {}"),
    "teacher.final_momentum_teacher": Meaning("--teacher_momentum_end {}"),
    "teacher.teacher_temp": Meaning("--teacher_temp {}"),
    "teacher.warmup_teacher_temp": Meaning("--warmup_teacher_temp {}"),
    "teacher.warmup_teacher_temp_epochs": Meaning("--warmup_teacher_temp_epochs {}"),
    "crops.global_crops_size": Meaning("--image_size {}"),
    "crops.global_crops_scale": Meaning("--global_crops_scale {}"),
    "crops.local_crops_size": Meaning("--local_crop_size {}"),
    "crops.local_crops_number": Meaning("--local_crops {}"),
    "crops.local_crops_scale": Meaning("--local_crops_scale {}"),
    "dino.head_n_prototypes": Meaning("--dino_prototypes {}"),
    "dino.head_hidden_dim": Meaning("--dino_head_hidden {}"),
    "dino.head_bottleneck_dim": Meaning("--dino_head_bottleneck {}"),
    "dino.koleo_loss_weight": Meaning("--koleo_weight {}"),
    "ibot.head_n_prototypes": Meaning("--ibot_prototypes {}"),
    "ibot.loss_weight": Meaning("--ibot_weight {}"),
    "ibot.mask_ratio_min_max": Meaning("--ibot_mask_ratio {}"),
    "gram.ckpt": Meaning("--gram_weights {}"),
    "gram.loss_weight": Meaning("--gram_weight {}"),
}
"""DINOv2 and DINOv3: the keys of their configurations, and their flags."""

MAE = {
    "--accum_iter": Meaning("--grad_accum_steps {}", "--batch_size stays the images of a step"),
    "--blr": Meaning("--lr {}", "not scaled by the batch: there it is by batch / 256"),
    "--data_path": Meaning("--data_dir {}"),
    "--log_dir": Meaning(note="logs are in --ckpt_dir"),
    "--start_epoch": Meaning(note="--resume auto continues where the run stopped"),
    "--finetune": Meaning("--init_from {}"),
    "--nb_classes": Meaning("--num_classes {}"),
    "--cls_token": Meaning("--global_pool token"),
    "--eval": Meaning("--eval_only"),
    "--dist_eval": Meaning(note="always"),
    "--world_size": _BY_TORCHRUN,
    "--local_rank": _BY_TORCHRUN,
    "--dist_url": _BY_TORCHRUN,
    "--dist_on_itp": _BY_TORCHRUN,
}
"""MAE's pre-training and fine-tuning (facebookresearch/mae)."""

TABLES = (RECIPE, SHARD_TENSOR, FSDP_TUTORIAL, TIMM, OPEN_CLIP, DINO, MAE)


def meanings(unknown: Sequence[str]) -> dict[str, str]:
    """Return what to type in place of those unknown words that are other programs', keyed by word.

    A word's value follows its "=", or is the next word.
    """
    known = {_plain(word): meaning for table in TABLES for word, meaning in table.items()}
    texts = {}
    for word, following in zip(unknown, [*unknown, ""][1:], strict=True):
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
