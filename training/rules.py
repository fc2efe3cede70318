"""Rules between flags: what a flag or a feature requires, excludes and replaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from training.config import RunConfig
from training.errors import UsageError
from training.feature_table import features
from training.flags import FlagField, by_field, flag_fields, flat, typed_if_set


def check_rules(config: RunConfig, *others: Any, only: Collection[str] | None = None) -> None:
    """Check the rules of all flags, and what features exclude. Raises UsageError. ``others``: the
    configurations of backends and tools. ``only``: the fields to check, if not all. Rules are about
    final values, so the fields checked must be resolved."""
    values, known = flat(config, *others), by_field(type(config), *map(type, others))
    for name, option in known.items():
        counts_at_default = option.flag.requires_at_default and name in config.explicitly_set
        passed_over = values[name] == option.field.default and not counts_at_default
        if passed_over or (only is not None and name not in only):
            continue
        typed = option.typed(values[name])
        for requirement in option.flag.requires:
            given = [text.partition("=")[::2] for text in requirement.split("|")]
            # An unknown field belongs to another backend than this run's.
            alternatives = [(n, wanted) for n, wanted in given if n in known]
            if not any(
                (str(values[n]) == wanted if wanted else values[n] != known[n].field.default)
                for n, wanted in alternatives
            ):
                texts = [f"{known[n].names[0]} {wanted}".rstrip() for n, wanted in alternatives]
                field, wanted = alternatives[-1]
                is_now = f", not {values[field]}" if wanted and len(texts) == 1 else ""
                required = " or ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)
                raise UsageError(f"{typed} requires {required}{is_now}")
        for other in option.flag.incompatible_with:
            if other in known and values[other] != known[other].field.default:
                excluded = known[other].typed(values[other])
                raise UsageError(f"{typed} is incompatible with {excluded}: drop one of the two")
        for other in option.flag.replaces:
            if other in config.explicitly_set:
                excluded = known[other].typed(values[other])
                raise UsageError(f"{typed} replaces {excluded}: drop one of the two")
    check_features(config, *others, only=only)


def check_features(config: RunConfig, *others: Any, only: Collection[str] | None = None) -> None:
    """Check what features exclude, and what requires one, as ``check_rules`` does. Raises
    UsageError."""
    options = by_field(type(config), *map(type, others)).items()
    names = {name: field for field, option in options for name in option.names}
    active = config.active_features
    for feature in features():
        if feature not in active:
            for name in feature.requires_it:
                if (only is None or names[name] in only) and typed_if_set(name, config):
                    raise UsageError(f"{name} requires {feature.turned_on_by[0]}")
            continue
        for words, why in feature.excludes.items():
            rule = {names.get(each.partition(" ")[0]) for each in (words, *feature.turned_on_by)}
            if only is not None and rule.isdisjoint(only):
                continue
            if typed := typed_if_set(words, config, *others):
                raise UsageError(feature.refusal(config, typed, why))


def check_declarations(configs: Iterable[type]) -> None:
    """Raise UsageError if a feature declares a flag or a choice that exists already, or names one
    that does not exist: nothing else would notice that a name is misspelled."""
    names: dict[str, FlagField] = {}
    known: dict[str, FlagField] = {}
    for option in (option for config in configs for option in flag_fields(config)):
        if taken := [name for name in option.names if name in names]:
            raise UsageError(f"the flag {taken[0]} is declared twice: rename the extension's")
        if twice := [word for word in option.choices if option.choices.count(word) > 1]:
            raise UsageError(f"{option.names[0]} has two choices {twice[0]}: rename one")
        names |= dict.fromkeys(option.names, option)
        known[option.field.name] = option
    for feature in features():
        _check_feature(feature, names, known)


def _check_feature(
    feature: Any, names: Mapping[str, FlagField], known: Mapping[str, FlagField]
) -> None:
    """Raise UsageError if the feature names flags, fields or words that do not exist. ``names``:
    flags by all their names; ``known``: by field."""
    who = type(feature).__name__
    for field in feature.choices:
        if field not in known:
            raise UsageError(f"{who}.choices has {field}, but no flag has this field")
    for attribute in ("turned_on_by", "requires_it", "excludes", "ignores"):
        for words in getattr(feature, attribute):
            name, _, word = words.partition(" ")
            words_of = names[name].choices if name in names else ()
            if name not in names or (word and words_of and word not in words_of):
                raise UsageError(f"{who}.{attribute} has {words}, but there is no such flag")
    for field, attribute in (("data_source", "sources"), ("optimizer", "optimizers")):
        for word in getattr(feature, attribute):
            if word not in known[field].choices:
                raise UsageError(
                    f"{who}.{attribute} has {word}: add it to {who}.choices, with what it means"
                )
    own = [each for each in (feature.model_flags, feature.flags) if each]
    for option in (option for flags in own for option in flag_fields(flags)):
        for condition in "|".join(option.flag.requires).split("|"):
            field = condition.partition("=")[0]
            if field and field not in known:
                raise UsageError(f"{option.names[0]} requires {field}, but no flag has this field")
