"""Every value of every flag, from the flags' fields, in as few command lines as hold them.

A flag that is a switch or takes one of some words is in it by itself. ``VALUES`` has what is tried
of the others; a new flag without values there fails the test.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import DIGITS
from training.config import RunConfig
from training.errors import UsageError
from training.flags import FlagField, by_field, flag_fields

EVA = "timm/eva02_small_patch14_224"

VALUES: dict[str, tuple[str, ...]] = {
    "seed": ("0", "9223372036854775807"),
    "num_epochs": ("1", "300"),
    "max_steps": ("2", "3"),
    "num_workers": ("0", "1", "3"),
    "batch_size": ("16", "48"),
    "grad_accum_steps": ("1", "2"),
    "micro_batch_size": ("1", "100"),
    "scale": ("0.08 1", "1 1"),
    "ratio": ("0.5 2",),
    "hflip": ("0", "1"),
    "vflip": ("0", "1"),
    "aa": ("original", "3a", "rand-m9-mstd0.5-inc1", "augmix-m3-w3"),
    "color_jitter": ("0.4", "0.4 0.3 0.2", "0.4 0.3 0.2 0.1"),
    "reprob": ("0.5", "1"),
    "recount": ("1", "3"),
    "aug_repeats": ("1", "3"),
    "max_bad_images": ("0", "100", "1%"),
    "mean": ("0.5 0.5 0.5",),
    "std": ("0.5 0.5 0.5",),
    "intensity": ("auto", "full", "0 4095", "0.5% 99.5%"),
    "crop_pct": ("0.1", "1"),
    "buckets": ("16x16 12x20",),
    "image_size_schedule": ("8:0.5 16:0.5", "8 16"),
    "aa_min_magnitude": ("0", "9"),
    "columns": ("image label",),
    "split_by": ("writer",),
    "val_fraction": ("0.1", "0.5"),
    "split_seed": ("0", "7"),
    "train_split": ("train",),
    "val_split": ("validation",),
    "images_per_read": ("1", "8"),
    "model": ("vit_10b", "vit_tiny_patch16_224", "hybrid_vit", EVA),
    "img_size": ("16", "16 32"),
    "token_budget": ("40", "300"),
    "max_images_per_sequence": ("1", "255"),
    "max_tokens_per_image": ("5", "12"),
    "side_scale": ("0.5 1", "2 2"),
    "dimension": ("2",),
    "patch_size": ("4", "8"),
    "in_chans": ("3", "1"),
    "num_classes": ("10", "12"),
    "embed_dim": ("32", "64"),
    "depth": ("1", "3"),
    "num_heads": ("2", "4"),
    "mlp_ratio": ("2.5", "4"),
    "reg_tokens": ("0", "3"),
    "init_values": ("1e-5", "1"),
    "drop_rate": ("0", "0.1"),
    "pos_drop_rate": ("0", "0.1"),
    "patch_drop_rate": ("0", "0.5"),
    "proj_drop_rate": ("0", "0.1"),
    "attn_drop_rate": ("0", "0.1"),
    "drop_path_rate": ("0", "0.2"),
    "rope_rescale_coords": ("1", "2"),
    "mask_ratio": ("0.5", "0.75"),
    "decoder_depth": ("1", "2"),
    "decoder_embed_dim": ("16", "32"),
    "decoder_num_heads": ("1", "2"),
    "text_depth": ("1", "2"),
    "text_width": ("16", "32"),
    "text_heads": ("1", "2"),
    "text_mlp_ratio": ("2", "3.7"),
    "text_length": ("1", "6"),
    "text_vocab_size": ("2", "40"),
    "text_norm_eps": ("1e-6",),
    "projection_dim": ("8", "32"),
    "caption_key": ("caption",),
    "tokenizer": ("bytes",),
    "tokenizer_checksum": ("bytes",),
    "val_captions": ("1", "3"),
    "zero_shot": (str(DIGITS),),
    "zero_shot_every": ("0", "1"),
    "zero_shot_columns": ("image label",),
    "logit_scale_init": ("1", "20"),
    "logit_bias_init": ("-10", "0"),
    "local_crops": ("0", "2"),
    "local_crop_size": ("8", "12"),
    "crop_sizes": ("16x8", "16x8 24x12"),
    "global_crops_scale": ("0.5 1",),
    "local_crops_scale": ("0.1 0.5",),
    "ibot_mask_ratio": ("0.3 0.3", "0.1 1"),
    "dino_prototypes": ("8", "32"),
    "ibot_prototypes": ("8", "16"),
    "dino_head_hidden": ("16", "32"),
    "dino_head_bottleneck": ("8", "16"),
    "student_temp": ("0.1",),
    "teacher_temp": ("0.07",),
    "warmup_teacher_temp": ("0.04",),
    "warmup_teacher_temp_epochs": ("0", "0.5"),
    "teacher_momentum": ("0", "0.9"),
    "teacher_momentum_end": ("0.9", "1"),
    "freeze_last_layer_epochs": ("0", "1"),
    "ibot_weight": ("0", "1"),
    "koleo_weight": ("0", "0.1"),
    "koleo_group": ("2", "4"),
    "smoothing": ("0", "0.1"),
    "mixup": ("0", "0.8"),
    "cutmix": ("0", "1"),
    "cutmix_minmax": ("0.2 0.8",),
    "mixup_prob": ("0.5", "1"),
    "mixup_switch_prob": ("0", "1"),
    "bce_target_thresh": ("0", "0.2"),
    "distillation_alpha": ("0", "1"),
    "distillation_tau": ("1", "3"),
    "lr": ("0", "1e-3"),
    "weight_decay": ("0", "0.1"),
    "weight_decay_end": ("0", "0.2"),
    "betas": ("0.9 0.95",),
    "eps": ("1e-6",),
    "layer_decay": ("0.75", "1"),
    "no_decay": ("norms", "biases", "embeddings", "norms biases embeddings"),
    "clip_grad_norm": ("-1", "0", "0.1"),
    "warmup_steps": ("0", "1"),
    "warmup_epochs": ("0", "1.5"),
    "freeze_backbone_epochs": ("0", "0.5"),
    "backbone_warmup_epochs": ("0", "0.5"),
    "warmup_lr": ("0", "1e-4"),
    "min_lr": ("0", "1e-4"),
    "decay_epochs": ("0.5", "1"),
    "decay_rate": ("0.7", "1"),
    "decay_steps": ("1", "2"),
    "model_ema_decay": ("0", "0.99"),
    "class_weights": ("auto",),
    "logit_adjustment": ("0.5", "1"),
    "balanced_sampling": ("0", "0.5", "1"),
    "resume": ("auto", "none"),
    "ckpt_epoch_interval": ("1", "10"),
    "ckpt_step_interval": ("0", "1"),
    "ckpt_minutes_interval": ("0", "0.001"),
    "local_ckpt_step_interval": ("1", "50"),
    "keep_checkpoints": ("0", "1"),
    "max_failed_saves": ("1", "2"),
    "log_step_interval": ("1", "20"),
    "test_epoch_interval": ("1", "10"),
    "test_step_interval": ("0", "1"),
    "knn_every": ("0", "2"),
    "probe_every": ("0", "2"),
    "rank_every": ("0", "2"),
    "segment_probe_every": ("1", "2"),
    "segment_ignore": ("0", "0 255"),
    "eval_batches": ("0", "1"),
    "max_bad_steps": ("0", "1"),
    "step_timeout_s": ("0", "200"),
    "wandb": ("project",),
    "mesh_dcn": ("1", "slices", "2"),
    "mesh_fsdp": ("2", "4"),
    "mesh_domain": ("1", "2"),
    "mesh_tensor": ("1", "2"),
    "mark_step_every_n_blocks": ("0", "1"),
    "zero_dp_strategy": ("0", "1", "2", "3", "no_shard", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("0", "1"),
    "forward_prefetch": ("0", "1", "5"),
    "backward_prefetch": ("0", "1", "5"),
    "profile": ("1:2",),
}
"""By field: what is typed for it. Of flags whose values are files, see ``files``."""

NOT_TRAINING = "does something else than train"
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        "print_config self_check plan list_models predict texts eval_only eval_report".split(),
        NOT_TRAINING,
    ),
    **dict.fromkeys(
        "json use_ema features features_of without_labels pca knn probe rank segment_probe".split(),
        NOT_TRAINING,
    ),
    **dict.fromkeys(
        "chips_at_most hours price train_images plan_compilations plan_dir".split(), NOT_TRAINING
    ),
    **dict.fromkeys("compile_only tpu_topology tpu_compiler explain hlo_dir".split(), NOT_TRAINING),
    "extension": "adds flags while they are read: tests/integration/test_extending.py",
    "data_dir": "each command has one",
    "ckpt_dir": "each command has one",
    "cpu_devices": "each command has its own number",
    "resume_epoch": "needs a checkpoint of that epoch: tests/unit/training/test_start.py",
    "expect": "needs what --compile_only printed: tests/integration/training/test_expectation.py",
    "init_from": "needs trained weights: tests/integration/training/test_fine_tuning.py",
    "init_text_from": "needs trained weights: "
    "tests/integration/training/test_image_text_weights.py",
    "gram_weights": "needs trained weights: tests/integration/training/test_dino.py",
    "gram_weight": "as --gram_weights",
    "gram_update_steps": "as --gram_weights",
    "dataset_config_name": "needs the Hub: tests/integration/data/test_hub_datasets.py",
    "pretrained": "needs the Hub: tests/integration/training/test_hub.py",
    "gram_crop_factor": "needs a Gram teacher: tests/integration/training/test_gram_crops.py",
}
"""Flags, by field, that no sweep tries, and why."""


@dataclass(frozen=True)
class Item:
    """One value of a flag, with what it needs: words by field."""

    name: str
    words: Mapping[str, str]

    @property
    def typed(self) -> str:
        return " ".join(self.words.values())


def files(folder: Path) -> dict[str, tuple[str, ...]]:
    """The values of flags that name files, of a folder as ``test_every_flag.py`` makes it."""
    return {
        "labels": (f"{folder}/images.csv",),
        "class_map": (f"{folder}/classes.txt",),
        "class_names": (f"{folder}/classes.txt",),
        "prompts": (f"{folder}/prompts.txt",),
        "zero_shot_labels": (f"{folder}/images.csv",),
        "train_shards": ("train/*.tar",),
        "val_shards": ("val/*.tar",),
        "index_dir": (f"{folder}/index",),
        "local_ckpt_dir": (f"{folder}/local",),
        "segment_dir": (f"{folder}/masked",),
        "teacher": ("vit_10b",),
        "teacher_weights": (f"{folder}/teacher",),
    }


def with_it(typed: str, folder: Path) -> dict[str, str]:
    """What a value comes with, by field, beside what its flag's ``requires`` says."""
    volumes = {
        "data_dir": f"--data_dir {folder}/volumes",
        "model": "--model hybrid_vit",
        "dimension": "--dimension 3",
        "img_size": "--image_size 8 16 16",
        "in_chans": "--in_chans 1",
    }
    photographs = {"data_source": "--data_source folder"}
    pairs = {
        "data_source": "--fake_data",
        "text_depth": "--text_depth 1",
        "text_width": "--text_width 16",
        "text_heads": "--text_heads 2",
        "text_length": "--text_length 6",
        "text_vocab_size": "--text_vocab_size 300",
    }
    by_value: dict[str, dict[str, str]] = {
        "--data_source webdataset": {"data_dir": f"--data_dir {folder}/shards"},
        "--data_source parquet": {"data_dir": f"--data_dir {folder}/tables/parquet"},
        "--data_source huggingface": {"data_dir": f"--data_dir {folder}/tables/saved"},
        "--data_source volumes": volumes,
        "--aa augmix-m3-w3": {"train_interpolation": "--train_interpolation bicubic"},
        "--aa_min_magnitude 0": {"aa": "--aa rand-m9-mstd0.5-inc1"},
        "--aa_min_magnitude 9": {"aa": "--aa rand-m9-mstd0.5-inc1"},
        "--dimension 2": {"model": "--model hybrid_vit"},
        **{
            typed: {"native_resolution": "--native_resolution", "img_size": "--image_size 16"}
            for typed in (
                *("--token_budget 40", "--token_budget 300"),
                *("--max_images_per_sequence 1", "--max_images_per_sequence 255"),
                *("--max_tokens_per_image 5", "--max_tokens_per_image 12"),
                *("--side_scale 0.5 1", "--side_scale 2 2", "--resize_to_budget"),
                *("--pos_embed_interp_mode bicubic", "--pos_embed_interp_mode bilinear"),
            )
        },
        **{
            typed: {"data_source": "--data_source folder"}
            for typed in ("--image_size_schedule 8:0.5 16:0.5", "--image_size_schedule 8 16")
        },
        "--rope_rescale_coords 1": {"model": f"--model {EVA}"},
        "--rope_rescale_coords 2": {"model": f"--model {EVA}"},
        "--global_pool token": {"class_token": "--class_token"},
        "--objective dino": {
            "class_token": "--class_token",
            "local_crop_size": "--local_crop_size 8",
            "koleo_group": "--koleo_group 4",
            "dino_prototypes": "--dino_prototypes 32",
            "ibot_prototypes": "--ibot_prototypes 16",
        },
        "--objective siglip": pairs,
        "--objective clip": pairs,
        f"--labels {folder}/images.csv": photographs,
        f"--zero_shot {DIGITS}": {
            "tokenizer": "--tokenizer bytes",
        },
        "--zero_shot_source webdataset": {"zero_shot": f"--zero_shot {folder}/shards"},
        "--zero_shot_source parquet": {"zero_shot": f"--zero_shot {folder}/tables/parquet"},
        "--zero_shot_source huggingface": {"zero_shot": f"--zero_shot {folder}/tables/saved"},
        "--zero_shot_columns image label": {"zero_shot": f"--zero_shot {folder}/tables/parquet"},
        "--data_source captioned_mosaics": pairs
        | {
            "data_source": "--data_source captioned_mosaics",
            "objective": "--objective siglip",
            "tokenizer": "--tokenizer bytes",
        },
        "--logit_adjustment 0.5": photographs,
        "--logit_adjustment 1": photographs,
        "--multi_label": photographs
        | {
            "labels": f"--labels {folder}/images.csv",
            "bce_loss": "--bce_loss",
            "num_classes": "--num_classes 10",
        },
        "--lr_schedule wsd": {"warmup_steps": "--warmup_steps 0", "decay_steps": "--decay_steps 1"},
        # Broken graphs are compiled so alone: PyTorch does not show all that autograd saves.
        "--mark_step_after_forward": {"grad_ckpt": "--grad_ckpt full"},
        "--mark_step_every_n_blocks 1": {"grad_ckpt": "--grad_ckpt full"},
        "--reduce_dtype fp16": {"precision": "--precision fp16"},
        "--fp8 delayed": {"block": "--block te"},
        "--fp8 mxfp8": {"block": "--block te"},
        "--fp8 current": {"compile": "--compile"},
        "--fp8 rowwise": {"compile": "--compile"},
        "--warmup_lr 1e-4": {"warmup_steps": "--warmup_steps 1"},
        "--teacher vit_10b": {
            "img_size": "--image_size 16",
            "in_chans": "--in_chans 3",
            "num_classes": "--num_classes 10",
            "mesh_domain": "--mesh_domain 1",
        },
    }
    return by_value.get(typed, {})


