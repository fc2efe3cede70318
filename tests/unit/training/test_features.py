"""The table of features: what they declare is there, and a feature that nobody knows takes part."""

import math
import pickle
import re
import typing
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from config_fields import flag, positive
from data.batch import PADDING, Field
from data.config import DataConfig
from data.source import DatasetRequest, View
from models.config import ModelError
from models.spec import ModelSpec
from run_vit_training import CONFIGS, read_flags
from tests.support.cli import TINY_MODEL
from tests.support.measures import add_batch
from tests.support.resolved import on_xla
from training import feature_table
from training.config import RunConfig
from training.data import opener_of
from training.errors import UsageError
from training.feature import Feature
from training.feature_table import features, set_added_features
from training.flags import by_field, flag_fields, flat, from_values
from training.logs.records import Evaluation
from training.objectives.base import MeanLoss
from training.rules import check_rules

pytestmark = pytest.mark.fast

EVERY = by_field(*CONFIGS.values())
BY_NAME = {name: o for o in EVERY.values() for name in o.names}


def names_of(words):
    return [each.partition(" ")[0] for each in words]


def test_declarations_name_flags():
    for feature in features():
        declared = (*feature.turned_on_by, *feature.requires_it, *feature.excludes)
        assert {*names_of(declared), *feature.ignores} <= BY_NAME.keys(), feature
        for words in (*feature.turned_on_by, *feature.excludes):
            name, _, value = words.partition(" ")
            assert not value or value.endswith("*") or value in BY_NAME[name].choices, words
        assert feature.choices.keys() <= EVERY.keys()


def test_no_flag_excludes_a_feature():
    """It is the feature that says so, once."""
    switches = {BY_NAME[name].field.name for f in features() for name in names_of(f.turned_on_by)}
    # The core's own, among them.
    switches -= {"objective", "model", "in_chans", "labels", "features", "knn", "probe", "rank"}
    for option in EVERY.values():
        assert switches.isdisjoint(option.flag.incompatible_with), option.names[0]


def set_to(words, by=()):
    """The values, by field, that set a flag as ``words`` say, with the first that it requires."""
    name, _, wanted = words.partition(" ")
    option = BY_NAME[name]
    wanted = re.sub(r"\[(.).*?\]", r"\1", wanted)  # [02]* as 0*
    value = wanted or next((c for c in option.choices if c != option.field.default), 7)
    if option.is_switch:
        value = not option.field.default
    elif wanted and typing.get_origin(option.type) is list:
        value = [wanted]
    values = {option.field.name: value}
    for requirement in option.flag.requires:
        field, _, needed = requirement.split("|")[0].partition("=")
        if field not in by:  # two may require each other
            words = f"{EVERY[field].names[0]} {needed}".strip()
            values = set_to(words, (*by, option.field.name)) | values
    return values


@pytest.mark.parametrize(
    ("feature", "excluded"),
    [(feature, excluded) for feature in features() for excluded in feature.excludes],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_a_feature_excludes(feature, excluded):
    on, off = set_to(feature.turned_on_by[0]), set_to(excluded)
    configs = [from_values(each, on | off) for each in CONFIGS.values()]
    only = {BY_NAME[names_of([excluded])[0]].field.name}
    with pytest.raises(UsageError, match="is incompatible with") as refused:
        check_rules(*configs, only=only)
    told = str(refused.value)
    assert names_of([excluded])[0] in told
    assert feature.shown(configs[0]) in told
    assert feature.excludes[excluded] in told
    assert "\n" not in told
    check_rules(*(from_values(each, off) for each in CONFIGS.values()), only=only)


@pytest.mark.parametrize(
    "words",
    [
        "--objective mae --decoder_depth 1 --decoder_embed_dim 16 --decoder_num_heads 2",
        "--objective dino --class_token --local_crop_size 8",
        "--objective siglip --projection_dim 8",
    ],
)
def test_parameters_are_what_a_feature_adds_to_the_model(words):
    ours = {name for name, _ in resolved(*words.split()).model.meta.named_parameters()}
    plain = resolved("--class_token").model.meta.named_parameters()
    added = {name for name in ours - {name for name, _ in plain} if name != "fc_norm"}
    (prefixes,) = (f.parameters for f in features() if f.parameters and f.turned_on_by[0] in words)
    assert {name for name in added if not name.startswith(prefixes)} == set()
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in added), prefix


# -- one that nobody knows --------------------------------------------------------------------


@dataclass(frozen=True)
class StrangeConfig:
    group: ClassVar[str] = "strange"

    strangeness: int = flag(0, "how strange; 0: not at all", kind=positive)
    strange_names: list[str] | None = flag(None, "names", requires=("strangeness",))


