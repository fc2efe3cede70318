"""What ``--objective dino``, its crops of several sizes and its Gram teacher ask of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data.config import OF_FILES
from features.dino.config import HEAD_SETTINGS, DinoConfig
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature, SmallSizes
from training.flags import check_range
from training.mesh import Mesh
from training.objectives.distillation_config import DistillationConfig

if TYPE_CHECKING:
    from data.source import DataSource, View
    from models.spec import ModelSpec
    from training.resolve import Run

_LOCAL_CROPS = 2
"""Of the small run, at most."""


class Dino(Feature):
    """The heads, which are part of the model (``model.py``), the teacher's schedules, and the
    groups of images of the KoLeo loss."""

    flags = DinoConfig
    turned_on_by = ("--objective dino",)
    excludes = {
        "--mesh_tensor": "",
        "--model_ema": "its teacher is an EMA of the weights",
        "--patch_drop_rate": "masked and dropped patches would differ",
        "--weight_init": "the heads have their own",
    }
    ignores = ("--vflip", "--aa", "--color_jitter", "--reprob")  # crops have their own distortions
    choices = {"objective": {"dino": "self-distillation (docs/pretraining.md)"}}
    objective = "features.dino.objective:SelfDistillation"
    has_teacher = True
    loss_label = "DINO + iBOT + KoLeo"
    saved_with_weights = True
    parameters = ("mask_token", "dino_head.", "ibot_head.")
    metrics = {
        "loss_dino": "DINO loss (class tokens), unweighted",
        "loss_ibot": "iBOT loss (masked patches), unweighted",
        "loss_koleo": "KoLeo loss, unweighted",
        "loss_gram": "Gram loss, unweighted",
    }

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        for name in ("global_crops_scale", "local_crops_scale", "ibot_mask_ratio"):
            low, high = getattr(config.of(DinoConfig), name)
            check_range(f"--{name}", low, high)
            if not high:
                raise UsageError(f"--{name} 0 0: the maximum must be above 0")
        if "scale" in config.explicitly_set:
            raise UsageError(
                "--objective dino uses --global_crops_scale instead of --scale: drop --scale"
            )
        if config.sharding.grad_ckpt == "auto":
            raise UsageError(
                "--objective dino is incompatible with --grad_ckpt auto: choose another value"
            )
        if config.model.in_chans not in (None, 1, 3) and config.data.data_source in OF_FILES:
            raise UsageError(
                f"--in_chans {config.model.in_chans} is incompatible with --objective dino, which "
                "changes the colors of images: drop one of the two"
            )
        from training.logs.records import BEST

        use, saves = config.use, config.checkpoints
        if use.eval_only and not use.judges_features:
            raise UsageError(
                "--eval_only with --objective dino requires --knn, --probe, --rank or "
                "--segment_probe"
            )
        if saves.ckpt_best or saves.resume in BEST:
            given = "--ckpt_best" if saves.ckpt_best else f"--resume {saves.resume}"
            raise UsageError(
                f"{given} requires a validation loss, which --objective dino does not have: drop it"
            )
        return config

    def resolve_mesh(self, config: RunConfig, mesh: Mesh) -> RunConfig:
        """Choose a ``--koleo_group`` that fits the images of a device and pass, unless it is
        set."""
        images = config.data.global_micro_batch_size // mesh.batch_shards
        if images == 1 or "koleo_group" in config.explicitly_set:
            return config
        sizes = range(2, DinoConfig.koleo_group + 1)
        group = max((n for n in sizes if images % n == 0), default=images)
        return config.with_flags(replace(config.of(DinoConfig), koleo_group=group))

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        from features.dino.model import add_to

        return add_to(spec, config.of(DinoConfig))

    def check(self, run: Run) -> None:
        dino = run.config.of(DinoConfig)
        images = run.config.data.global_micro_batch_size // run.mesh.batch_shards
        if not dino.koleo_weight or images % dino.koleo_group == 0:
            return
        if images == 1:
            raise UsageError(
                "the KoLeo loss compares images, but a device has only one per pass: use a larger "
                "--batch_size, fewer --grad_accum_steps or --koleo_weight 0"
            )
        raise UsageError(
            f"--koleo_group {dino.koleo_group} does not divide the {images} images per device and "
            "pass: change it, --batch_size or --grad_accum_steps"
        )

    def of_teacher(self, config: RunConfig, saved: RunConfig | None) -> RunConfig:
        """With the teacher's own sizes of heads."""
        if saved is None:
            return config
        theirs = saved.of(DinoConfig)
        heads = {name: getattr(theirs, name) for name in HEAD_SETTINGS}
        return config.with_flags(replace(config.of(DinoConfig), **heads))

    def check_teacher(self, run: Run, teacher: Run) -> None:
        """Student and teacher are compared by their prototypes, and patch by patch."""
        name = run.config.of(DistillationConfig).teacher
        ours, theirs = (each.config.of(DinoConfig) for each in (run, teacher))
        for flag in ("dino_prototypes", "ibot_prototypes"):
            if (asked := getattr(ours, flag)) != (has := getattr(theirs, flag)):
                raise UsageError(
                    f"--{flag} {asked}: --teacher {name} has {has}: use the same number"
                )
        there, here = teacher.model.sizes.grid, run.model.sizes.grid
        if there != here:
            grids = (" x ".join(map(str, each)) for each in (there, here))
            raise UsageError(
                f"--teacher {name} has {next(grids)} patches, the student {next(grids)}, but the "
                "two are compared patch by patch: train the student with the teacher's "
                "--patch_size"
            )

    def view(self, run: Run, *, augment: bool) -> View | None:
        from features.dino.crops import CropView

        if not augment:
            return None
        dino = run.config.of(DinoConfig)
        return CropView(
            local_size=(dino.local_crop_size, dino.local_crop_size),
            local_number=dino.local_crops,
            global_scale=dino.global_crops_scale,
            local_scale=dino.local_crops_scale,
            grid=run.model.sizes.grid,  # type: ignore[arg-type]
            mask_ratio=dino.ibot_mask_ratio,
            pairs=tuple(dino.crop_pairs),
            gram_factor=dino.gram_crop_factor,
        )

    def schedules(
        self, config: RunConfig, steps_per_epoch: int, total_steps: int
    ) -> Mapping[str, Any]:
        from training.schedule import Ramp

        dino = config.of(DinoConfig)
        rise = round(dino.warmup_teacher_temp_epochs * steps_per_epoch)
        return {
            "momentum": Ramp(
                dino.teacher_momentum, dino.teacher_momentum_end, total_steps, "cosine"
            ),
            "teacher_temp": Ramp(dino.warmup_teacher_temp, dino.teacher_temp, rise),
            "frozen_steps": round(dino.freeze_last_layer_epochs * steps_per_epoch),
        }

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        dino, images = config.of(DinoConfig), small.images
        flags = replace(
            dino,
            local_crops=min(dino.local_crops, _LOCAL_CROPS),
            local_crop_size=small.patch_size * max(1, min(small.grid) // 2),
            crop_sizes=None,
            dino_prototypes=2 * small.width,
            ibot_prototypes=3 * small.classes,
            dino_head_hidden=small.width,
            dino_head_bottleneck=small.width // 2,
            # Of two images each is the other's nearest, however it is rounded.
            koleo_group=2 if images % 2 == 0 else max(images, 2),
            gram_weights=None,  # another model's
            gram_crop_factor=1.0,
        )
        explicitly_set = config.explicitly_set | {"koleo_group"}
        return replace(config.with_flags(flags), explicitly_set=explicitly_set)


_ONE_SIZE = "steps have several sizes of crops"


class CropSizes(Feature):
    """``--crop_sizes``: each step has crops of one of several pairs of sizes."""

    turned_on_by = ("--crop_sizes",)
    excludes = dict.fromkeys(("--compile_only", "--plan", "--expect"), _ONE_SIZE)

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        if config.data.data_source == "fake":
            raise UsageError("--crop_sizes has no effect with --data_source fake: drop it")
        return config


class GramTeacher(Feature):
    """``--gram_weights``: a third model, whose patch features the student's shall resemble."""

    turned_on_by = ("--gram_weights",)
    excludes = {
        **dict.fromkeys(("--eval_only", "--features"), "nothing is trained"),
        **dict.fromkeys(("--compile_only", "--plan"), "it reads no weights"),
    }

    def check_data(self, run: Run, data: DataSource) -> None:
        from features.dino.gram import gram_weights

        gram_weights(run)
