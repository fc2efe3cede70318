"""The order of class folders, and so their labels: sorted, natural, or that of a file."""

import os
import re
from collections import Counter

from data import files
from data.files import DataFolderError, first_of, reason_of


def in_order(
    folders: list[str], class_order: str | None = None, class_map: str | None = None
) -> list[str]:
    """Return the sorted class folders ``folders`` in label order: that of the file ``class_map``,
    else ``class_order``. Raises DataFolderError for an unusable file."""
    if class_map is None:
        if class_order != "natural":
            return folders

        def natural_key(name: str) -> list[str | int]:  # as timm.utils.misc.natural_key
            return [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", name.lower())]

        return sorted(folders, key=natural_key)
    try:
        with open(class_map, encoding="utf-8-sig", opener=files.regular) as file:
            files.TEXT.check(os.fstat(file.fileno()).st_size)
            names = [line.strip() for line in file.read().rstrip().split("\n")]
    except (OSError, ValueError) as error:  # also for text that is not UTF-8
        raise DataFolderError(f"--class_map {class_map}: {reason_of(error)}") from None
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DataFolderError(
            f"--class_map {class_map} contains {name or 'an empty line'} {times} times: remove "
            "the duplicates"
        )
    if missing := sorted(set(folders) - set(names)):
        raise DataFolderError(
            f"--class_map {class_map} lacks classes of the images: {first_of(missing)}; add "
            "a line with the name of each class"
        )
    return names
