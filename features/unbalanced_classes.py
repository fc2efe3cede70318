"""Classes of different sizes: the log says so; another loss, or images drawn evenly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from config_fields import flag, fraction
from training.config import RunConfig
from training.errors import UsageError, data_errors_as_usage_errors
from training.feature import Feature
from training.objectives.class_weights_config import ClassWeightsConfig
from training.objectives.config import CLASSIFIES

if TYPE_CHECKING:
    import numpy as np

    from data.loader import GlobalBatchSampler
    from data.source import DataSource
    from models.spec import ModelSpec
    from training.loop import Hook, Training
    from training.resolve import Run

_SAME = "both make up for the sizes of the classes"
_SHOWN = 10
"""The largest number of classes of which the log has each one's size."""


class ClassSizes(Feature):
    """Logs the sizes of the classes that a classifier is trained on."""

    turned_on_by = ("--objective classify",)

    def hooks(self, training: Training) -> Sequence[Hook]:
        from data.classes import class_sizes, classes_without_validation
        from data.files import DataFolderError, first_of, printable

        if training.run.config.data.data_source == "fake":
            return ()
        try:
            sizes = class_sizes(training.data, "the sizes of classes")
        except DataFolderError:  # the source does not know them
            return ()
        names, say = training.data.classes, training.session.reports.say
        say(sizes_line(sizes, names))
        if lost := classes_without_validation(training.data, sizes):
            shown = printable(first_of([names[n] if names else str(n) for n in lost]))
            say(f"warning: val has no image of class {shown}, so its recall is never measured")
        return ()


def sizes_line(sizes: np.ndarray, names: Sequence[str] | None) -> str:
    """Return a log line: each class with its number of images, or the largest and the smallest."""
    from data.files import printable

    shown = (-sizes).argsort(kind="stable")
    shown = shown[sizes[shown] > 0]
    total, between = int(sizes.sum()), ", "
    text = f"training images by class ({len(shown):,} classes): "
    if len(shown) > _SHOWN:
        shown, between = shown[[0, -1]], " to "
    each = (
        f"{printable(names[n]) if names else n}: {sizes[n]:,} ({100 * sizes[n] / total:.2f} %)"
        for n in shown.tolist()
    )
    return text + between.join(each)


class BestByClass(Feature):
    """What ``--ckpt_best`` needs to go by the recalls of the classes."""

    turned_on_by = ("--ckpt_best balanced_accuracy", "--ckpt_best worst_recall")

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        if not config.objective.uses_labels:
            raise UsageError(
                f"{self.shown(config)} requires --objective classify, not "
                f"{config.objective.objective}: recalls are of classes"
            )
        return config


class ClassWeights(Feature):
    """``--class_weights``: how much the images of each class count in the loss."""

    flags = ClassWeightsConfig
    turned_on_by = ("--class_weights",)
    excludes: ClassVar = {
        "--bce_loss": "the weight of a class would count for the images of all others, too",
        "--save_bad_step": "tools.replay_step does not know the weights",
    }

    def check_data(self, run: Run, data: DataSource) -> None:
        weights_of_classes(run, data)

    def hooks(self, training: Training) -> Sequence[Hook]:
        import torch

        from training.objectives.classify import Classification
        from training.processes import exchange

        # A file may differ from host to host, or have changed since it was checked.
        with exchange.raise_on_all_ranks():
            weights = weights_of_classes(training.run, training.data)
        found = exchange.broadcast_object(weights.tolist())
        assert isinstance(training.objective, Classification)
        training.objective.weigh_classes(torch.tensor(found, dtype=torch.float32))
        training.session.reports.say(
            f"class weights: {min(found):.4g} to {max(found):.4g}, mean over the training images 1"
        )
        return ()


