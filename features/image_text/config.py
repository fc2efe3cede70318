"""The flags of image-text pre-training, and the sizes of published text towers."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from config_fields import bounded, count, flag, path_or_url, positive, positive_number

OBJECTIVES = ("siglip", "clip")
ADDED_PARAMETERS = ("text_", "image_projection.", "logit_")
"""Prefixes of the names of the parameters that an image tower does not have."""
_REQUIRED = ("|".join(f"objective={name}" for name in OBJECTIVES),)

# Parts of an objective: their defaults do not turn it off.
_flag = functools.partial(flag, requires=_REQUIRED, requires_at_default=True)

_SIGLIP: dict[str, Any] = {
    "text_mlp_ratio": 4.0,
    "text_length": 64,
    "text_vocab_size": 32_000,
    "text_pool": "last",
    "text_causal": False,
    "text_act": "gelu_tanh",
    "text_norm_eps": 1e-6,
}
_CLIP: dict[str, Any] = {
    "text_depth": 12,
    "text_mlp_ratio": 4.0,
    "text_length": 77,
    "text_vocab_size": 49_408,
    "text_pool": "argmax",
    "text_causal": True,
    "text_act": "quick_gelu",
    "text_norm_eps": 1e-5,
}
_OPEN_CLIP = _CLIP | {"text_act": "gelu"}
_BASE: dict[str, Any] = {"text_depth": 12, "text_width": 768, "text_heads": 12}
_LARGE: dict[str, Any] = {"text_depth": 24, "text_width": 1024, "text_heads": 16}
_SO400M: dict[str, Any] = {
    **{"text_depth": 27, "text_width": 1152, "text_heads": 16},
    "text_mlp_ratio": 4304 / 1152,
}
_SIGLIP2 = _SIGLIP | {"text_vocab_size": 256_000}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "siglip_base": _SIGLIP | _BASE,
    "siglip_large": _SIGLIP | _LARGE,
    "siglip_so400m": _SIGLIP | _SO400M,
    "siglip2_base": _SIGLIP2 | _BASE,
    "siglip2_large": _SIGLIP2 | _LARGE,
    "siglip2_so400m": _SIGLIP2 | _SO400M,
    "siglip2_giant": _SIGLIP2 | _SO400M,
    "clip_base": _CLIP | {"text_width": 512, "text_heads": 8},
    "clip_large": _CLIP | {"text_width": 768, "text_heads": 12},
    "openclip_base": _OPEN_CLIP | {"text_width": 512, "text_heads": 8},
    "openclip_large": _OPEN_CLIP | {"text_width": 768, "text_heads": 12},
    "openclip_huge": _OPEN_CLIP | _LARGE,
    "openclip_gigantic": _OPEN_CLIP | {"text_depth": 32, "text_width": 1280, "text_heads": 20},
}
"""Published text towers by ``--text_model``: values of flags.

SigLIP B/16, L/16 and So400m/14 (transformers' configurations of google/siglip-*; So400m/14 at 224
was trained with 16 tokens). SigLIP 2 (arXiv 2502.14786; open_clip's ViT-*-SigLIP2.json), with
Gemma's vocabulary: giant has the text tower of So400m. CLIP B/32 and B/16; L/14 at 224 and 336
pixels (arXiv 2103.00020, table 20). open_clip's ViT-*.json: B; L; H/14 and g/14, also of
EVA02-CLIP-E/14; bigG/14, also of EVA02-CLIP-E/14+ and EVA-CLIP-18B (arXiv 2402.04252)."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip": {
        "text_model": "siglip_base",
        "logit_scale_init": 10.0,
        "logit_bias_init": -10.0,
        "canonical_text": True,
    },
    "clip": {"text_model": "clip_base", "logit_scale_init": 1 / 0.07, "canonical_text": False},
}
"""By objective, the defaults of flags: arXiv 2303.15343, section 3.2; arXiv 2103.00020, section
2.5; canonical texts as transformers' ``SiglipTokenizer``."""


class TextTower(NamedTuple):
    """The values of the flags ``--text_*`` that decide what a text tower computes."""

    depth: int
    width: int
    heads: int
    mlp_ratio: float
    length: int
    vocab_size: int
    pool: str
    causal: bool
    act: str
    norm_eps: float


