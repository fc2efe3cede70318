"""Two towers as transformers and open_clip store them: read, and written by ``tools.convert``."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from data.config import Preprocessing
from features.image_text import names, open_clip_config, transformers_config
from features.image_text.config import ADDED_PARAMETERS
from features.image_text.model import ImageTextSpec
from models.config import ModelError
from models.registry import open_model
from models.spec import ModelSpec
from models.timm_models import names as timm_names
from training.checkpoints.format import SavedRun
from training.errors import UsageError
from training.resolve import trained_model
from training.weights.config_json import DescribedModel, Setting
from training.weights.describe import preprocessing_of
from training.weights.formats import Exported, WeightFormat
from training.weights.hub import CONFIG_FILE, PREPROCESSOR_FILE
from training.weights.processor import processing_of
from training.weights.sidecar import Sidecar


def same_value(given: Any, there: Any) -> bool:
    """Compare values of a flag; None is no value."""
    if isinstance(given, float) and isinstance(there, float):
        return math.isclose(given, there, rel_tol=1e-3)
    return given is None or given == there


class TwoTowers(WeightFormat):
    """A format of image-text models."""

    title: str
    """What messages call the program's model."""

    @abc.abstractmethod
    def text_tower(self, about: Sidecar) -> Iterator[Setting]:
        """Yield the values of flags of the text tower. Raises UsageError for what is not
        supported."""

    def _checked(self, run: SavedRun) -> ImageTextSpec:
        spec = trained_model(run.config)
        if not isinstance(spec, ImageTextSpec):
            raise UsageError(
                f"--names {self.name} requires a checkpoint of --objective siglip or clip, not of "
                f"--objective {run.config.objective.objective}"
            )
        return spec

    def _check_same(
        self, run: SavedRun, spec: ImageTextSpec, about: Sidecar, **arguments: Any
    ) -> None:
        """Raise UsageError unless the configuration that is to be written describes the model, with
        these ``arguments`` besides."""
        described = self.described_model(about, Sidecar(about.file, {}), is_named=False)
        assert described is not None
        try:
            there = open_model(described.name, described.flags().overrides() | arguments)
        except ModelError as error:
            raise self._refusal(run, str(error)) from None
        here = spec.image
        if differing := [n for n in here.differences(there.settings) if n not in _AS_SIZES]:
            name = differing[0]
            value, other = here.settings[name], there.settings[name]
            raise self._refusal(run, f"<{name}> is {value!r}, there {other!r}")
        text = vars(spec.config)
        for setting in self.text_tower(about):
            name = setting.argument
            if name != "projection_dim" and not same_value(text[name], setting.value):
                raise self._refusal(run, f"--{name} is {text[name]!r}, there {setting.value!r}")

    def _check_all_written(self, run: SavedRun, left: Sequence[str]) -> None:
        if left:
            raise self._refusal(run, f"{left[0]} has no place there")

    def _refusal(self, run: SavedRun, why: str) -> UsageError:
        text = ModelError(why).with_flag_names({})
        return UsageError(f"{run.path} cannot be written as {self.title}: its {text}")


_AS_SIZES = ("img_size", "mlp_ratio", "num_classes", "dynamic_img_size")
"""Settings that are compared as sizes of the built models, or that change nothing."""


def _act_and_eps(spec: ModelSpec) -> tuple[str, float]:
    """Return timm's name of the activation of an image tower, and the epsilon of its norms."""
    block: Any = spec.block
    act = spec.settings["act_layer"] or "gelu"
    return str(act), float(block.norm1.eps)