def weights_of_classes(run: Run, data: DataSource) -> np.ndarray:
    """Return the weights of ``--class_weights`` of all classes of the model, (classes,) fp64.
    Raises UsageError."""
    import numpy as np

    from data.classes import class_sizes, inverse_frequencies, read_class_weights

    given, count = run.config.of(ClassWeightsConfig).class_weights, run.model.sizes.num_classes
    assert given is not None
    with data_errors_as_usage_errors():
        sizes = class_sizes(data, f"--class_weights {given}")
        if given != "auto":
            return read_class_weights(given, data.classes, sizes, count)
    return inverse_frequencies(np.pad(sizes, (0, count - len(sizes))))


class LogitAdjustment(Feature):
    """``--logit_adjustment``: the loss of equation (10) of Menon et al. 2021 (arXiv 2007.07314)."""

    turned_on_by = ("--logit_adjustment",)
    excludes: ClassVar = {
        **dict.fromkeys(("--class_weights", "--balanced_sampling"), _SAME),
        "--bce_loss": "it is defined for the softmax",
        "--save_bad_step": "tools.replay_step does not know the sizes of the classes",
    }

    def check_data(self, run: Run, data: DataSource) -> np.ndarray:
        """Return what is added to the logit of each class, (classes,) fp64."""
        from data.classes import class_sizes, log_priors

        tau: Any = run.config.of(ClassWeightsConfig).logit_adjustment
        with data_errors_as_usage_errors():
            sizes = class_sizes(data, self.shown(run.config))
        return tau * log_priors(sizes, run.model.sizes.num_classes)

    def hooks(self, training: Training) -> Sequence[Hook]:
        import torch

        from training.objectives.classify import Classification

        terms = training.opened[type(self)]
        assert isinstance(training.objective, Classification)
        training.objective.adjust_logits(torch.tensor(terms, dtype=torch.float32))
        training.session.reports.say(
            f"logit adjustment in the loss: {terms.min():.4g} to {terms.max():.4g}"
        )
        return ()


@dataclass(frozen=True)
class BalancedSamplingConfig:
    """How often the images of each class are drawn."""

    group: ClassVar[str] = "data"
    after: ClassVar[str] = "aug_repeats"

    balanced_sampling: float | None = flag(
        None,
        "draw images of rare classes more often: an epoch has as many images as the training set, "
        "of each class a number proportional to n^(1 - POWER), n being its size; 1, or no number: "
        "the same number of each class; 0.5: by the square root of the sizes "
        "(docs/unbalanced_classes.md) (default: each image once)",
        kind=fraction,
        metavar="POWER",
        bare=1.0,
        requires=CLASSIFIES,
    )


class BalancedSampling(Feature):
    """``--balanced_sampling``: the order of the training images."""

    flags = BalancedSamplingConfig
    turned_on_by = ("--balanced_sampling",)
    order_flags = ("balanced_sampling",)
    excludes: ClassVar = {
        "--class_weights": _SAME,
        "--buckets": "each batch has images of one aspect ratio",
        "--data_source fake": "its images have no classes",
        "--data_source parquet": "it reads groups of images together; pack them with data.pack",
    }

    def refusal(self, config: RunConfig, typed: str, why: str) -> str:
        if typed.startswith("--data_source"):
            return f"{self.shown(config)} is incompatible with {typed} ({why})"
        return super().refusal(config, typed, why)

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        if model.segments:
            raise UsageError(
                f"{self.shown(config)} is incompatible with native resolution ({model.name}), "
                "which packs each image once per epoch: use --class_weights"
            )
        return config

    def check_data(self, run: Run, data: DataSource) -> None:
        from data.classes import class_sizes
        from data.source import Split

        with data_errors_as_usage_errors():
            class_sizes(data, self.shown(run.config))
        if type(data.splits["train"]).batches is not Split.batches:
            raise UsageError(
                f"{self.shown(run.config)} is incompatible with {data.name}, which orders its "
                "images itself"
            )

    def sampler(self, run: Run) -> Callable[..., GlobalBatchSampler]:
        from data.classes import BalancedSampler

        power: Any = run.config.of(BalancedSamplingConfig).balanced_sampling
        return functools.partial(BalancedSampler, power=power)