@dataclass(frozen=True)
class ImageTextConfig:
    """The text tower, what both towers' outputs become, and which of the two is trained."""

    group: ClassVar[str] = "objective"

    text_model: str | None = _flag(
        None,
        "sizes of the text tower, as in published models; --text_depth and other flags override "
        "them (default: siglip_base for siglip, clip_base for clip)",
        choices=tuple(TEXT_MODELS),
    )
    text_depth: int | None = _flag(
        None,
        "number of blocks of the text tower (default: by --text_model)",
        kind=bounded(int, 1, 1000),
    )
    text_width: int | None = _flag(
        None, "width of the text tower (default: by --text_model)", kind=bounded(int, 1, 2**20)
    )
    text_heads: int | None = _flag(
        None,
        "number of attention heads of the text tower (default: by --text_model)",
        kind=positive,
    )
    text_mlp_ratio: float | None = _flag(
        None,
        "MLP width of the text tower, as a multiple of --text_width (default: by --text_model)",
        kind=positive_number,
    )
    text_length: int | None = _flag(
        None,
        "length of a text in tokens; longer ones are truncated (default: by --text_model, 64 or "
        "77)",
        kind=bounded(int, 1, 2**16),
    )
    text_vocab_size: int | None = _flag(
        None,
        "number of different tokens (default: by --text_model)",
        kind=bounded(int, 2, 2**24),
    )
    text_pool: Literal["last", "first", "argmax", "mean"] | None = _flag(
        None,
        "what represents a text: its last or first token, the first token with the largest number "
        "(CLIP's end of text), or the mean of all tokens (default: by --text_model)",
    )
    text_causal: bool | None = _flag(
        None, "let a token attend only to earlier tokens (default: by --text_model)"
    )
    text_act: Literal["gelu", "gelu_tanh", "quick_gelu"] | None = _flag(
        None, "activation in the text tower's MLP (default: by --text_model)"
    )
    text_norm_eps: float | None = _flag(
        None,
        "epsilon of the text tower's norms (default: by --text_model)",
        kind=positive_number,
    )
    projection_dim: int | None = _flag(
        None,
        "width of the embeddings that are compared (default: the image tower's for siglip, which "
        "then projects texts only; --text_width for clip, which projects both)",
        kind=bounded(int, 1, 2**20),
    )
    logit_scale_init: float | None = _flag(
        None,
        "initial factor of cosine similarities, which is learned; clip uses at most 100 (default: "
        "10 for siglip, 1/0.07 for clip)",
        kind=bounded(float, 1e-4, 1e4),
    )
    logit_bias_init: float | None = flag(
        None,
        "initial value of what is added to scaled similarities, which is learned (default: -10)",
        kind=bounded(float, -1e4, 1e4),
        requires=("objective=siglip",),
        requires_at_default=True,
    )
    caption_key: list[str] | None = flag(
        None,
        "where the captions are: columns of the table, or in webdataset extensions of files, else "
        "fields of the sample's .json; of several captions of an image, one is drawn in each epoch "
        "(docs/image_text.md) (default: the first that exists of caption, captions, text and txt)",
        metavar="KEY",
        requires=("tokenizer",),
    )
    tokenizer: str | None = _flag(
        None,
        "what makes tokens of texts; bytes: their bytes in UTF-8; FILE: a tokenizer.json of the "
        "package tokenizers, or the folder with it and tokenizer_config.json, or CLIP's "
        "bpe_simple_vocab_16e6.txt.gz; "
        "hf-hub:OWNER/NAME[@REVISION]: those on the Hugging Face Hub. A copy is saved beside the "
        "checkpoints (docs/image_text.md) (default: none; texts require one)",
        kind=path_or_url,
        metavar="bytes|FILE|NAME",
    )
    tokenizer_checksum: str | None = flag(
        None,
        "checksum that --tokenizer must have, as recorded in run.json (default: the checkpoint's; "
        "new runs: any)",
        metavar="HEX",
        requires=("tokenizer",),
    )
    canonical_text: bool | None = _flag(
        None,
        "lowercase texts and remove their punctuation (default: on for siglip, off for clip, whose "
        "tokenizer lowercases)",
    )
    init_text_from: str | None = flag(
        None,
        "initialize the text tower of a new run with that of these weights, of this program, "
        "transformers or open_clip: a path or hf-hub:OWNER/NAME[@REVISION]; also its projection, "
        "if the shapes fit; sets --text_depth and so on (default: that of --init_from, if it has "
        "one)",
        kind=path_or_url,
        metavar="PATH",
        requires=_REQUIRED,
        incompatible_with=("eval_only", "features"),
    )
    lock_image: bool = flag(
        False,
        "do not train the image tower (LiT); its projection, if it has one, is trained",
        requires=_REQUIRED,
        incompatible_with=("lock_text",),
    )
    lock_text: bool = flag(
        False,
        "do not train the text tower; its projection is trained",
        requires=_REQUIRED,
    )

    @property
    def text(self) -> TextTower:
        """The text tower, once ``--text_model`` is resolved."""
        return TextTower(*(getattr(self, f"text_{name}") for name in TextTower._fields))


