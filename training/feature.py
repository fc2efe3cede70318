"""The base class of features: optional parts of the program, each in one place (``features/``).

A feature owns its flags, what it excludes, its own choices and checks, and what it adds to the
model and to the training. The program asks the features of a table (``training/feature_table.py``)
and names none of them. A feature answers the questions that concern it:

    class Doubled(Feature):
        flags = DoubledConfig
        turned_on_by = ("--doubled",)
        excludes = {"--mesh_domain": "it needs whole images"}

        def check(self, run: Run) -> None:
            if run.config.data.batch_size % 2:
                raise UsageError("--doubled requires an even --batch_size")

Methods raise ``UsageError`` for a user's mistake: one line that names the flags and the mend. They
must give the same result in every process. They are called only if the feature is on, and may be
called more than once: on other numbers of devices, and for the run of a teacher. Modules of
features import nothing heavy, such as PyTorch, at the top: ``--help`` imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.config import RunConfig
from training.flags import typed_if_set
from training.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from data.loader import GlobalBatchSampler
    from data.source import DatasetRequest, DataSource, Split, View
    from models.spec import ModelSpec
    from training.evaluation.predict import Evaluated, Predictor
    from training.evaluation.report import Report
    from training.loop import Hook, Training
    from training.objectives.base import Measure
    from training.resolve import Run
    from training.weights.adapt import PartWeights
    from training.weights.source import Source


@dataclass(frozen=True)
class SmallSizes:
    """Sizes of the run of ``--self_check``, which has the same parts as the user's run."""

    width: int
    heads: int
    depth: int
    """The largest number of blocks of a stack."""
    classes: int
    patch_size: int
    grid: tuple[int, ...]
    """Number of patches along each spatial dimension."""
    images: int
    """Images per device and pass."""


