"""Trained weights in use: place the weights that flags name on the devices, adapt them as initial
weights of another model (``--init_from``), and resolve the teachers of a training run.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from torch import nn

from data import hub as data_hub
from models.config import ModelConfig, ModelError
from models.dino import HEAD_SETTINGS
from models.initialize import allocate_own, on_meta
from models.spec import HEADS, ModelSpec
from training.backend import Backend
from training.checkpoints import format as checkpoint
from training.checkpoints.compatible import (
    check_same_training,
    with_saved,
    with_saved_model,
)
from training.checkpoints.format import EMA, SavedRun
from training.checkpoints.state import load_state
from training.config import EmaConfig, RunConfig
from training.data import data_errors_as_usage_errors
from training.described import POOLING, class_count, described_model
from training.errors import UsageError
from training.files import folder_at
from training.flags import flat
from training.hub import PREFIX, download, is_on_hub
from training.objectives.config import LossConfig, ObjectiveConfig
from training.resolve import Run, model_line, model_of, resolve_model
from training.weight_names import NAMED, listed
from training.weights import (
    Weights,
    check_weights,
    find_weights,
    weights_in,
    weights_named,
    with_preprocessing_of,
)

# -- Weights that are used as they are: --predict, --eval_only, --features -------------------------


def find_trained(config: RunConfig) -> tuple[RunConfig, Weights]:
    """Find the weights that the flags name; also return the configuration with their model and
    preprocessing.

    The checkpoint's model replaces flags that are not set. Weights of ``--init_from``, whose head
    may be missing, use the model of the flags. Raises UsageError for a checkpoint that cannot be
    read or that contradicts the model flags.
    """
    config = with_pretrained(config)
    checkpoints, use_ema = config.checkpoints, config.use.use_ema
    if checkpoints.init_from is not None:
        if use_ema:
            raise UsageError("--use_ema requires --resume, not --init_from: use --resume PATH")
        if "resume" in config.explicitly_set:
            raise UsageError("--init_from and --resume both name weights: drop one of the two")
        config, weights = with_init_from(config)
    else:
        weights = find_weights(
            folder_at(checkpoints.ckpt_dir),
            checkpoints.resume,
            checkpoints.resume_epoch,
            use_ema=use_ema,
        )
        if weights.run:
            config = without_gram_teacher(with_saved(config, weights.run))
            check_same_training(weights.run, model_of(config.model, config.objective), None)
        else:
            config = with_described_model(config, weights, keeps_head=True)
            weights, config = with_preprocessing_of(weights, config)
            classes = class_count(weights.described)
            if config.model.num_classes is None and classes:
                config = replace(config, model=replace(config.model, num_classes=classes))
        weights.check_fits(resolve_model(config)[1])
        if is_on_hub(weights.name):
            config = replace(config, checkpoints=replace(checkpoints, resume=weights.name))
    if config.use.predict is None:
        config = with_data_commits(config, None)
    return config, weights


def with_init_from(config: RunConfig) -> tuple[RunConfig, Weights]:
    """Return the configuration with the model and preprocessing of the weights of ``--init_from``,
    except where flags are set, and these weights.

    If a file does not describe its model, the flags do. For weights on the Hub, ``--init_from``
    then names the commit. Raises UsageError if there are no such weights.
    """
    assert config.checkpoints.init_from is not None
    weights = weights_named(config.checkpoints.init_from, "--init_from")
    if weights.run:
        config = replace(config, model=with_saved_model(config.model, weights.run))
    config = with_described_model(config, weights, keeps_head=False)
    weights, config = with_preprocessing_of(weights, config)
    return replace(config, checkpoints=replace(config.checkpoints, init_from=weights.name)), weights


def with_described_model(config: RunConfig, weights: Weights, *, keeps_head: bool) -> RunConfig:
    """Return the configuration with the model that ``config.json`` next to the weights describes,
    as timm or transformers write it, unless ``--model`` names one.

    Flags that are set override what it says. ``keeps_head``: the weights are used unchanged. Raises
    UsageError if the model would compute something else than the file describes.
    """
    given, is_named = config.model.overrides(), config.model.model is not None
    described = described_model(weights.described, weights.processor, is_named=is_named)
    if described is None:
        return config
    if is_named:
        passed_over = {*given, *(() if keeps_head else POOLING)}
        described.check_named(model_of(config.model), passed_over)
        return config
    model = replace(described.flags(), **given)  # type: ignore[arg-type]
    config = replace(config, model=model)
    described.check(described.built(config.model), given)
    return config


def with_pretrained(config: RunConfig) -> RunConfig:
    """Return the configuration with the weights of ``--pretrained`` by their name on the Hub: as
    ``--init_from`` or, where weights are used unchanged, as ``--resume``. Raises UsageError if timm
    has none for the model."""
    checkpoints, use, name = config.checkpoints, config.use, config.model.model
    if not checkpoints.pretrained:
        return config
    assert name is not None  # --pretrained requires it
    if "resume" in config.explicitly_set and (use.predict or use.eval_only or use.features):
        raise UsageError("--pretrained and --resume both name weights: drop one of the two")
    model_of(config.model)  # raises if there is no such model
    try:
        trained = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    except RuntimeError:  # no such tag
        trained = None
    if trained is None or not trained.hf_hub_id:
        raise UsageError(
            f"--pretrained: timm has no pretrained weights for --model {name} on the Hub "
            "(timm.list_pretrained() lists those that exist)"
        )
    weights, checkpoints = f"{PREFIX}{trained.hf_hub_id}", replace(checkpoints, pretrained=False)
    if use.predict or (use.eval_only and not use.judges_features):
        return replace(config, checkpoints=replace(checkpoints, resume=weights))
    return replace(config, checkpoints=replace(checkpoints, init_from=weights))


def with_commits(config: RunConfig, saved: SavedRun | None) -> RunConfig:
    """Return the configuration with the commits of data sets, and of teachers' weights, on the Hub,
    which each start loads again: those of the resumed checkpoint, unless flags name others. Raises
    UsageError if they are not available."""

    def with_commit(field: str, name: str | None) -> str | None:
        if name is None or not is_on_hub(name):
            return name
        before = str(saved.arguments.get(field)) if saved else ""
        return before if before.startswith(f"{name}@") else download(name, f"--{field}")[0]

    loss, objective = config.loss, config.objective
    teacher = with_commit("teacher_weights", loss.teacher_weights)
    gram = with_commit("gram_weights", objective.gram_weights)
    config = replace(
        config,
        loss=replace(loss, teacher_weights=teacher),
        objective=replace(objective, gram_weights=gram),
    )
    return with_data_commits(config, saved)


def with_data_commits(config: RunConfig, saved: SavedRun | None) -> RunConfig:
    """Return what ``with_commits`` does, for data sets alone."""
    with data_errors_as_usage_errors():
        data = data_hub.with_commits(config.data, saved.arguments if saved else {})
    return replace(config, data=data)


def without_gram_teacher(config: RunConfig) -> RunConfig:
    """Return the configuration without a checkpoint's Gram teacher, which is only for training.
    Flags of a Gram teacher that are set stay, and are refused later."""
    none = flat(ObjectiveConfig())
    gram = {"gram_weights", "gram_weight", "gram_update_steps", "gram_crop_factor"}
    names = gram - config.explicitly_set
    objective = replace(config.objective, **{name: none[name] for name in names})
    return replace(config, objective=objective)


def printer(backend: Backend, *, json: bool = False) -> Callable[[str], None]:
    """Return a function that prints a line in the first process; on stderr with ``json``."""
    if not backend.is_main:
        return lambda line: None
    return functools.partial(print, file=sys.stderr if json else sys.stdout, flush=True)


def fit_backbone(weights: Weights, run: Run, classes: list[str] | None) -> InitialWeights | None:
    """Return how weights of ``--init_from`` are adapted to the model; None for others, which fit
    already. Raises UsageError, see ``fit``."""
    return fit(weights, run, classes) if run.config.checkpoints.init_from else None


def place_trained(
    weights: Weights,
    run: Run,
    backend: Backend,
    say: Callable[[str], None],
    initial: InitialWeights | None = None,
) -> nn.Module:
    """Place the model on the devices with trained weights, log which, and return it.

    ``initial``: how weights of another model are adapted to this one.
    """
    check_weights(weights, verify=run.config.checkpoints.verify_checkpoint)
    model = run.build_model(backend.constant)
    kind = "EMA of the weights" if run.config.use.use_ema else "weights"
    of = f"{kind} of {weights.name or weights.path}"
    say(f"model: {model_line(run.model)}, {of}")
    if note := initial.note if initial else weights.note:
        say(note)
    units = list(run.model.units(model))
    if initial:
        return backend.shard(model, units, initial.initialize)
    sharded = backend.shard(model, units, weights.initialize)
    if weights.loads_sharded:
        use_ema = run.config.use.use_ema
        with checkpoint.readable(weights.path):  # its run may have removed it meanwhile
            load_state(backend, weights.path, with_optimizer=False, use_ema=use_ema)
    return sharded


# -- Initial weights from another model ------------------------------------------------------------

_PATCHES = "patch_embed.proj.weight"
_HEAD = "head."
_MAY_BE_NEW = (
    *(*HEADS, "cls_token", "reg_token", "attn_pool.", "fc_norm."),
    *("embeds.cls_token", "embeds.reg_token"),
)
"""Prefixes of tensors that only the model may have; they are initialized as new."""
_MAY_BE_DROPPED = (*_MAY_BE_NEW, "norm.")
"""Prefixes of tensors that only the weights may have."""
_NORMS = ("norm.", "fc_norm.")
"""The last norm, before or after pooling. A model has one, and may get the other's weights."""
_REMEDY = "use the --model and model flags that it was trained with"


