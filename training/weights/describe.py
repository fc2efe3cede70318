"""What is known of weights besides their tensors: model, preprocessing and classes, from the run
that made them, else from the files of timm or transformers next to them.

Settings are values by field name, which ``training.resolve.take_over`` sets where no flag is set. A
setting that no flag has is compared with the model that is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from data.config import CROP_MODES, INTERPOLATIONS, RANDOM_SPLIT, DataConfig, Preprocessing
from data.files import parse_object
from data.intensity import is_intensity
from models.config import ModelConfig
from training.checkpoints.format import SavedRun
from training.config import RunConfig, flags_of_model
from training.errors import UsageError
from training.flags import by_field, flat
from training.objectives.config import flags_of_weights
from training.resolve import model_of, take_over, with_defaults
from training.weights.config_json import (
    KINDS,
    DescribedModel,
    class_count,
    class_names,
    described_model,
)
from training.weights.files import metadata_of, safetensors_files
from training.weights.formats import WeightFormat, format_of
from training.weights.hub import CONFIG_FILE, PREPROCESSOR_FILE
from training.weights.processor import processing_of
from training.weights.sidecar import Sidecar, read_sidecar
from training.weights.source import Source

PREPROCESSING = tuple(field.name for field in fields(Preprocessing))


@dataclass(frozen=True)
class ModelHints:
    """What is known of weights."""

    source: Source
    config: Sidecar
    """``config.json`` next to files of another program; empty without one."""
    processor: Sidecar
    """``preprocessor_config.json`` of transformers; empty without one."""
    format: WeightFormat | None = None
    """The format that a feature adds, if it is one of these: it reads ``config``."""

    # -- classes

    @property
    def classes(self) -> list[str] | None:
        """The folders of the classes that the run trained on, by label; None: unknown."""
        return self.source.run.classes if self.source.run else None

    @property
    def class_names(self) -> list[str] | None:
        """Display names of the classes, by label: ``classes``, else the names in ``config``, which
        may not be names of folders; None: unknown. Raises UsageError for invalid ones."""
        if self.source.run:
            return self.classes
        names, trained = class_names(self.config), self.config.mapping("pretrained_cfg")
        if names is None and "in1k" in str(trained.get("tag")):
            return ImageNetInfo("imagenet-1k").label_descriptions()
        return names

    def classes_among(self, folders: list[str] | None) -> list[str] | None:
        """Return the names of the classes by label, if they can be compared with ``folders``:
        ``classes``, or names that another program gave to the same folders."""
        names = None if self.source.run else self.class_names
        if names and folders and sorted(names) == sorted(folders):
            return names
        return self.classes

    # -- model

    @property
    def antialiases_positions(self) -> bool:
        """Whether positions are resampled with antialiasing, as in timm, not transformers."""
        return self.config.content.get("model_type") is None

    def model(self, given: ModelConfig) -> DescribedModel | None:
        """Return the model in ``config``; None if there is none. Raises UsageError for an unknown
        one, unless a flag in ``given`` names a model."""
        described = self.format.described_model if self.format else described_model
        return described(self.config, self.processor, is_named=given.model is not None)

    # -- preprocessing

    def preprocessing(self) -> tuple[Mapping[str, Any], str] | None:
        """Return the preprocessing that files say, by timm's names, and which ones say it; None if
        none does. Raises UsageError for what cannot be read."""
        source = self.source
        for file, content in self._preprocessing_beside():
            if any(content.get(name) is not None for name in PREPROCESSING):
                return content, f"{source.title} and its {file}"
        return (source.trained_with, source.title) if source.trained_with else None

    def _preprocessing_beside(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield what may describe it, and the file that says it: timm's ``pretrained_cfg`` in the
        metadata of .safetensors files or next to them, then what transformers saved."""
        if files := safetensors_files(self.source.path):
            try:
                yield CONFIG_FILE, parse_object(metadata_of(files[0]).get("pretrained_cfg", "{}"))
            except ValueError as error:
                raise UsageError(
                    f"{files[0]}: pretrained_cfg in its metadata cannot be read ({error}): save "
                    "the file again without it"
                ) from None
        if self.format:
            content, file = self.format.preprocessing(self.config, self.processor)
            yield file, content
            return
        yield CONFIG_FILE, self.config.mapping("pretrained_cfg") or self.config.content
        kind = KINDS.get(str(self.config.content.get("model_type")), KINDS["vit"])
        if processing := processing_of(self.processor, kind.processor):
            yield PREPROCESSOR_FILE, processing.values


def describe(source: Source) -> ModelHints:
    """Return what is known of these weights. Raises UsageError for a damaged file next to them."""
    found = None if source.run else format_of(source.as_stored.layouts)
    names = (found.config_file if found else CONFIG_FILE, PREPROCESSOR_FILE)
    config, processor = (source.beside(name) for name in names)
    if source.run:
        return ModelHints(source, Sidecar(config, {}), Sidecar(processor, {}))
    return ModelHints(source, read_sidecar(config), read_sidecar(processor), found)


