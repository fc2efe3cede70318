"""Zero-shot classification: an image has the class whose name is most similar to it.

A class is the mean of the embeddings of several texts that have its name, the prompts, normalized
again (arXiv 2103.00020, section 3.1.4). The devices compute the embeddings of all prompts in each
evaluation, once, then classify the images as a classifier does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from data.batch import Batch
from data.files import DataFolderError, printable
from data.open import open_data
from data.source import DataSource, check_several_classes
from features.image_text.config import ImageTextConfig, TextEvaluationConfig
from features.image_text.model import Embedded
from features.image_text.texts import lines_of, source_of_texts, tokens_of
from training.backend import Backend
from training.data import dataset_request, input_of
from training.errors import data_errors_as_usage_errors
from training.evaluation.evaluate import evaluate
from training.evaluation.frozen import RegularEvaluations
from training.evaluation.predict import Evaluated
from training.evaluation.report import has_own_images
from training.logs.bad_images import VAL, BadImages
from training.logs.records import Evaluation, read_metrics
from training.loop import Hook, Training
from training.objectives.base import OF_IMAGES, Measure
from training.objectives.classify import Accuracy
from training.processes import exchange
from training.resolve import Run
from training.step import val_loader

PROMPTS = Path(__file__).with_name("prompts.txt")
"""OpenAI's eighty prompts for ImageNet, in which {} stands for the name of the class."""
NAME = "{}"


class ZeroShotData(NamedTuple):
    """Images to classify, and the texts of their classes."""

    images: DataSource
    names: list[str]
    """Of the classes, by label."""
    tokens: np.ndarray
    """Of all prompts of all classes, class by class, (classes x prompts, length), int32."""


@data_errors_as_usage_errors()
def open_zero_shot(run: Run) -> ZeroShotData:
    """Open the images of ``--zero_shot``, and read the texts of their classes. Raises
    UsageError."""
    flags = run.config.of(TextEvaluationConfig)
    assert flags.zero_shot is not None
    request = dataset_request(run, with_train=False, augment=False)
    request = request.with_data(**dict.fromkeys(_OF_PAIRS))
    request = request.with_data(
        data_dir=flags.zero_shot,
        data_source=flags.zero_shot_source,
        labels=flags.zero_shot_labels,
        columns=flags.zero_shot_columns,
    )
    try:
        images = open_data(replace(request, labels=True, opened_by=None))
        check_several_classes(images)
    except DataFolderError as error:
        raise DataFolderError(_of_zero_shot(str(error))) from None
    labels = images.splits["val"].labels
    names = names_of(images.classes, int(np.max(labels)) + 1, flags.class_names)
    prompts = lines_of("--prompts", flags.prompts or str(PROMPTS))
    if wrong := next((line for line in prompts if NAME not in line), None):
        raise DataFolderError(
            f"--prompts {flags.prompts}: line {prompts.index(wrong) + 1} has no {NAME}, which "
            f"stands for the name of the class: {wrong}"
        )
    texts = [prompt.replace(NAME, name) for name in names for prompt in prompts]
    return ZeroShotData(images, names, tokens_of("--zero_shot", texts, run.config))


_OF_PAIRS = (
    *("split_by", "val_fraction", "train_split", "val_split", "train_shards", "val_shards"),
    *("dataset_config_name", "images_per_read"),
)
"""Data flags that say where pairs are, not the images to classify."""
_FLAGS = {
    "--data_dir": "--zero_shot",
    "--data_source": "--zero_shot_source",
    "--labels": "--zero_shot_labels",
    "--columns": "--zero_shot_columns",
}


def _of_zero_shot(message: str) -> str:
    """Return a message about data with the flags that say where the images to classify are."""
    return re.sub("|".join(rf"{flag}\b" for flag in _FLAGS), lambda m: _FLAGS[m[0]], message)


def names_of(classes: Sequence[str] | None, numbers: int, file: str | None) -> list[str]:
    """Return the name of each class: a line of the file ``--class_names``, or else what the data
    calls it, with spaces in place of underscores. ``classes``: what the data calls them; None:
    labels are numbers below ``numbers``. Raises DataFolderError."""
    count = len(classes) if classes else numbers
    if file is None:
        if not classes:
            raise DataFolderError(
                "the labels of --zero_shot are numbers without names: set --class_names FILE, with "
                f"a line for each of {count:,} classes"
            )
        names = [name.replace("_", " ").strip() for name in classes]
        if "" in names:
            raise DataFolderError(
                f"{printable(classes[names.index('')])!r} is no name of a class: set --class_names"
            )
        return names
    names = lines_of("--class_names", file)
    # Of classes that have numbers, the last ones may be without images.
    if len(names) < count or (classes and len(names) > count):
        raise DataFolderError(
            f"--class_names {file} has {len(names):,} lines, but there are {count:,} classes: "
            "write one name a line, in the order of labels or of --class_order"
        )
    return names