@dataclass(frozen=True)
class _Layout:
    """Which tokens a position embedding has entries for."""

    prefix: int
    """The number of class and register tokens, which come first."""
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.grid))


def fit(weights: Weights, run: Run, data_classes: list[str] | None) -> InitialWeights:
    """Return how the weights are adapted to the run's model, for data with these classes.

    Raises UsageError naming tensors that only the model or only the weights have.
    """
    spec, there = run.model, weights.shapes()
    here = {name: tensor.shape for name, tensor in spec.meta.state_dict().items()}

    # The source of each tensor of the model: the same name or, for the last norm, the other one.
    sources = {name: name for name in here if name in there}
    for name, other in spec.converted.items():
        if name not in there and other in there:
            sources[name] = other
    for norm, other in (_NORMS, _NORMS[::-1]):
        for name in here:
            if name.startswith(norm) and name not in there:
                source = other + name.removeprefix(norm)
                if source in there and source not in sources:
                    sources[name] = source
    # The head is used if its classes are those of the data, as far as is known.
    heads = [{n: s for n, s in each.items() if n.startswith(_HEAD)} for each in (here, there)]
    classes = weights.classes_among(data_classes)
    is_other = classes is not None and data_classes not in (None, classes)
    if heads[0] != heads[1] or is_other:
        sources = {name: at for name, at in sources.items() if not name.startswith(_HEAD)}
    missing, dropped = here.keys() - sources.keys(), there.keys() - set(sources.values())
    advice = weights.remedy(here, _REMEDY)
    for differing, allowed, has, which in (
        (missing, _MAY_BE_NEW, "has no", "which the model has"),
        (dropped, _MAY_BE_DROPPED, "has", "which the model does not have"),
    ):
        if wrong := [name for name in differing if not name.startswith(allowed)]:
            raise UsageError(f"{weights.path} {has} {listed(wrong)}, {which}: {advice}")

    def on_meta_there(name: str) -> torch.Tensor | None:
        return torch.empty(there[name], device="meta") if name in there else None

    # Which tensors change shape: only position embeddings and the patch embedding may.
    layouts, resampled = {}, []
    for name, source in sources.items():
        before, now = tuple(there[source]), tuple(here[name])
        if name in spec.converted and (name != source or before != now):
            try:
                spec.convert(name, torch.empty(before, device="meta"), on_meta_there)
            except ModelError as error:
                raise UsageError(f"{weights.path}: {error}: {_REMEDY}") from None
            continue
        if name in spec.token_parameters:
            layout = _layout(weights, there, name, spec)
            wanted = _Layout(spec.token_parameters[name], spec.sizes.grid)
            if before[2:] == now[2:] and layout != wanted:
                layouts[name] = layout
                resampled.append(f"{name} ({layout} to {wanted} patches)")
                continue
        elif name == _PATCHES and len(before) == len(now) == 4 and before[0] == now[0]:
            if before != now:
                old, new = (
                    f"{channels} channels of {' x '.join(map(str, patch))}"
                    for _, channels, *patch in (before, now)
                )
                resampled.append(f"{name} ({old} to {new})")
            continue
        if before != now:
            raise UsageError(
                f"{source} has shape {before} in {weights.path}, {now} in the model: {_REMEDY}"
            )

    moved = [f"{name} from {at}" for name, at in sources.items() if name != at]
    note = f"initial weights of {weights.name or weights.path}: "
    note += f"{len(sources) - len(resampled) - len(moved)} tensors unchanged"
    for what, names in (
        ("resampled", resampled),
        ("moved", moved),
        ("dropped", dropped),
        ("new", missing),
    ):
        if names:
            note += f"; {what}: {listed(names, 2 * NAMED)}"
    if weights.note:
        note += f"; {weights.note}"
    use_ema = weights.kind == EMA
    # transformers resamples positions without antialiasing.
    antialiases = weights.described.content.get("model_type") is None
    return InitialWeights(
        weights.path, use_ema, spec, run.config.seed, sources, layouts, note, antialiases
    )