@dataclass(frozen=True)
class TextEvaluationConfig:
    """What evaluations compare: captions, and images with the names of their classes."""

    group: ClassVar[str] = "logging and evaluation"

    val_captions: int = flag(
        1,
        "number of captions of each image in val/, the first ones, that count in the recall of "
        "evaluations",
        kind=bounded(int, 1, 1000),
        requires=_REQUIRED,
    )

    zero_shot: str | None = flag(
        None,
        "also classify the images in val/ of this folder, which has a folder for each class, or of "
        "another --zero_shot_source, by the similarity of their embeddings to those of texts with "
        "the names of the classes, at the end of training and every --zero_shot_every steps; with "
        "--eval_only, do this in place of the evaluation of pairs (docs/image_text.md)",
        kind=path_or_url,
        metavar="FOLDER",
        requires=_REQUIRED,
        incompatible_with=("predict", "features", "compile_only", "plan", "self_check"),
    )
    zero_shot_source: Literal["folder", "webdataset", "parquet", "huggingface"] = flag(
        "folder",
        "format of --zero_shot, as of --data_dir with --data_source; of shards and tables, the "
        "validation split is read",
        requires=("zero_shot",),
    )
    zero_shot_labels: str | None = flag(
        None,
        "CSV or parquet file with the columns path (in --zero_shot), label and, if present, split, "
        "as for --labels: its validation images are classified (default: labels from the class "
        "folders)",
        kind=path_or_url,
        metavar="FILE",
        requires=("zero_shot", "zero_shot_source=folder"),
    )
    zero_shot_columns: list[str] | None = flag(
        None,
        "names of two columns of --zero_shot, or of --zero_shot_labels: of images or their paths, "
        "and of labels (default: as for --columns)",
        metavar="COLUMN",
        requires=("zero_shot_source=parquet|zero_shot_source=huggingface|zero_shot_labels",),
    )
    zero_shot_every: int = flag(
        0,
        "number of steps between evaluations of --zero_shot; 0: only at the end",
        kind=count,
        requires=("zero_shot",),
    )
    class_names: str | None = flag(
        None,
        "file with the names of the classes of --zero_shot, one a line, in the order of their "
        "labels or, of folders, of --class_order (default: the names that the data has, such as "
        "those of the folders, with spaces in place of underscores)",
        kind=path_or_url,
        metavar="FILE",
        requires=("zero_shot",),
    )
    prompts: str | None = flag(
        None,
        "file with the texts of a class, one a line, in which {} stands for its name; their "
        "embeddings are averaged (default: the eighty of CLIP for ImageNet)",
        kind=path_or_url,
        metavar="FILE",
        requires=("zero_shot",),
    )


@dataclass(frozen=True)
class TextsConfig:
    """What images are compared with when a trained model is used."""

    group: ClassVar[str] = "use a trained model instead of training"
    after: ClassVar[str] = "predict"

    texts: list[str] | None = flag(
        None,
        "let --predict print which of these texts each image is most similar to, by a model of "
        "--objective siglip or clip",
        metavar="TEXT",
        requires=("predict", *_REQUIRED),
    )