def typed_values(option: FlagField, values: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Every way to type this flag that is tried."""
    name, shorthands = option.names[0], list(option.flag.shorthands)
    if option.is_switch:
        return list(option.bare_names)
    if option.field.name in values:
        return [*(f"{name} {value}" for value in values[option.field.name]), *shorthands]
    if option.choices:
        bare = [name] if option.flag.bare is not None else []
        return [*(f"{name} {word}" for word in option.choices if word), *bare, *shorthands]
    raise AssertionError(f"give {name} values in VALUES of every_flag.py, or say why not")


def items(own: type, folder: Path, fields: Iterable[str] | None = None) -> list[Item]:
    """Every value of every flag of a run on the backend with the configuration ``own``."""
    known = by_field(RunConfig, own)
    values = VALUES | files(folder)

    def needed(option: FlagField, by: tuple[FlagField, ...] = ()) -> dict[str, str]:
        """The words that make true what the flag needs: of alternatives the first one known."""
        found: dict[str, str] = {}
        if option in by:  # two that need each other
            return found
        for condition in option.flag.requires:
            alternatives = [each.partition("=") for each in condition.split("|")]
            field, _, wanted = next(each for each in alternatives if each[0] in known)
            other = known[field]
            first = typed_values(other, values)
            value = f"{other.names[0]} {wanted}" if wanted else first[-1]  # the first: off
            found |= with_it(value, folder) | needed(other, (*by, option)) | {field: value}
        return found

    made = []
    for option in (*flag_fields(RunConfig), *flag_fields(own)):
        field = option.field.name
        if field in ELSEWHERE or (fields is not None and field not in fields):
            continue
        for typed in typed_values(option, values):
            words = needed(option) | with_it(typed, folder) | {field: typed}
            made.append(Item(typed, words))
    return made


def command_lines(
    found: Iterable[Item], takes: Callable[[str], str | None], base: Mapping[str, str]
) -> tuple[list[list[str]], dict[str, str]]:
    """Divide values over command lines; return those, and the values refused, with what was said.

    ``takes`` returns why the program does not take these words, None if it does. ``base``: what
    every command line has, by field, where an item does not say otherwise.
    """
    left, lines, refused = list(found), [], {}
    while left:
        words, taken = dict(base), []
        own: set[str] = set()
        for item in left:
            if any(field in own and words[field] != word for field, word in item.words.items()):
                continue
            tried = words | item.words
            why = takes(" ".join(tried.values()))
            if why is None:
                words, own = tried, own | item.words.keys()
                taken.append(item)
            elif not taken:
                refused[item.name] = why
                taken.append(item)
                break
        left = [item for item in left if item not in taken]
        if own:
            lines.append(list(words.values()))
    return lines, refused


def complaint_of(resolve: Callable[[list[str]], object]) -> Callable[[str], str | None]:
    """Return ``takes`` of ``command_lines``, by reading and resolving the flags in this process."""

    def takes(words: str) -> str | None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                resolve(words.split())
        except UsageError as error:
            return str(error)
        except SystemExit:
            return said.getvalue().strip()
        return None

    return takes
