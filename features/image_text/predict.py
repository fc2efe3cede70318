"""Which of some texts an image is most similar to: ``--predict`` with ``--texts``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from data.batch import Batch
from features.image_text.model import Embedded
from features.image_text.texts import tokens_of
from training.data import input_of
from training.evaluation.predict import Predictor
from training.resolve import Run

_PART = 256
"""How many texts are embedded at a time."""


def predictor_of(run: Run, texts: Sequence[str]) -> Predictor:
    """Return what the model of ``run`` predicts of an image: with clip, the probability of each
    text among all of them, by softmax; with siglip, that each text matches the image, by sigmoid.
    Raises UsageError for texts that cannot be tokenized."""
    tokens = torch.from_numpy(tokens_of("--texts", texts, run.config))
    is_clip = run.config.objective.objective == "clip"

    def open_model(model: nn.Module, device: torch.device) -> Callable[[Batch], torch.Tensor]:
        parts = [model((None, part.to(device))) for part in tokens.split(_PART)]
        of_texts = torch.cat([Embedded(*part).texts for part in parts])
        model_input = input_of(run, lambda values: values.to(device))

        def probabilities(batch: Batch) -> torch.Tensor:
            found = Embedded(*model((model_input(batch), None)))
            logits = found.scale[:, None] * (found.images @ of_texts.T) + found.bias[:, None]
            return logits.softmax(dim=-1) if is_clip else logits.sigmoid()

        return probabilities

    return Predictor("text", texts, open_model)