class OfTransformers(TwoTowers):
    """``SiglipModel``, ``Siglip2Model`` and ``CLIPModel``."""

    name, config_file, title = "transformers", CONFIG_FILE, "transformers' SigLIP or CLIP"

    def reads(self, names: Collection[str]) -> bool:
        return any(name in names for name in _OF_TRANSFORMERS)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        depths = [
            names.depth_of(tensors, f"{tower}.encoder.layers.")
            for tower in ("vision_model", "text_model")
        ]
        is_clip = "visual_projection.weight" in tensors
        return names.read(names.of_transformers(*depths, clip=is_clip), tensors)

    def described_model(
        self, about: Sidecar, processor: Sidecar, *, is_named: bool
    ) -> DescribedModel | None:
        return transformers_config.image_tower(about, processor, is_named=is_named)

    def text_tower(self, about: Sidecar) -> Iterator[Setting]:
        return transformers_config.text_tower(about)

    def preprocessing(self, about: Sidecar, processor: Sidecar) -> tuple[Mapping[str, Any], str]:
        kind = transformers_config.kind_of(about, is_named=True)
        if kind == "siglip2":  # whose processor resizes to any shape: to the model's here
            mean, std = (processor.content.get(f"image_{n}", [0.5] * 3) for n in ("mean", "std"))
            how = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
            return {"mean": mean, "std": std, **how}, PREPROCESSOR_FILE
        usual = transformers_config.processor_of(kind or "clip")
        found = processing_of(processor, usual)
        return (found.values if found else {}), PREPROCESSOR_FILE

    def export(self, run: SavedRun, tensors: Mapping[str, torch.Tensor]) -> Exported:
        spec = self._checked(run)
        act, eps = _act_and_eps(spec.image)
        is_native, (rows, columns) = spec.segments is not None, spec.sizes.grid
        if is_native and rows != columns:
            raise self._refusal(run, f"positions are {rows} x {columns}, there a square")
        config = transformers_config.config_of(
            spec.image, spec.config.text, spec.embedding_width, act, eps
        )
        is_clip = config["model_type"] == "clip"
        depths = spec.sizes.depth, spec.config.text.depth
        entries = names.of_transformers(*depths, clip=is_clip, native=is_native)
        found, left = names.write(entries, tensors)
        as_there = {"native_resolution": True, "pos_embed_interp_mode": "bilinear"}
        about = Sidecar(run.path / self.config_file, config)
        self._check_same(run, spec, about, **(as_there if is_native else {}))
        self._check_all_written(run, left)
        files: dict[str, Mapping[str, Any]] = {self.config_file: config}
        how = _processor(preprocessing_of(run.arguments, run.path), spec)
        if how:
            files[PREPROCESSOR_FILE] = how
        lacks = "" if how else f"no {PREPROCESSOR_FILE}, which has no such images; "
        return Exported(found, files, note=f"{lacks}without a tokenizer")


_OF_TRANSFORMERS = {
    "vision_model.embeddings.patch_embedding.weight",
    "text_model.embeddings.token_embedding.weight",
}
_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's numbers."""