# -- Settings by field name ------------------------------------------------------------------------


def settings_of(saved: SavedRun, data: DataConfig) -> dict[str, Any]:
    """Return the model, objective, preprocessing, class order and random split of a checkpoint's
    run by field name. ``data``: what numbers the classes now. Raises UsageError for invalid
    values."""
    # Runs before the flag had the whole range.
    preprocessing = asdict(preprocessing_of({"intensity": "full"} | saved.arguments, saved.path))
    of_weights = by_field(*flags_of_model(), *flags_of_weights())
    values = {name: each for name, each in flat(saved.config).items() if name in of_weights}
    values |= preprocessing
    if data.labels:  # the same images are for validation
        split = {name: saved.arguments[name] for name in RANDOM_SPLIT if name in saved.arguments}
        values |= split
    numbers_folders = data.data_source in ("folder", "volumes") and not data.labels
    if numbers_folders and data.class_map is None:
        values["class_order"] = saved.arguments.get("class_order")
    return values


_LARGEST_IN_VOLUMES = 1e30
"""Images have values from 0 to 1, volumes any numbers, such as Hounsfield units."""


def preprocessing_of(values: Mapping[str, Any], path: Path) -> Preprocessing:
    """Return the default preprocessing, overridden by ``values``, which are from ``path``.

    Raises UsageError for invalid values.
    """
    given: dict[str, Any] = {n: values[n] for n in PREPROCESSING if values.get(n) not in (None, "")}
    largest = _LARGEST_IN_VOLUMES if values.get("data_source") == "volumes" else 1.0
    for name, value in given.items():
        if name in ("interpolation", "test_interpolation"):
            is_valid = value in INTERPOLATIONS
        elif name == "crop_mode":
            is_valid = value in CROP_MODES
        elif name == "intensity":
            is_valid = is_intensity(value)
        elif name == "crop_pct":
            is_valid = isinstance(value, (int, float)) and 0 < value <= 1
        else:  # mean, std
            least = 1e-6 if name == "std" else 0.0 if largest == 1 else -largest
            is_valid = (
                isinstance(value, (list, tuple))
                and len(value) == 3
                and all(
                    isinstance(each, (int, float)) and least <= each <= largest for each in value
                )
            )
        if not is_valid:
            raise UsageError(f"{path} has {name} {value!r}, which is not supported: set --{name}")
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Preprocessing(**given)


def check_described(config: RunConfig, hints: ModelHints, *, keeps_head: bool) -> None:
    """Raise UsageError if the model that a flag names computes something else than the one that
    files describe."""
    if model := hints.model(config.model):
        model.check_named(model_of(config), config.model_arguments(), keeps_head=keeps_head)


def take_over_described(
    config: RunConfig, source: Source, *, keeps_head: bool
) -> tuple[RunConfig, Source]:
    """Return the configuration with the model and preprocessing of weights, except where flags are
    set, and the weights with a note about it.

    If a file does not describe its model, the flags do. Preprocessing is what files say, else what
    timm has for the model, else that of new weights. ``keeps_head``: the weights are used
    unchanged. Raises UsageError for invalid values, and if the model would compute something else
    than a file describes.
    """
    if source.run:
        values = settings_of(source.run, config.data)
        of_other_run = {*by_field(*flags_of_weights()), *RANDOM_SPLIT}
        kept = of_other_run | config.explicitly_set  # auto, too: the images are others
        values = {name: each for name, each in values.items() if name not in kept}
        config = take_over(config, values, source.path)
        for feature in config.active_features:
            config = feature.of_weights(config, source)
        return config, source
    hints = describe(source)
    if config.model.model is not None:
        check_described(config, hints, keeps_head=keeps_head)
    elif model := hints.model(config.model):
        given = config.model_arguments()
        config = take_over(config, flat(model.flags()), source.path)
        model.check(model.built(config), given)
    for feature in config.active_features:
        config = feature.of_weights(config, source)
    if keeps_head and (count := class_count(hints.config)):
        config = with_defaults(config, {"num_classes": count})

    trained_with, origin = hints.preprocessing() or (None, "")
    if trained_with is None:
        spec = model_of(config)
        trained_with, origin = spec.preprocessing, f"timm's {spec.name}"
    if trained_with is None:
        new = Preprocessing.of_new_weights(config.data.data_source)
        return with_defaults(config, asdict(new)), source
    unset = {
        name: trained_with.get(name) for name in PREPROCESSING if getattr(config.data, name) is None
    }
    config = with_defaults(config, asdict(preprocessing_of(unset, source.path)))
    note = f"preprocessing: {config.data.preprocessing} (from {origin})"
    return config, source.with_note(note)
