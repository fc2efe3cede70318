"""Which images of a table are for validation, if no column says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from data.batch import class_counts


def choose_validation(
    names: Sequence[str],
    labels: np.ndarray,
    groups: Sequence[str] | None,
    fraction: float,
    seed: int,
) -> np.ndarray:
    """Return which images are for validation, (images,), bool: about ``fraction`` of each class.

    Images of the same of ``groups``, such as a patient's, stay together; without groups, each image
    is one of its own, by ``names``. ``labels``: as of ``class_counts``.

    A group counts to the rarest class among its labels. The groups of a class are ordered by
    XXH3-64 of "SEED/GROUP", and each is taken if at least half of its images fit into ``fraction``
    of the class. Of several groups at least one is for validation, the first of the smallest, and
    at least one is not. Groups with all images of another class are for training, too. So the
    result depends neither on the order of the images nor on the folder that they are in.
    """
    members: dict[str, list[int]] = {}
    for number, group in enumerate(names if groups is None else groups):
        members.setdefault(group, []).append(number)
    is_val = np.zeros(len(names), bool)
    if fraction == 1:
        return ~is_val
    rarity = np.argsort(np.argsort(class_counts(labels), kind="stable"))  # the rank of each class
    if labels.ndim > 1:
        ranks = np.where(labels > 0, rarity, len(rarity)).min(axis=1, initial=len(rarity))
    else:
        ranks = rarity[labels]
    by_class: dict[int, list[str]] = {}
    for group, numbers in members.items():
        by_class.setdefault(int(ranks[numbers].min()), []).append(group)

    def place(group: str) -> tuple[int, str]:
        text = f"{seed}/{group}".encode(errors="surrogateescape")
        return xxhash.xxh3_64_intdigest(text), group

    for in_class in by_class.values():
        in_class.sort(key=place)
        most = fraction * sum(len(members[group]) for group in in_class)
        chosen, taken = list[str](), 0
        for group in in_class:
            size = len(members[group])
            if len(chosen) < len(in_class) - 1 and taken + size / 2 <= most:
                chosen.append(group)
                taken += size
        if not chosen and len(in_class) > 1:
            chosen.append(min(in_class, key=lambda group: len(members[group])))
        for group in chosen:
            is_val[members[group]] = True

    # A class must not be learned from no image.
    for label in np.argsort(rarity):
        of_class = labels[:, label] > 0 if labels.ndim > 1 else labels == label
        if of_class.any() and is_val[of_class].all():
            for group, numbers in members.items():
                if of_class[numbers].any():
                    is_val[members[group]] = False
    return is_val
