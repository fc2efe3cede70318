"""What ``--objective siglip`` and ``clip`` ask of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from features.image_text.config import (
    ADDED_PARAMETERS,
    DEFAULTS,
    OBJECTIVES,
    TEXT_MODELS,
    ImageTextConfig,
)
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature, SmallSizes

if TYPE_CHECKING:
    from data.source import DatasetRequest, DataSource, View
    from models.spec import ModelSpec
    from training.loop import Hook, Training
    from training.resolve import Run
    from training.weights.adapt import PartWeights
    from training.weights.source import Source

_SMALL_LENGTH, _SMALL_VOCABULARY = 5, 48
"""Sizes of the small run's texts: a length that few devices divide."""
_NO_DECAY = ("norms", "biases", "embeddings")
"""As both papers' codes have it; above all, scale and bias are not drawn to zero."""


def _open_captioned(request: DatasetRequest) -> DataSource:
    from features.image_text.captioned_mosaics import open_captioned

    return open_captioned(request)


class ImageText(Feature):
    """The text tower, which is part of the model (``model.py``), and its flags."""

    flags = ImageTextConfig
    objective = "features.image_text.objective:ImageTextPairs"
    turned_on_by = tuple(f"--objective {name}" for name in OBJECTIVES)
    choices = {
        "objective": {
            "siglip": "images and texts by sigmoids",
            "clip": "images and texts by softmax",
        },
        "data_source": {"captioned_mosaics": "digits with captions"},
    }
    sources = {"captioned_mosaics": _open_captioned}
    takes_arranged = True
    excludes = {
        "--aug_repeats": "an image would be compared with its own text as with another's",
        "--save_bad_step": "the loss of a replica depends on the samples of all",
    }
    loss_label = "contrastive loss"
    saved_with_weights = True
    weight_formats = (
        "features.image_text.formats:OfTransformers",
        "features.image_text.formats:OfOpenClip",
    )
    parameters = ADDED_PARAMETERS
    metrics = {
        "logit_scale": "scale of similarities",
        "logit_bias": "bias of similarities",
        "batch_image_to_text_r1": "recall@1 in the batch, image to text, %",
        "batch_text_to_image_r1": "recall@1 in the batch, text to image, %",
    }

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        """Take what is not set from ``--text_model`` and from the objective's paper."""
        from features.image_text.tokenizer import BYTES, ByteTokenizer
        from features.image_text.tokenizer_files import with_tokenizer
        from training.resolve import with_defaults

        name = config.objective.objective
        if config.of(ImageTextConfig).init_text_from:
            from features.image_text.weights import with_described_text_tower

            config = with_described_text_tower(config)
        config = with_defaults(config, DEFAULTS[name] | {"no_decay": list(_NO_DECAY)})
        flags = config.of(ImageTextConfig)
        assert flags.text_model is not None
        if flags.tokenizer == BYTES:
            config = with_defaults(config, {"text_vocab_size": ByteTokenizer.vocab_size})
        config = with_tokenizer(with_defaults(config, TEXT_MODELS[flags.text_model]))
        if config.data.batch_size < 2:
            raise UsageError(
                f"--objective {name} compares the pairs of a batch: use --batch_size 2 or more"
            )
        return config

    def of_weights(self, config: RunConfig, weights: Source) -> RunConfig:
        from features.image_text.weights import with_text_tower

        if config.of(ImageTextConfig).init_text_from:  # says it instead
            return config
        return with_text_tower(config, weights)

    def part_weights(self, run: Run) -> Sequence[PartWeights]:
        from features.image_text.weights import text_tower_weights

        path = run.config.of(ImageTextConfig).init_text_from
        return [text_tower_weights(path)] if path else []

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        from features.image_text.model import add_to

        return add_to(spec, config.of(ImageTextConfig), config.objective.objective)

    def check(self, run: Run) -> None:
        text, tensor = run.config.of(ImageTextConfig).text, run.mesh.tensor
        if tensor == 1:
            return
        if text.causal:
            raise UsageError(
                f"--mesh_tensor {tensor} is incompatible with --text_causal: use another mesh"
            )
        hidden = int(text.width * text.mlp_ratio)
        for what, size in (("--text_heads", text.heads), ("the text tower's MLP width", hidden)):
            if size % tensor:
                raise UsageError(f"--mesh_tensor {tensor} does not divide {what} {size}")

    def view(self, run: Run, *, augment: bool) -> View | None:
        from features.image_text.view import ImageTextView

        return ImageTextView.of(run) if augment else None  # else features of images alone

    def check_data(self, run: Run, data: DataSource) -> str | None:
        """Return what the log says of texts."""
        from features.image_text.view import ImageTextView, describe_texts

        name = run.config.of(ImageTextConfig).tokenizer
        if name is None or run.config.data.data_source == "fake":
            return None
        return describe_texts(data.splits["train"], ImageTextView.of(run), name)

    def hooks(self, training: Training) -> Sequence[Hook]:
        from features.image_text.tokenizer_files import save_copy

        run, session = training.run, training.session
        if line := training.opened[type(self)]:
            session.reports.say(line)
        if session.backend.is_main:
            try:
                save_copy(run.config, run.ckpt_dir)
            except OSError as error:
                session.reports.say(f"warning: the tokenizer cannot be copied ({error.strerror})")
        return ()

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        flags = config.of(ImageTextConfig)
        text = flags.text
        return config.with_flags(
            replace(
                flags,
                text_depth=min(text.depth, small.depth),
                text_width=small.width,
                text_heads=small.heads,
                text_mlp_ratio=2.0,
                text_length=min(text.length, _SMALL_LENGTH),
                text_vocab_size=min(text.vocab_size, _SMALL_VOCABULARY),
                tokenizer=None,
                tokenizer_checksum=None,
                projection_dim=flags.projection_dim and small.width,
                init_text_from=None,
            )
        )