class PromptEmbeddings(Measure):
    """Adds up the embeddings of each class's prompts."""

    def __init__(self, classes: int, prompts: int, width: int) -> None:
        """``prompts``: of each class."""
        self._prompts = prompts
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        """Of the prompts of this process, (classes, width)."""

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        texts = Embedded(*model((None, batch["text"]))).texts
        return {OF_IMAGES: {"index": batch["index"], "texts": texts}}

    def add(self, values: Mapping[str, Any]) -> None:
        part = {name: torch.from_numpy(each) for name, each in values[OF_IMAGES].items()}
        self.sums.index_add_(0, part["index"] // self._prompts, part["texts"].double())

    def result(self) -> Evaluation:
        return Evaluation(float("nan"))  # it has no loss


def class_embeddings(
    model: nn.Module,
    data: ZeroShotData,
    run: Run,
    backend: Backend,
    batch_done: Callable[[], bool | None] = lambda: None,
) -> torch.Tensor | None:
    """Return the embedding of each class on the host, (classes, width), fp32, of length 1; None if
    ``batch_done``, called after each batch, returned True. All processes must call it."""
    config = run.config
    request, vocabulary = data.images.splits["val"].request, config.of(ImageTextConfig).text
    texts = source_of_texts(request, data.tokens, vocabulary.vocab_size)
    loader = val_loader(texts, backend, config.data.global_micro_batch_size)
    spec: Any = run.model
    classes = len(data.names)
    measure = PromptEmbeddings(classes, len(data.tokens) // classes, spec.embedding_width)
    if evaluate(model, measure, loader, backend, batch_done=batch_done) is None:
        return None
    sums = measure.sums
    if not has_own_images(backend):
        sums.zero_()
    if exchange.count() > 1:
        dist.all_reduce(sums)
    return F.normalize(sums, dim=-1).float()


class Classifier(nn.Module):
    """A model of images and texts as a classifier: logits are scaled similarities to classes."""

    def __init__(self, model: nn.Module, classes: torch.Tensor) -> None:
        """``classes``: their embeddings on each device, (classes, width)."""
        super().__init__()
        self.model, self._classes = model, classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embedded = Embedded(*self.model((images, None)))
        return embedded.scale[:, None] * (embedded.images @ self._classes.T)


def classifier(
    model: nn.Module,
    data: ZeroShotData,
    run: Run,
    backend: Backend,
    batch_done: Callable[[], bool | None] = lambda: None,
) -> tuple[Classifier, Accuracy] | None:
    """Return the model as a classifier of ``data``, and what measures it; None if ``batch_done``,
    called after each batch, returned True. All processes must call it."""
    classes = class_embeddings(model, data, run, backend, batch_done)
    if classes is None:
        return None
    accuracy = Accuracy(input_of(run, backend.constant), backend)
    return Classifier(model, backend.constant(classes)), accuracy


# -- alone -----------------------------------------------------------------------------------------


def evaluated(run: Run) -> Evaluated:
    """Return what ``--eval_only --zero_shot`` measures. Raises UsageError."""
    data = open_zero_shot(run)

    def open_model(model: nn.Module, run: Run, backend: Backend) -> tuple[nn.Module, Measure]:
        found = classifier(model, data, run, backend)
        assert found is not None  # nothing stops it
        return found

    return Evaluated(data.images, data.names, open_model)


# -- in training -----------------------------------------------------------------------------------

_KIND = "zero_shot"
_METRIC = f"val_{_KIND}_top1"


@dataclass(frozen=True)
class ZeroShotAccuracy:
    """How many images were classified correctly."""

    result: Evaluation
    folder: str

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        top1, top5, by_class = self.result.top1, self.result.top5, self.result.by_class
        if not self.result.images or top1 is None or top5 is None or by_class is None:
            return {}
        balanced = by_class.values["val_balanced_accuracy"]
        return {
            _METRIC: top1,
            f"val_{_KIND}_top5": top5,
            f"val_{_KIND}_balanced_accuracy": balanced,
        }

    def __str__(self) -> str:
        return (
            f"zero-shot classification of {printable(self.folder)}: accuracy "
            f"{self.result.top1:.2f} % of {self.result.images:,} images, top-5 "
            f"{self.result.top5:.2f} %"
        )


def zero_shot_evaluations(training: Training, data: ZeroShotData) -> Hook:
    """Return the hook that classifies the images of ``--zero_shot`` during training. Must be called
    before the first step is recorded. Raises UsageError in all processes if the images differ
    between them."""
    session, run = training.session, training.run
    backend, say = session.backend, session.reports.say
    exchange.check_alike(run, data.images)
    say(f"zero-shot classification: {data.images}")
    bad_images = BadImages(run.config.data.max_bad_images, data.images, is_main=backend.is_main)
    loader = val_loader(data.images, backend, run.config.data.global_micro_batch_size)

    def measure(
        kinds: list[str], part_done: Callable[[], bool]
    ) -> Sequence[ZeroShotAccuracy] | None:
        found = classifier(training.model, data, run, backend, part_done)
        if found is None:
            return None
        result = evaluate(*found, loader, backend, batch_done=part_done)
        if result is None:
            return None
        bad_images.collect(VAL, loader, say)
        why = bad_images.excess or ("" if result.images else "none of the images can be read")
        if why:  # unlike unreadable training images, this does not end the run
            say(f"warning: no zero-shot classification: {why}")
            return []
        return [ZeroShotAccuracy(result, data.images.name)]

    every = run.config.of(TextEvaluationConfig).zero_shot_every or session.last_step
    done = {_KIND: _steps_with(_METRIC, training)}
    return RegularEvaluations(session, {_KIND: every}, measure, done, "zero-shot classification")


def _steps_with(metric: str, training: Training) -> set[int]:
    """Return the steps of which the run's folder has this figure, whose evaluations are not
    repeated."""
    steps: list[int] = []
    with exchange.raise_on_all_ranks():
        if training.session.backend.is_main:
            records = read_metrics(training.run.log_dir)
            steps = [record["step"] for record in records if metric in record]
    return set(exchange.broadcast_object(steps))