class Feature:
    """An optional part of the program. By default it is never on, and changes nothing."""

    # -- declarations

    flags: ClassVar[type | None] = None
    """A frozen dataclass of its flags (``config_fields.flag``), with the title of their ``group``
    in ``--help``; they follow the field ``after``, if the class has one. ``RunConfig.of`` returns
    its values."""
    model_flags: ClassVar[type | None] = None
    """As ``flags``: those that are arguments of the model, as ``ModelConfig``'s. If it is on, those
    that are set are passed to ``models.registry.open_model``."""
    turned_on_by: ClassVar[tuple[str, ...]] = ()
    """The flags that turn it on, such as "--buckets", "--objective NAME" or "--model FAMILY/*": one
    is enough. Choices that the program makes turn no feature on or off."""
    requires_it: ClassVar[tuple[str, ...]] = ()
    """Flags that have no meaning without it, where ``flag``'s ``requires`` cannot say so."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """The flags that it is incompatible with, such as "--mesh_domain", "--grad_ckpt auto", or those
    of tools ("--plan", "--self_check", "--compile_only"), and why; "" if the names say it."""
    ignores: ClassVar[tuple[str, ...]] = ()
    """Flags of images that would have no effect with it, and are refused for that reason."""
    choices: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """What it adds to the choices of other flags: by field, each new word and what it means."""
    uses_labels: ClassVar[bool] = False
    """Whether the objective that it adds needs labels: the field ``target`` in training."""
    has_teacher: ClassVar[bool] = False
    """Whether the objective that it adds trains a second model, the moving average of the first."""
    multi_label: ClassVar[bool] = False
    """Whether images have several labels with it: ``DatasetRequest.multi_label``."""
    objective: ClassVar[str] = ""
    """Module and class of the ``Objective`` (``training/objectives/base.py``) of runs with it, as
    "package.module:Class", imported on use; "": the same as without it."""
    takes_arranged: ClassVar[bool] = False
    """Whether the objective that it adds, and its part of the model, take images in the
    arrangements of other features (``arranged``)."""
    sources: ClassVar[Mapping[str, Callable[[DatasetRequest], DataSource]]] = {}
    """Sources that it adds to the choices of ``--data_source``: the function that opens each."""
    optimizers: ClassVar[Mapping[str, str]] = {}
    """Optimizers that it adds to the choices of ``--optimizer``: the subclass of ``Elementwise``
    (``training/optimizer_rules.py``) of each, as "package.module:Class", imported on use."""
    families: ClassVar[Mapping[str, str]] = {}
    """Model families that it adds to ``--model``: the module of each, with ``names`` and
    ``open_model`` as ``models/hybrid_vit.py`` has them, by the prefix of its models' names."""
    loss_label: ClassVar[str] = "loss"
    """What the loss of the objective that it adds is called in plots."""
    percentages: ClassVar[Mapping[str, str]] = {}
    """The percentages that its evaluations add to the curves of the validation accuracy: by metric
    name, what the legend calls them."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """What reports call the measurements of the objective that it adds (``Objective.parts``), in
    their order: by metric name."""
    parameters: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters that it adds to the model, besides "head_". Weights of a
    backbone lack them, and ``--freeze_backbone_epochs`` trains them."""
    order_flags: ClassVar[tuple[str, ...]] = ()
    """The fields of its flags that decide the order of the training images, which must not change
    in the middle of an epoch."""
    weight_formats: ClassVar[tuple[str, ...]] = ()
    """Formats of other programs' weights that it adds: the subclass of ``WeightFormat``
    (``training/weights/formats.py``) of each, as "package.module:Class", imported on use."""
    saved_with_weights: ClassVar[bool] = False
    """Whether weights are useless without its flags: they are taken over from a checkpoint, as
    those of the model, unless they are set."""

    def is_on(self, config: RunConfig) -> bool:
        """Return whether the flags turn it on; an override may add conditions to ``turned_on_by``
        that no flag in messages stands for, such as the data source."""
        return any(typed_if_set(words, config) for words in self.turned_on_by)

    # -- in messages

    def shown(self, config: RunConfig) -> str:
        """Return its name in messages: what turned it on."""
        typed = (typed_if_set(words, config) for words in self.turned_on_by)
        return next(filter(None, typed))

    def refusal(self, config: RunConfig, typed: str, why: str) -> str:
        """Return the message if ``excludes`` has the flag that is ``typed``, for this reason."""
        reason = f" ({why})" if why else ""
        return f"{self.shown(config)} is incompatible with {typed}{reason}: drop one of the two"

    # -- choices and checks, in the order in which a run is resolved

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        """Make its choices, and check its flags, as far as neither the model nor devices matter."""
        return config

    def resolve_mesh(self, config: RunConfig, mesh: Mesh) -> RunConfig:
        """Make the choices that depend on the number of devices."""
        return config

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        """Return the model with what it adds to it. Raises ModelError if that is impossible."""
        return spec

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        """Make the choices, and the checks, that depend on the model."""
        return config

    def check(self, run: Run) -> None:
        """Check what depends on the model and on the devices, such as the images of each."""

    def check_data(self, run: Run, data: DataSource) -> Any:
        """Check what depends on the data, or on files such as weights, and return what its hooks
        need of that (``Training.opened``). Called before a training starts its devices."""

    def of_weights(self, config: RunConfig, weights: Source) -> RunConfig:
        """Return the configuration with the values of its flags that are known of the weights of
        ``--init_from``, or of another program's. Called before other choices; raises UsageError for
        flags that say otherwise."""
        return config

    def part_weights(self, run: Run) -> Sequence[PartWeights]:
        """Return the weights of parts of the model that a new training does not take from
        ``--init_from``."""
        return ()

    # -- the teacher (``--teacher``) of a run with the objective that it adds

    def of_teacher(self, config: RunConfig, saved: RunConfig | None) -> RunConfig:
        """Return the teacher's configuration, given one with the student's flags. ``saved``: that
        of the run that made the teacher's weights, if they are a checkpoint."""
        return config

    def check_teacher(self, run: Run, teacher: Run) -> None:
        """Check that the student of ``run`` can be compared with this teacher."""

    # -- the use of a trained model

    def evaluated(self, run: Run) -> Evaluated | None:
        """Open and return what ``--eval_only`` measures in place of the objective on val/; None:
        nothing else."""
        return None

    def report(self, measure: Measure, split: Split) -> Report | None:
        """Return the report of ``--eval_report`` on a validation split in the first process; None
        in the others, or if ``measure`` is not of the objective that it adds. All processes call
        it."""
        return None

    def predictor(self, run: Run) -> Predictor | None:
        """Return what ``--predict`` computes with a model of the objective that it adds; None:
        nothing."""
        return None

    def output_features(self, output: Any) -> Mapping[str, Tensor]:
        """Return what ``--features`` may write of the model's output, (images, width) each, by the
        words that it adds to the choices of ``--features_of``."""
        return {}

    # -- the training

    def view(self, run: Run, *, augment: bool) -> View | None:
        """Return what is read of each image, with ``augment`` in training, otherwise in evaluation;
        None: the same as without it."""
        return None

    def arranged(self, run: Run, view: View, *, augment: bool) -> View:
        """Return the view that reads what ``view`` does, its images in another arrangement, such as
        several sizes or sequences (``data.images.ArrangedView``); by default as they are.
        ``augment``: see ``view``. Of objectives that features add, only those that declare
        ``takes_arranged`` can be trained with it."""
        return view

    def sampler(self, run: Run) -> Callable[..., GlobalBatchSampler] | None:
        """Return what orders the training images (``DatasetRequest.sampler``); None: the same as
        without it. Its flags belong into ``order_flags``."""
        return None

    def hooks(self, training: Training) -> Sequence[Hook]:
        """Return what is called around each step: after the logs, and before anything that stops
        training or saves."""
        return ()

    def evaluations(self, training: Training) -> Sequence[Hook]:
        """Return hooks that evaluate the model: called last, after checkpoints are saved."""
        return ()

    def train_flops(self, run: Run, model: ModelSpec, flops: float) -> float:
        """Return the FLOPs of one image, for MFU, given those counted without the feature; those of
        the whole model are ``model.train_flops_per_image``."""
        return flops

    def schedules(
        self, config: RunConfig, steps_per_epoch: int, total_steps: int
    ) -> Mapping[str, Any]:
        """Return fields of ``training.schedule.Schedule`` for a training of ``total_steps``."""
        return {}

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        """Return the configuration for the run of ``--self_check``: with the same parts, but small,
        and without what depends on random numbers."""
        return config
