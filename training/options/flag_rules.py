"""Looks at configurations as flags: their names, which need which, their plain values."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from config_fields import Flag, flag_of
from training.errors import UsageError
from training.plan.config import PlanConfig

if TYPE_CHECKING:
    from training.options.config import RunConfig


@dataclass(frozen=True)
class Option:
    """A field that is a flag, with what its type says of it."""

    field: dataclasses.Field
    flag: Flag
    type: Any
    """The type of the field's value without None: ``int`` for ``int | None``."""
    group: str
    """The title of the group in ``--help`` that it belongs to."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.flag.names or (f"--{self.field.name}",)

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def has_negation(self) -> bool:
        """Tell whether there is ``--no-x`` beside ``--x``: for what is on, or decided by the
        program, by default."""
        turned_off = self.names[0].startswith("--no_") and self.field.default is True
        return self.is_switch and self.field.default is not False and not turned_off

    @property
    def switch_names(self) -> dict[str, bool]:
        """Return a switch's names, with what each sets."""
        names = dict.fromkeys(self.names, self.field.default is not True or self.has_negation)
        if self.has_negation:
            names |= {f"--no-{name.removeprefix('--')}": False for name in self.names}
        return names

    @property
    def bare_names(self) -> dict[str, Any]:
        """Return the names that take no value, with what each sets."""
        return {**(self.switch_names if self.is_switch else {}), **self.flag.shorthands}

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*dict.fromkeys([*self.names, *self.bare_names]),)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the words that can be given; none where it is not one of a few."""
        of_type = (
            typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()
        )
        return self.flag.choices or of_type

    def typed(self, value: Any) -> str:
        """Return how a person gives the field this value, for messages."""
        return " ".join(self.words(value))

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that give the field this value."""
        if isinstance(value, (list, tuple)):
            words = list(map(str, value))
            joined = ":" in (self.flag.metavar or "")
            return [self.names[0], *([":".join(words)] if joined else words)]
        if not self.is_switch:
            return [self.names[0], str(value)]
        if self.has_negation and value is False:
            return [f"--no-{self.names[0].removeprefix('--')}"]
        return [self.names[0]]


def options(config: type) -> Iterator[Option]:
    """Yield the flags of a configuration's class and of those nested in it, in their order.

    Its class attribute ``group`` is their group's title in ``--help``.
    """
    hints = typing.get_type_hints(config)
    nested = []
    for field in dataclasses.fields(config):
        kind, told = hints[field.name], flag_of(field)
        if dataclasses.is_dataclass(kind):
            nested.append(kind)
        elif told:
            is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
            parts = typing.get_args(kind) if is_union else (kind,)
            plain = next(part for part in parts if part is not type(None))
            yield Option(field, told, plain, config.group)  # type: ignore[attr-defined]
    for each in nested:
        yield from options(each)  # type: ignore[arg-type]


def by_field(*configs: type) -> dict[str, Option]:
    """Return the flags of several configurations by their fields' names."""
    return {option.field.name: option for config in configs for option in options(config)}


# -- instances as plain values, and back ------------------------------------------------


def flat(*configs: Any) -> dict[str, Any]:
    """Return the values of configurations, and of those nested in them, by fields' names."""
    values: dict[str, Any] = {}
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                values |= flat(value)
            elif flag_of(field):
                values[field.name] = value
    return values


def from_values(config: type, values: Mapping[str, Any]) -> Any:
    """Make a configuration of the values that ``flat`` or JSON has of it, and of the defaults.

    Names that it does not know are passed over.
    """
    known, hints = {o.field.name: o for o in options(config)}, typing.get_type_hints(config)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            chosen[field.name] = from_values(hints[field.name], values)
        elif field.name in values:
            value, option = values[field.name], known.get(field.name)
            is_tuple = option and (typing.get_origin(option.type) is tuple or option.flag.several)
            chosen[field.name] = tuple(value) if is_tuple and isinstance(value, list) else value
    return config(**chosen)


# -- what goes with what ----------------------------------------------------------------


def check_needs(config: RunConfig, own: Any) -> None:
    """Raise UsageError for a flag that was given without what it needs, or with what it excludes.

    The configurations must be resolved: conditions are on final values.
    """
    values, known = flat(config, own), by_field(type(config), type(own))
    for name, option in known.items():
        if values[name] != option.field.default:
            _check_one(option, values, known, config.given)


_PLANNING = tuple(field.name for field in dataclasses.fields(PlanConfig))


def check_switches(config: RunConfig, *own: Any) -> None:
    """Raise UsageError where flags that choose what the program does lack what they need or exclude
    each other; this comes before anything is resolved."""
    values, known = flat(config, *own), by_field(type(config), *map(type, own))
    for name in (
        "predict",
        "json",
        "use_ema",
        "eval_report",
        "resume_epoch",
        "init_from",
        "self_check",
        "plan",
        "teacher",
        "tpu_topology",
        "explain",
        "hlo_dir",
        *_PLANNING,
    ):
        if values[name] != known[name].field.default:
            _check_one(known[name], values, known, config.given)


def _check_one(
    option: Option,
    values: Mapping[str, Any],
    known: Mapping[str, Option],
    given_fields: Collection[str],
) -> None:
    given = option.typed(values[option.field.name])
    for condition in option.flag.needs:
        alternatives = condition.split("|")
        if not any(_holds(each, values, known) for each in alternatives):
            raise UsageError(f"{given} needs {_needed(alternatives, values, known)}")
    for other in option.flag.conflicts:
        if other in known and values[other] != known[other].field.default:
            excluded = known[other].typed(values[other])
            raise UsageError(f"{given} does not go with {excluded}: drop one of the two")
    for other in option.flag.instead_of:
        if other in given_fields:
            excluded = known[other].typed(values[other])
            raise UsageError(f"{given} takes the place of {excluded}: drop one of the two")


def _holds(condition: str, values: Mapping[str, Any], known: Mapping[str, Option]) -> bool:
    name, asks_value, wanted = condition.partition("=")
    if name not in known:  # of a backend that this run is not on
        return False
    if asks_value:
        return str(values[name]) == wanted
    return values[name] != known[name].field.default


def _needed(alternatives: list[str], values: Mapping[str, Any], known: Mapping[str, Option]) -> str:
    texts = []
    for condition in alternatives:
        name, asks_value, wanted = condition.partition("=")
        texts.append(known[name].names[0] + (f" {wanted}" if asks_value else ""))
    if len(texts) > 1:
        return f"{', '.join(texts[:-1])} or {texts[-1]}"
    return texts[0] + (f", this is {values[name]}" if asks_value else "")


def check_foreign(others: Mapping[str, Any], backend: str, given: Collection[str]) -> None:
    """Raise UsageError for a flag of another backend than ``backend``: it would do nothing.

    ``others`` are the configurations of all backends by their names, ``given`` the fields whose
    flags were given: the environment may be made for several programs. The default does no harm.
    """
    for owner, config in others.items():
        if owner == backend:
            continue
        for option in options(type(config)):
            name = option.field.name
            if name in given and getattr(config, name) != option.field.default:
                raise UsageError(f"{option.names[0]} needs --backend {owner}, this is {backend}")
