"""A small hospital: X-rays of 12 bits, PNG and DICOM, of five findings and many patients."""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from tests.support.deep_files import dicom, png_of_16_bits

FINDINGS = {"normal": 120, "pneumonia": 60, "effusion": 40, "mass": 25, "nodule": 16}
"""The number of images of each, which look like a digit."""
SITES = ("north", "south", "west")
"""PNG files of 16 bits; DICOM files, in which bright is bright; DICOM files in which it is dark."""
COLUMNS = ["image_id", "finding", "patient_id", "site"]


def open_hospital(folder: Path) -> list[dict[str, str]]:
    """Write images/ and labels.csv; return the rows of the table.

    Patients have one to four images at one site, mostly of the same finding. There are no folders
    of classes, and neither the extension nor the split is in the table.
    """
    random, found = np.random.default_rng(7), load_digits()
    left = [
        (finding, image)
        for digit, (finding, count) in enumerate(FINDINGS.items())
        for image in found.images[found.target == digit][:count]
    ]
    moved = random.permutation(len(left))[: len(left) // 4]  # patients with two findings
    for one, other in zip(moved, random.permutation(moved), strict=True):
        left[one], left[other] = left[other], left[one]
    (folder / "images").mkdir(parents=True)
    rows = []
    for patient in range(len(left)):
        site = SITES[patient % 3]
        for visit in "abcd"[: random.integers(1, 5)]:
            if not left:
                break
            finding, image = left.pop()
            name = f"p{patient:03}_{visit}"
            values = np.kron(image, np.ones((4, 4))) * 240 + random.integers(0, 200, (32, 32))
            _write(folder / "images" / name, values.clip(0, 4095).astype(np.uint16), site)
            rows.append(dict(zip(COLUMNS, (name, finding, f"p{patient:03}", site), strict=True)))
    random.shuffle(rows)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return rows


def _write(path: Path, values: np.ndarray, site: str) -> None:
    if site == "north":
        path.with_suffix(".png").write_bytes(png_of_16_bits(values))
        return
    window = {"WindowCenter": 2048, "WindowWidth": 4096}
    how = {"colors": "MONOCHROME1"} if site == "west" else {}
    stored = 4095 - values if site == "west" else values
    path.with_suffix(".dcm").write_bytes(dicom(stored, 12, **how, **window))
