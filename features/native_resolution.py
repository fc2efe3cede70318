"""Native resolution: sequences of several images, each whole and of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from models.config import DEFAULT_MODEL, NATIVE_FAMILY, ModelError
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature
from training.flags import check_range

if TYPE_CHECKING:
    from data.source import View
    from models.spec import ModelSpec
    from training.resolve import Run


class NativeResolution(Feature):
    """``--native_resolution``, and the models that have nothing else."""

    turned_on_by = ("--native_resolution", f"--model {NATIVE_FAMILY}*")
    requires_it = ("--max_tokens_per_image", "--resize_to_budget", "--side_scale")
    excludes = dict.fromkeys(
        (
            *("--mesh_domain", "--buckets", "--image_size_schedule", "--aug_repeats"),
            *("--mixup", "--cutmix", "--cutmix_minmax", "--bce_loss", "--teacher"),
            *("--segment_probe", "--segment_probe_every", "--pca", "--features_of patches"),
            *("--save_bad_step", "--channels_last"),
        ),
        "",
    )

    objective = "training.objectives.classify:PackedClassification"

    def shown(self, config: RunConfig) -> str:
        return f"native resolution ({config.model.model or DEFAULT_MODEL})"

    def refusal(self, config: RunConfig, typed: str, why: str) -> str:
        flag = typed.partition(" ")[0]
        given = typed if flag in ("--mesh_domain", "--features_of") else flag
        return f"{given} is incompatible with {self.shown(config)}"

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        objective = config.objective.objective
        if objective != "classify":
            raise ModelError(
                f"--objective {objective} is incompatible with {self.shown(config)}: its crops "
                "have a fixed size"
            )
        return spec

    def view(self, run: Run, *, augment: bool) -> View | None:
        from data.packing import PackRequest
        from data.sequences import SequenceView

        data, packing = run.config.data, run.model.packing
        assert packing is not None
        assert data.max_tokens_per_image is not None  # resolved
        return SequenceView(
            PackRequest(
                patch=packing.patch,
                prefix=packing.prefix,
                tokens=packing.tokens,
                images=packing.images,
                max_patches=data.max_tokens_per_image - packing.prefix,
                resize=data.resize_to_budget,
                side_scale=data.side_scale,
                drop_rate=run.model.settings["patch_drop_rate"],
            )
        )

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        data, packing = config.data, model.packing
        assert packing is not None
        check_range("--side_scale", *data.side_scale)
        most = data.max_tokens_per_image
        if most is None:
            most = min(model.sizes.num_patches + packing.prefix, packing.tokens)
        elif most > packing.tokens:
            raise UsageError(
                f"--max_tokens_per_image {most} exceeds --token_budget {packing.tokens}: an image "
                "is never split over sequences"
            )
        if most <= packing.prefix:
            raise UsageError(
                f"--max_tokens_per_image {most} leaves no room for patches after the "
                f"{packing.prefix} class and register tokens of {model.name}"
            )
        return replace(config, data=replace(data, max_tokens_per_image=most))