def _layout(
    weights: Weights, there: Mapping[str, torch.Size], name: str, spec: ModelSpec
) -> _Layout:
    """Return which tokens a position embedding is for: as the checkpoint says, else a grid of equal
    sides.

    Raises UsageError if none is found.
    """
    if weights.run:
        before = model_of(weights.run.model)
        return _Layout(before.token_parameters[name], before.sizes.grid)
    here, tokens = _Layout(spec.token_parameters[name], spec.sizes.grid), there[name][1]
    if tokens == here.prefix + math.prod(here.grid):
        return here
    special = sum(there[key][1] for key in ("cls_token", "reg_token") if key in there)
    for prefix in sorted({0, special}, key=lambda each: each != here.prefix):
        side = round(max(tokens - prefix, 0) ** (1 / len(here.grid)))
        if side and side ** len(here.grid) == tokens - prefix:
            return _Layout(prefix, (side,) * len(here.grid))
    shape = "square" if len(here.grid) == 2 else "cubic"
    raise UsageError(
        f"{name} of {weights.path} has {tokens} tokens, which do not form a {shape} grid of "
        "patches: use --init_from with a checkpoint, which records its grid"
    )


def _resample(
    positions: torch.Tensor, new: tuple[int, ...], old: tuple[int, ...], *, antialias: bool
) -> torch.Tensor:
    """Return positions, (1, patches, width), of another grid, as timm does for images; of a volume
    along the slices first, which is the same filter, as it has no terms across dimensions."""
    if len(old) == 3:
        slices, area = new[0], math.prod(old[1:])
        positions = resample_abs_pos_embed(
            positions, [slices, area], [old[0], area], num_prefix_tokens=0, antialias=antialias
        )
        # Each slice's positions are some of the width of an image.
        positions = positions.unflatten(1, (slices, area)).transpose(1, 2).flatten(2)
        positions = _resample(positions, new[1:], old[1:], antialias=antialias)
        return positions.unflatten(2, (slices, -1)).transpose(1, 2).flatten(1, 2)
    return resample_abs_pos_embed(
        positions, list(new), list(old), num_prefix_tokens=0, antialias=antialias
    )


