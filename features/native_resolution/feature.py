"""Native resolution as a feature: its model, its images, and what it cannot be combined with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from features.native_resolution.config import ImagesConfig, SequenceConfig
from models.config import DEFAULT_MODEL, NAFLEX_FAMILY, ModelError
from models.registry import open_model
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature, SmallSizes
from training.feature_table import arranged_objectives
from training.flags import check_range
from training.resolve import with_defaults

if TYPE_CHECKING:
    from data.source import View
    from features.native_resolution.model import SequenceShape
    from models.spec import ModelSpec
    from training.resolve import Run
    from training.weights.source import Source

_SMALL_IMAGES, _SMALL_TOKENS = 3, 3 * 3 + 3
"""Images of a sequence of the small run, which has a place for one more; the most tokens of one:
patches, a class token and two registers."""


class NativeResolution(Feature):
    """``--native_resolution``, and the models that have nothing else."""

    flags = ImagesConfig
    model_flags = SequenceConfig
    turned_on_by = ("--native_resolution", f"--model {NAFLEX_FAMILY}*")
    requires_it = (
        *("--token_budget", "--max_images_per_sequence", "--pos_embed_interp_mode"),
        *("--max_tokens_per_image", "--resize_to_budget", "--side_scale"),
    )
    excludes = dict.fromkeys(
        (
            *("--mesh_domain", "--buckets", "--image_size_schedule", "--aug_repeats"),
            *("--mixup", "--cutmix", "--cutmix_minmax", "--bce_loss", "--teacher"),
            *("--segment_probe", "--segment_probe_every", "--pca", "--features_of patches"),
            *("--save_bad_step", "--channels_last", "--block te"),
        ),
        "",
    )

    objective = "features.native_resolution.objective:SequenceClassification"

    def shown(self, config: RunConfig) -> str:
        return f"native resolution ({config.model.model or DEFAULT_MODEL})"

    def refusal(self, config: RunConfig, typed: str, why: str) -> str:
        flag = typed.partition(" ")[0]
        given = typed if flag in ("--mesh_domain", "--features_of", "--block") else flag
        return f"{given} is incompatible with {self.shown(config)}"

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        objective = config.objective.objective
        if objective not in arranged_objectives():
            raise ModelError(
                f"--objective {objective} is incompatible with {self.shown(config)}: its images "
                "have a fixed size"
            )
        if config.use.predict is None:
            return spec
        # One sequence per image, no longer than the largest image.
        tokens = _most_tokens(config, spec)
        alone = {"token_budget": tokens, "max_images_per_sequence": 1}
        return open_model(spec.name, spec.overrides | alone)

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        images = config.of(ImagesConfig)
        check_range("--side_scale", *images.side_scale)
        most = _most_tokens(config, model)
        return config.with_flags(replace(images, max_tokens_per_image=most))

    def of_weights(self, config: RunConfig, weights: Source) -> RunConfig:
        """Resample positions as the model does that SigLIP 2's files describe. Raises UsageError
        for a flag that says otherwise."""
        from training.weights.describe import describe

        about = describe(weights).config
        if about.content.get("model_type") != "siglip2":
            return config
        typed = config.of(SequenceConfig).pos_embed_interp_mode
        if typed not in (None, "bilinear"):
            why = f", whose positions are bilinear: drop --pos_embed_interp_mode {typed}"
            raise about.refusal("model_type", "siglip2", why)
        return with_defaults(config, {"pos_embed_interp_mode": "bilinear"})

    def arranged(self, run: Run, view: View, *, augment: bool) -> View:
        from data.images import as_image_view
        from features.native_resolution.packing import PackRequest
        from features.native_resolution.sequences import SequenceView

        images, shape = run.config.of(ImagesConfig), _shape(run.model)
        assert images.max_tokens_per_image is not None  # resolved
        return SequenceView(
            PackRequest(
                patch=shape.patch,
                prefix=shape.prefix,
                tokens=shape.tokens,
                images=shape.images,
                max_patches=images.max_tokens_per_image - shape.prefix,
                resize=images.resize_to_budget,
                side_scale=images.side_scale,
                drop_rate=run.model.settings["patch_drop_rate"],
            ),
            view=as_image_view(view),
        )

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        tokens = _SMALL_IMAGES * _SMALL_TOKENS + 1  # and padding
        sequences = replace(
            config.of(SequenceConfig),
            token_budget=tokens,
            max_images_per_sequence=_SMALL_IMAGES + 1,
        )
        images = replace(config.of(ImagesConfig), max_tokens_per_image=tokens)
        return config.with_flags(sequences, images)


def _shape(model: ModelSpec) -> SequenceShape:
    """Return the shape of the model's sequences."""
    from features.native_resolution.model import NativeSpec

    assert isinstance(model, NativeSpec)
    return model.shape


def _most_tokens(config: RunConfig, model: ModelSpec) -> int:
    """Return the largest number of tokens of an image. Raises UsageError if the sequences are too
    short for it, or if it leaves no room for patches."""
    shape, most = _shape(model), config.of(ImagesConfig).max_tokens_per_image
    if most is None:
        most = min(model.sizes.num_patches + shape.prefix, shape.tokens)
    elif most > shape.tokens:
        raise UsageError(
            f"--max_tokens_per_image {most} exceeds --token_budget {shape.tokens}: an image is "
            "never split over sequences"
        )
    if most <= shape.prefix:
        raise UsageError(
            f"--max_tokens_per_image {most} leaves no room for patches after the {shape.prefix} "
            f"class and register tokens of {model.name}"
        )
    return most