def _processor(given: Preprocessing, spec: ImageTextSpec) -> dict[str, Any] | None:
    """Return transformers' ``preprocessor_config.json``; None if it cannot say how images are
    cropped, or packed."""
    if spec.segments is not None:
        return None
    channels, height, width = spec.sizes.input_shape
    mean, std = given.of_channels(channels)
    interpolation = str(given.interpolation_of_val)
    resample = _RESAMPLING.get(interpolation)
    if resample is None:
        return None
    found = {
        **{"do_resize": True, "do_rescale": True, "do_normalize": True},
        **{"rescale_factor": 1 / 255, "resample": resample},
        **{"image_mean": list(mean), "image_std": list(std)},
    }
    if given.crop_mode == "squash" and given.crop_pct == 1:
        size = {"height": height, "width": width}
        return found | {"image_processor_type": "SiglipImageProcessor", "size": size}
    if given.crop_mode == "center" and height == width:
        return found | {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": math.floor(height / given.crop_pct)},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    return None


class OfOpenClip(TwoTowers):
    """open_clip's ``CLIP`` and ``CustomTextCLIP``, with timm's image towers or its own."""

    name, config_file, title = "open_clip", "open_clip_config.json", "open_clip's model"

    def reads(self, names: Collection[str]) -> bool:
        starts = ("visual.trunk.", "visual.conv1.", "visual.class_embedding")
        return any(name.startswith(starts) for name in names)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        text = "text." if "text.token_embedding.weight" in tensors else ""
        start = "visual.trunk."
        trunk = [name.removeprefix(start) for name in tensors if name.startswith(start)]
        entries = names.of_open_clip(
            names.depth_of(tensors, "visual.transformer.resblocks."),
            names.depth_of(tensors, f"{text}transformer.resblocks."),
            trunk=trunk,
            custom_text=bool(text),
            biased=f"{text}text_projection.weight" in tensors,
        )
        return names.read(entries, tensors)

    def described_model(
        self, about: Sidecar, processor: Sidecar, *, is_named: bool
    ) -> DescribedModel | None:
        return open_clip_config.image_tower(about, is_named=is_named)

    def text_tower(self, about: Sidecar) -> Iterator[Setting]:
        return open_clip_config.text_tower(about)

    def preprocessing(self, about: Sidecar, processor: Sidecar) -> tuple[Mapping[str, Any], str]:
        return open_clip_config.preprocessing(about), self.config_file

    def export(self, run: SavedRun, tensors: Mapping[str, torch.Tensor]) -> Exported:
        spec = self._checked(run)
        if spec.segments is not None:
            raise self._refusal(run, "images may have any size (--native_resolution)")
        image, (act, eps) = spec.image, _act_and_eps(spec.image)
        settings, biased = image.settings, "text_projection.bias" in tensors
        projects = "image_projection.weight" in tensors
        is_own = settings["pre_norm"] and settings["global_pool"] == "token" and projects
        model = open_clip_config.config_of(
            image,
            spec.config.text,
            spec.embedding_width,
            timm_name=None if is_own else self._timm_name(run, image),
            act=act,
            eps=eps,
            projects_images=projects,
            biased=biased,
        )
        trunk = (
            [] if is_own else [name for name in tensors if not name.startswith(ADDED_PARAMETERS)]
        )
        depths = spec.sizes.depth, spec.config.text.depth
        entries = names.of_open_clip(*depths, trunk=trunk, custom_text=True, biased=biased)
        found, left = names.write(entries, tensors)
        given = preprocessing_of(run.arguments, run.path)
        channels = spec.sizes.input_shape[0]
        config = {
            "model_cfg": model,
            "preprocess_cfg": open_clip_config.preprocessing_config(given, channels),
        }
        self._check_same(run, spec, Sidecar(run.path / self.config_file, config))
        self._check_all_written(run, left)
        lacks = "" if given.crop_pct == 1 else f"without --crop_pct {given.crop_pct:g}; "
        return Exported(
            found,
            {self.config_file: config},
            weights_name="open_clip_model",
            sharded=False,
            note=f"{lacks}without a tokenizer",
        )

    def _timm_name(self, run: SavedRun, image: ModelSpec) -> str:
        """Return timm's model with these settings: open_clip can ask timm for no others. Raises
        UsageError if there is none."""
        own = image.name.removeprefix("timm/").partition(".")[0]
        shape, hidden = image.sizes.input_shape, image.sizes.hidden
        width = _WIDTHS.get(image.sizes.embed_dim, "")
        start, end = f"vit_{width}_patch{image.settings['patch_size']}_", f"_{shape[-1]}"
        similar = [
            name
            for name in timm_names()
            if name.startswith(start) and name.endswith(end) and "clip" in name
        ]
        for name in (own, *similar):
            try:
                other = open_model(f"timm/{name}", {})
            except ModelError:
                continue
            differing = [n for n in image.differences(other.settings) if n not in _AS_SIZES]
            if not differing and (other.sizes.input_shape, other.sizes.hidden) == (shape, hidden):
                return name
        raise UsageError(
            f"{run.path} cannot be written as {self.title}: timm has no model of the settings of "
            "its image tower, by which open_clip would build it"
        )


_WIDTHS = {
    **{768: "base", 1024: "large", 1152: "so400m", 1280: "huge", 1408: "giant"},
    **{1536: "giantopt", 1664: "gigantic"},
}
"""timm's words for widths."""