@dataclass(frozen=True)
class InitialWeights:
    """How trained weights are adapted to another model. Contains none of them, so it can be sent to
    other processes."""

    path: Path
    use_ema: bool
    """Whether they are the EMA of the weights."""
    spec: ModelSpec
    seed: int
    sources: Mapping[str, str]
    """The source of each tensor that is used: its name among the weights, by its name in the
    model."""
    layouts: Mapping[str, _Layout]
    """The old layouts of position embeddings that are resampled, by name."""
    note: str
    """What is used, resampled, dropped and new, in one line."""
    antialiases_positions: bool = True
    """Whether position embeddings are resampled with antialiasing, as in timm."""

    @property
    def keeps_head(self) -> bool:
        """Whether the head of the weights is used, as its classes are those of the data."""
        return any(name.startswith(_HEAD) for name in self.sources)

    @functools.cached_property
    def weights(self) -> Weights:
        """The weights; each process maps them itself."""
        return weights_in(self.path, "--init_from", use_ema=self.use_ema)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "weights"}

    def _read_one(self, name: str) -> torch.Tensor | None:
        known = name in self.weights.shapes()
        return self.weights.read([name])[name] if known else None

    @torch.no_grad()
    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on the CPU and fill everything that is on meta below ``module``.

        Tensors that the weights do not have are initialized as in a new model. An
        ``InitializeModule``: only the weights of one unit are in memory at a time.
        """
        used: list[str] = []
        for full_name, part in list(on_meta(module, name)):
            own = [key for key, _ in part.named_parameters(prefix=full_name, recurse=False)]
            known = [key for key in own if key in self.sources]
            if known == own:
                allocate_own(part)  # no random values that are overwritten
            used += known
        self.spec.initialize(module, name, seed=self.seed)
        values = self.weights.read([self.sources[key] for key in used])
        here = dict(module.named_parameters(prefix=name))
        for key in used:
            found, shape = values.pop(self.sources[key]), here[key].shape
            if key in self.spec.converted and (key != self.sources[key] or found.shape != shape):
                found = self.spec.convert(key, found, self._read_one)
            elif key in self.layouts:  # a position embedding, (1, tokens, width)
                there = self.layouts[key]
                prefix, grid = self.spec.token_parameters[key], self.spec.sizes.grid
                first, patches = found.float().tensor_split([there.prefix], dim=1)
                if there.grid != grid:
                    patches = _resample(
                        patches, grid, there.grid, antialias=self.antialiases_positions
                    )
                if there.prefix != prefix:  # zeros have the effect of no embedding
                    first = first.new_zeros(1, prefix, first.shape[-1])
                found = torch.cat([first, patches], dim=1)
            else:
                if found.shape[2:] != shape[2:]:
                    found = resample_patch_embed(found.float(), list(shape[2:]))
                if key == _PATCHES and found.shape[1] != shape[1]:
                    found = adapt_input_conv(shape[1], found.float(), base_chans=found.shape[1])
            here[key].copy_(found)


# -- Teachers of a training run, resolved before any device starts ---------------------------------


def with_teacher(run: Run[Any], resolve: Callable[[RunConfig], Run[Any]]) -> Run[Any]:
    """Return the run with the run of its teacher, if it trains with one.

    ``resolve`` makes a run from a configuration, as the backend does. Raises UsageError for a
    teacher that cannot run this way, whose weights do not fit it, or whose images or classes differ
    from the student's.
    """
    config, name = run.config, run.config.loss.teacher
    if name is None or config.use.eval_only or config.use.features or config.self_check:
        return run
    if run.mesh.domain > 1:
        raise UsageError(
            f"--teacher is incompatible with --mesh_domain {run.mesh.domain}: drop one of the two"
        )
    assert config.loss.teacher_weights is not None  # --teacher requires it
    weights = weights_of_teacher(config.loss.teacher_weights, "--teacher_weights")
    objective, is_dino = config.objective, config.objective.has_teacher
    try:
        if weights.run is not None:  # a checkpoint records its model
            model = weights.run.model
            if model.model != name:
                raise UsageError(f"{weights.path} was trained with --model {model.model}")
            trained_for = weights.run.objective
            if is_dino and not trained_for.has_teacher:
                raise UsageError(
                    f"{weights.path} was trained with --objective {trained_for.objective}, not dino"
                )
            if is_dino:
                heads = {setting: getattr(trained_for, setting) for setting in HEAD_SETTINGS}
                objective = replace(objective, **heads)
        else:  # built for the student's images and classes
            channels, *spatial = run.model.sizes.input_shape
            model = ModelConfig(
                model=name,
                img_size=tuple(spatial),
                dimension=len(spatial) if len(spatial) > 2 else None,
                in_chans=channels,
                num_classes=run.model.sizes.num_classes,
            )
        # The teacher is not trained: no optimizer state and no gradients, sharded as ZeRO-3.
        teacher_config = replace(
            config,
            model=model,
            objective=objective,
            data=replace(config.data, mean=None, std=None),  # the weights' own
            loss=LossConfig(),
            ema=EmaConfig(),
            optimizer=replace(config.optimizer, linear_probe=False),
            checkpoints=replace(config.checkpoints, resume=str(weights.path), resume_epoch=0),
            sharding=replace(config.sharding, grad_ckpt="full", reshard_after_forward=True),
            explicitly_set=frozenset(),  # flags that are set are the student's
        )
        teacher_config = with_described_model(teacher_config, weights, keeps_head=not is_dino)
        teacher = resolve(with_preprocessing_of(weights, teacher_config)[1])
        weights.check_fits(teacher.model)
    except UsageError as error:
        raise UsageError(f"--teacher {name}: {error}") from None
    there, here = teacher.model.sizes, run.model.sizes
    if there.input_shape != here.input_shape:
        images, wanted = (" x ".join(map(str, each.input_shape)) for each in (here, there))
        raise UsageError(
            f"--teacher {name} takes images of {wanted} (channels first), the student {images}: "
            "train the student with the teacher's --image_size and --in_chans"
        )
    if is_dino:
        for flag in ("dino_prototypes", "ibot_prototypes"):
            if (asked := getattr(config.objective, flag)) != (has := getattr(objective, flag)):
                raise UsageError(
                    f"--{flag} {asked}: --teacher {name} has {has}: use the same number"
                )
        if there.grid != here.grid:
            grids = (" x ".join(map(str, each.grid)) for each in (there, here))
            raise UsageError(
                f"--teacher {name} has {next(grids)} patches, the student {next(grids)}, but the "
                "two are compared patch by patch: train the student with the teacher's "
                "--patch_size"
            )
    elif there.num_classes != here.num_classes:
        raise UsageError(
            f"--teacher {name} has {there.num_classes} classes, the student {here.num_classes}: "
            "use another teacher, or change --num_classes"
        )
    return replace(run, teacher=teacher)


def weights_of_teacher(path: str, flag: str) -> Weights:
    """Return the weights that ``flag`` names by ``path``; from a checkpoint of ``--objective
    dino``, those of its teacher. Raises UsageError if there are none."""
    found = weights_named(path, flag)
    if found.tensors is None and found.run and found.run.objective.has_teacher:
        found = replace(found, kind=EMA)
    return found


def gram_teacher(run: Run[Any]) -> InitialWeights:
    """Return the weights of ``--gram_weights``, adapted to the run's model.

    Raises UsageError if they do not exist or are of another model.
    """
    assert run.config.objective.gram_weights is not None
    found = weights_of_teacher(run.config.objective.gram_weights, "--gram_weights")
    try:
        with_described_model(run.config, found, keeps_head=False)  # compares it with the run's
        return fit(found, run, None)
    except UsageError as error:
        raise UsageError(f"--gram_weights: {error}") from None