class Strange(Feature):
    flags = StrangeConfig
    turned_on_by = ("--strangeness",)
    excludes = {"--mixup": "strangers do not mix", "--plan": ""}  # noqa: RUF012
    ignores = ("--vflip",)

    def resolve_flags(self, config):
        return config.with_flags(replace(config.of(StrangeConfig), strange_names=["a"]))

    def resolve_mesh(self, config, mesh):
        assert config.of(StrangeConfig).strange_names == ["a"]
        return replace(config, num_epochs=mesh.devices)

    def extend_model(self, spec: ModelSpec, config):
        if spec.sizes.depth == 3:
            raise ModelError("<depth> 3 is too strange")
        return spec

    def resolve_model(self, config, model):
        return replace(config, seed=model.sizes.depth)

    def check(self, run):
        if run.config.data.batch_size == 48:
            raise UsageError("--batch_size 48 is not strange")


@pytest.fixture
def strange(monkeypatch):
    monkeypatch.setattr(feature_table, "_added", [])
    # Or a command line without --extension removes it.
    monkeypatch.setattr("training.extensions.use_extensions", lambda names: None)
    set_added_features([Strange])
    yield
    monkeypatch.undo()
    features.cache_clear()


def resolved(*words):
    base = [*TINY_MODEL, "--batch_size", "16", "--cpu_devices", "2"]
    return on_xla([*map(str, base), *words])


def test_a_feature_of_ones_own_takes_part(strange, capsys):
    before = [option.field.name for option in flag_fields(CONFIGS["run"])]
    assert before[-2:] == ["strangeness", "strange_names"]  # a group of its own
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--help", "strange"])
    assert "--strangeness N" in capsys.readouterr().out
    assert flat(read_flags(["--strangeness", "2"]).run)["strangeness"] == 2

    run = resolved("--strangeness", "2")
    assert run.config.of(StrangeConfig) == StrangeConfig(2, ["a"])
    assert (run.config.num_epochs, run.config.seed) == (2, 2)
    assert run.values["strange_names"] == ["a"]
    assert from_values(type(run.config), run.values).of(StrangeConfig).strangeness == 2
    assert resolved().config.of(StrangeConfig).strange_names is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mixup 1", "--strangeness 2 is incompatible with --mixup 1.0 (strangers do not mix): "),
        ("--vflip 1", "--vflip 1.0 has no effect with --strangeness 2: drop it, or append --vflip"),
        ("--num_blocks 3", "--num_blocks 3 is too strange"),
        ("--batch_size 48", "--batch_size 48 is not strange"),
    ],
)
def test_what_it_refuses_is_told(words, told, strange):
    with pytest.raises(UsageError) as refused:
        resolved("--strangeness", "2", *words.split())
    assert str(refused.value).startswith(told)
    resolved(*words.split())


# -- what an objective of ones own is given ------------------------------------------------------


def test_mean_loss_leaves_out_padding():
    one_device = SimpleNamespace(sum=lambda values: values)
    losses = {0: [1.0, 4.0], 1: [7.0, math.nan]}  # the last is padding

    def alone(number, batch):
        return torch.tensor(losses[number])

    def with_another(number, batch):
        return {"loss": alone(number, batch), "half": alone(number, batch) / 2}

    for function, means in ((alone, {}), (with_another, {"half": 2.0})):
        measure = MeanLoss(function, one_device)
        for number, index in ((0, [0, 1]), (1, [2, PADDING])):
            add_batch(measure, number, {"index": torch.tensor(index)})
        found = measure.result()
        assert found == Evaluation(4.0, images=3, means=means)
        assert found.values == {
            "val_loss": 4.0,
            "val_images": 3,
            **{f"val_{name}": value for name, value in means.items()},
        }
    assert str(found) == "val loss: 4.0000, half: 2.0000 of 3 images"
    assert not MeanLoss(alone, one_device).result().images


def test_noise_is_drawn_from_the_values_that_a_field_may_have():
    fields = {
        "id": Field((1000,), torch.int64, below=7),
        "mask": Field((1000,), torch.bool),
        "unknown": Field((2,), torch.int32),
    }
    noise = View().noise(None, fields, 0, torch.Generator().manual_seed(0))
    assert {name: values.dtype for name, values in noise.items()} == {
        name: each.dtype for name, each in fields.items()
    }
    assert noise["id"].unique().tolist() == list(range(7))
    assert 300 < noise["mask"].sum() < 700
    assert noise["unknown"].tolist() == [0, 0]


def test_a_source_that_keeps_its_request_reaches_loader_processes(monkeypatch):
    """Of a server, which get a copy: by pickle."""
    requests = []
    feature = next(each for each in features() if "captioned_mosaics" in each.sources)
    monkeypatch.setitem(feature.sources, "captioned_mosaics", requests.append)
    config = RunConfig(data=DataConfig(data_source="captioned_mosaics"))
    open_source = opener_of(config)
    open_source(DatasetRequest(config.data, 3, (24, 24), 1, 0, opened_by=open_source))
    (copied,) = pickle.loads(pickle.dumps(requests))
    assert copied.config == config.data
