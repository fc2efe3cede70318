"""A table of images: files as people have them, the split, and what cannot be used."""

import collections
import itertools

import numpy as np
import pandas
import pytest
import xxhash
from PIL import Image

from data.batch import BatchShard
from data.config import DataConfig
from data.files import DataFolderError
from data.image_table import read_table
from data.open import open_data
from data.table_split import choose_validation
from features.table_split import split_rows, store_split
from tests.support.loading import arguments, check_same_epochs, wanted

pytestmark = pytest.mark.fast

FILES = {"cats/a.png": "cat", "cats/b.JPG": "cat", "dogs, old/c.png": "dog", "d.v2.png": "dog"}
"""Images by path, and their labels."""
SPLIT = dict(zip(FILES, ("train", "val", "train", "val"), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for number, path in enumerate(FILES):
        (root / path).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / path)
    (root / "notes.txt").write_text("no image")
    return root


def frame(**changes):
    return pandas.DataFrame({"path": [*FILES], "label": FILES.values(), "split": SPLIT.values()})


def read(root, file, *, labels=True, multi_label=False, **flags):
    config = DataConfig(data_dir=str(root), labels=str(file), **flags)
    return read_table(config, labels=labels, multi_label=multi_label)


def found(root, file, **flags):
    """The split and the class of each path below ``root``."""
    there = {}
    for split, index in read(root, file, **flags).items():
        for path, label in zip(index.paths, index.labels, strict=True):
            there[path.removeprefix(f"{root}/")] = (split, index.classes[label])
    return there


EXPECTED = {path: (SPLIT[path], label) for path, label in FILES.items()}


# -- files as people have them ------------------------------------------------------------


def quoted(path):
    return f'"{path}"' if "," in path else path


CSV = "path,label,split\n" + "".join(f"{quoted(p)},{FILES[p]},{SPLIT[p]}\n" for p in FILES)


@pytest.mark.parametrize(
    "content",
    [
        CSV.encode(),
        ("\ufeff" + CSV).encode(),
        CSV.replace("\n", "\r\n").encode(),
        CSV.rstrip("\n").encode(),
        CSV.replace("\n", "\n\n").encode() + b",,\n",
        CSV.replace(",cat,", " ,  cat , ").replace("path,label", " path , label ").encode(),
        CSV.replace(",train", ",Train").replace(",val", ",VALIDATION").encode(),
        CSV.replace("cats/", "./cats//").encode(),
        CSV.replace("/", "\\").encode(),
        CSV.replace(".png", "").replace(".JPG", "").encode(),
    ],
)
def test_a_csv_file(folder, tmp_path, content):
    file = tmp_path / "labels.csv"
    file.write_bytes(content)
    assert found(folder, file) == EXPECTED


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_csv_file_of_a_spreadsheet(folder, tmp_path, delimiter):
    frame().to_csv(tmp_path / "labels.csv", sep=delimiter, index=False)
    assert found(folder, tmp_path / "labels.csv") == EXPECTED


def test_absolute_paths(folder, tmp_path):
    table, link = frame(), tmp_path / "link"
    link.symlink_to(folder)
    table["path"] = [f"{folder}/{path}" for path in FILES]
    table.to_csv(tmp_path / "labels.csv")
    assert found(folder, tmp_path / "labels.csv") == EXPECTED
    assert found(link, tmp_path / "labels.csv") == EXPECTED


@pytest.mark.parametrize("kind", ["string", "category", "large_string[pyarrow]"])
def test_a_parquet_file(folder, tmp_path, kind):
    table = frame()
    table["label"] = table["label"].astype(kind)
    table.to_parquet(tmp_path / "labels.parquet")
    assert found(folder, tmp_path / "labels.parquet") == EXPECTED


def test_other_names_of_columns(folder, tmp_path):
    table = frame().rename(columns={"path": "image_id", "label": "diagnosis"})
    table.to_csv(tmp_path / "labels.csv", index=False)
    with pytest.raises(
        DataFolderError, match=r"no column path; .* are: image_id, diagnosis, split"
    ):
        found(folder, tmp_path / "labels.csv")
    columns = ["image_id", "diagnosis"]
    assert found(folder, tmp_path / "labels.csv", columns=columns) == EXPECTED


def test_other_splits(folder, tmp_path):
    (tmp_path / "labels.csv").write_text(
        CSV.replace("val", "test").replace("a.png,cat", "a.png,dog")
    )
    flags = {"train_split": "test", "val_split": "train"}
    there = found(folder, tmp_path / "labels.csv", **flags)
    assert collections.Counter(split for split, _ in there.values()) == {"train": 2, "val": 2}
    assert there["cats/a.png"] == ("val", "dog")
    table = frame()
    table["split"] = ["train", "val", "train", "fold 3"]
    table.to_csv(tmp_path / "labels.csv")
    index = read(folder, tmp_path / "labels.csv")
    assert [len(each.paths) for each in index.values()] == [2, 1]
    assert index["train"].left_out == {"split fold 3": 1}


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["10", "9", "10", "9"], ["9", "10"]),
        ([1.0, 0.0, 1.0, 0.0], ["0", "1"]),
        ([3, 0, 3, 0], ["0", "3"]),
        (["1.5", "2", "1.5", "2"], ["1.5", "2"]),
        (["007", "8", "007", "8"], ["007", "8"]),
        ([True, False, True, False], ["False", "True"]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_as_labels(folder, tmp_path, labels, classes, suffix):
    table, file = frame(), tmp_path / f"labels.{suffix}"
    table["label"], table["split"] = labels, ["train", "train", "val", "val"]
    table.to_csv(file) if suffix == "csv" else table.to_parquet(file)
    index = read(folder, file)["val"]
    assert index.classes == classes
    strings = [str(label).removesuffix(".0") for label in labels[2:]]
    assert [classes[label] for label in index.labels] == strings


def test_a_class_map(folder, tmp_path):
    frame().to_csv(tmp_path / "labels.csv")
    (tmp_path / "classes.txt").write_text("fish\ndog\ncat\n")
    index = read(folder, tmp_path / "labels.csv", class_map=str(tmp_path / "classes.txt"))
    assert index["train"].classes == ["fish", "dog", "cat"]
    assert index["train"].labels.tolist() == [2, 1]
    (tmp_path / "classes.txt").write_text("fish\ndog\n")
    with pytest.raises(DataFolderError, match="lacks classes of the images: cat"):
        read(folder, tmp_path / "labels.csv", class_map=str(tmp_path / "classes.txt"))


def test_a_folder_at_a_url(folder, tmp_path):
    frame().to_csv(tmp_path / "labels.csv")
    url, table = f"file://{folder}", f"file://{tmp_path}/labels.csv"
    assert found(url, table) == EXPECTED
    absolute = frame()
    absolute["path"] = [f"{url}/{path}" for path in FILES]
    absolute.to_csv(tmp_path / "labels.csv")
    assert found(url, table) == EXPECTED
    with pytest.raises(DataFolderError, match="is outside of --data_dir"):
        found(f"{url}/cats", table)


def test_images_without_labels(folder, tmp_path):
    table = frame()[["path"]]
    table.to_csv(tmp_path / "labels.csv", index=False)
    index = read(folder, tmp_path / "labels.csv", labels=False, val_fraction=0.5)
    assert {name: len(each.paths) for name, each in index.items()} == {"train": 2, "val": 2}
    assert index["train"].classes is None


def test_the_images_are_those_of_the_table(digits, tmp_path):
    """Batches are those of a folder with the same images in the same order."""
    rows = [(p.relative_to(digits), p.parent.name) for p in sorted(digits.glob("*/*/*.png"))]
    lines = [f"{path},{label},{path.parts[0]}" for path, label in rows]
    file = tmp_path / "labels.csv"
    file.write_text("\n".join(["path,label,split", *lines]))
    table = open_data(wanted(arguments(digits, labels=str(file))))
    plain = open_data(wanted(arguments(digits)))
    for name in ("train", "val"):
        ours, theirs = (
            itertools.islice(source.splits[name].batches(100, BatchShard()).epoch(1), 3)
            for source in (table, plain)
        )
        check_same_epochs(ours, theirs)
    assert table.order().keys() == plain.order().keys()
    assert str(table).startswith(f"{file}: 1,438 training, 359 validation images")


# -- the split ----------------------------------------------------------------------------


def place(seed, name):
    return xxhash.xxh3_64(f"{seed}/{name}".encode()).intdigest()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.999, 1])
def test_the_split_is_that_of_the_formula(seed, fraction):
    generator = np.random.default_rng(seed)
    names = [f"{number}.png" for number in range(200)]
    labels = generator.choice(5, 200, p=[0.5, 0.3, 0.15, 0.04, 0.01])
    labels[0] = 5  # a single image
    is_val = choose_validation(names, labels, None, fraction, seed)
    for label in range(6):
        of_class = [names[n] for n in np.flatnonzero(labels == label)]
        count = int(fraction * len(of_class) + 0.5)
        count = min(max(count, 1), len(of_class) - 1) if fraction < 1 else len(of_class)
        expected = sorted(of_class, key=lambda name: place(seed, name))[: max(count, 0)]
        assert {names[n] for n in np.flatnonzero(is_val & (labels == label))} == {*expected}
    order = generator.permutation(200)
    again = choose_validation([names[n] for n in order], labels[order], None, fraction, seed)
    assert (again == is_val[order]).all()
    if fraction in (0.1, 0.25, 0.5):
        assert (choose_validation(names, labels, None, fraction, seed + 1) != is_val).any()


@pytest.mark.parametrize("several", [False, True])
def test_groups_stay_together(several):
    generator = np.random.default_rng(3)
    groups = [f"patient {n}" for n in generator.zipf(1.5, 600).clip(max=150)]
    names = [str(n) for n in range(600)]
    labels = generator.choice(4, 600, p=[0.6, 0.3, 0.07, 0.03])
    if several:
        labels = (generator.random((600, 4)) < [0.6, 0.3, 0.05, 0.01]).astype(np.uint8)
    is_val = choose_validation(names, labels, groups, 0.2, 0)
    sides = {(group, side) for group, side in zip(groups, is_val.tolist(), strict=True)}
    assert len(sides) == len({*groups})
    assert 0.1 < is_val.mean() < 0.3
    has = labels == 1 if several else labels[:, None] == np.arange(4)
    assert (has[~is_val].sum(axis=0) > 0).all()

    # Independently: by rarest class, in the order of the hash, while half of a group fits.
    rarity = sorted(range(4), key=lambda label: has[:, label].sum())
    sizes, rarest = collections.Counter(groups), {}
    for group in sizes:
        of_group = has[[g == group for g in groups]].any(axis=0)
        rarest[group] = next((label for label in rarity if of_group[label]), None)
    expected = set()
    for label in {*rarest.values()}:
        there = sorted((g for g in sizes if rarest[g] == label), key=lambda g: place(0, g))
        budget, left = 0.2 * sum(sizes[g] for g in there), len(there) - 1
        chosen = []
        for group in there:
            if left and sizes[group] / 2 <= budget:
                chosen.append(group)
                budget, left = budget - sizes[group], left - 1
        if not chosen and len(there) > 1:
            chosen = [min(there, key=lambda g: sizes[g])]
        expected |= {*chosen}
    assert {group for group, side in sides if side} == expected


def test_a_class_that_would_be_only_for_validation_is_trained_on():
    """All images of the larger class are in a group that counts to the smaller one."""
    groups = ["g1", "g1", "g1", "g2", "g1"]
    labels = np.array([1, 1, 1, 0, 0])
    for seed in range(20):
        is_val = choose_validation([*"abcde"], labels, groups, 0.5, seed)
        assert is_val.tolist() in ([False, False, False, True, False], [False] * 5)


def test_the_split_of_a_table(folder, tmp_path):
    table = frame().drop(columns="split")
    table["patient"] = [1, 2, 3, 4]
    table.to_csv(tmp_path / "labels.csv")
    for split_by, names in ((None, FILES), ("patient", dict(zip(FILES, "1234", strict=True)))):
        there = found(folder, tmp_path / "labels.csv", split_by=split_by, split_seed=5)
        for label in ("cat", "dog"):
            of_class = [path for path in FILES if FILES[path] == label]
            first = min(of_class, key=lambda path: place(5, names[path] if split_by else path))
            assert [path for path in of_class if there[path][0] == "val"] == [first]


# -- several labels -----------------------------------------------------------------------


def test_several_labels(folder, tmp_path):
    table = frame().drop(columns="label")
    table["findings"] = ["mass|edema", " edema ", "edema| mass|", None]
    table["mass"], table["edema"] = [1, 0, True, 0.0], ["1", "1.0", "true", "0"]
    expected = {"train": [[1, 1], [1, 1]], "val": [[0, 1], [0, 0]]}
    for columns, order in ((["path", "findings"], 1), (["path", "mass", "edema"], 0)):
        table.astype(str).replace("None", "").to_csv(tmp_path / "labels.csv")
        index = read(folder, tmp_path / "labels.csv", columns=columns, multi_label=True)
        for split, labels in expected.items():
            assert index[split].classes == [["mass", "edema"], ["edema", "mass"]][order]
            step = -1 if order else 1
            assert index[split].labels[:, ::step].tolist() == labels
    with pytest.raises(
        DataFolderError, match=r"line 2 .* several labels .mass.edema.*--multi_label"
    ):
        read(folder, tmp_path / "labels.csv", columns=["path", "findings"])
    with pytest.raises(DataFolderError, match=r"2 columns of labels: .* require --multi_label"):
        read(folder, tmp_path / "labels.csv", columns=["path", "mass", "edema"])


def test_lists_of_labels(folder, tmp_path):
    table = frame()
    table["label"] = [["mass"], ["mass", "edema"], ["edema"], []]
    table.to_parquet(tmp_path / "labels.parquet")
    index = read(folder, tmp_path / "labels.parquet", multi_label=True)
    assert index["train"].labels.tolist() == [[0, 1], [1, 0]]
    assert index["val"].labels.tolist() == [[1, 1], [0, 0]]


# -- what cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        ("", {}, "has no column path; the columns of its first line are: none"),
        ("path,label\n", {}, "has no rows below the names of its columns"),
        ("cats/a.png,cat\ncats/b.JPG,cat\n", {}, "no column path; .* are: cats/a.png, cat: name"),
        (
            CSV.replace("a.png", "z.png"),
            {},
            "line 2 .* lists .*/cats/z.png, which does not exist: ",
        ),
        (CSV.replace("cats/", "x/"), {}, "line 2 of .*, which does not exist, and 1 more do not"),
        (CSV + "cats/a,cat,val\n", {}, "line 6 .*: cats/a was already listed, in line 2; remove"),
        (CSV + "./cats/a.png,cat,train\n", {}, "a.png was already listed"),
        (CSV + "../x.png,cat,val\n", {}, "line 6 .*: ../x.png is outside of --data_dir"),
        (CSV + "/x/y.png,cat,val\n", {}, "/x/y.png is outside of --data_dir"),
        (CSV + "cats/../../x.png,cat,val\n", {}, "is outside of --data_dir"),
        (CSV + "notes.txt,cat,val\n", {}, r"line 6 .*: notes.txt is not an image \(.jpg"),
        (CSV + "cats,cat,val\n", {}, "cats, which does not exist"),
        (CSV + ",cat,val\n", {}, "line 6 of .* has no path"),
        (CSV.replace("png,cat", "png,"), {}, "line 2 of .* has no label"),
        (CSV.replace("png,cat,train", "png,cat,"), {}, "line 2 .* has no value in column split"),
        (CSV.replace('"', ""), {}, "line 4 of .* has 4 fields, but there are 3 columns: put quo"),
        (CSV.replace('old/c.png"', "old/c.png"), {}, "cannot be read: "),
        (CSV.replace("label", "path"), {"columns": ["path", "split"]}, "column path is there twi"),
        (CSV, {"columns": ["path"]}, "--columns path names no column of labels"),
        (CSV, {"split_by": "patient"}, "has no column patient; .*: set --split_by to one of its"),
        (CSV, {"split_by": "label"}, "label cat is in both splits, in val here and in train in l"),
        (CSV, {"val_fraction": 0.1}, "--val_fraction 0.1, but .* has a column split, which deci"),
        (CSV.replace("val", "fold1").replace("train", "fold2"), {}, "has fold1, fold2, neither"),
        (CSV.replace("JPG,cat", "JPG,fish"), {}, "only val has fish, which cannot be learned"),
        (
            CSV.replace("split", "other").replace(",dog,", ",cat2,"),
            {"split_by": "label"},
            "has a single value of label, so",
        ),
    ],
)
def test_an_odd_table(folder, tmp_path, content, flags, told):
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(DataFolderError, match=told) as error:
        read(folder, tmp_path / "labels.csv", **flags)
    assert "\n" not in str(error.value)


def test_a_damaged_parquet_file(folder, tmp_path):
    (tmp_path / "labels.parquet").write_text(CSV)
    with pytest.raises(DataFolderError, match=r"--labels .* cannot be read: "):
        read(folder, tmp_path / "labels.parquet")


def test_an_ambiguous_path(tmp_path):
    for name in ("a.png", "a.jpg", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text("path,label\na,x\nb,x\n")
    with pytest.raises(DataFolderError, match=r"a may be a.jpg or a.png: add the extension"):
        read(tmp_path, tmp_path / "labels.csv")


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("path mass edema", "line 4 of .* has '2' in column mass: write 0 or 1"),
        ("path edema split", "line 2 of .* has 'train' in column split: write 0 or 1"),
        ("path edema fever", "line 5 of .* has no value in column fever: write 0 or 1"),
        ("path edema edema", "column edema is there twice"),
        ("path nothing", "no image has any label"),
    ],
)
def test_wrong_columns_of_several_labels(folder, tmp_path, columns, told):
    table = frame()
    table["mass"], table["edema"], table["fever"] = [1, 0, 2, 0], 1, [0, 1, 1, None]
    table["nothing"] = ""
    table.to_csv(tmp_path / "labels.csv")
    with pytest.raises(DataFolderError, match=told):
        read(folder, tmp_path / "labels.csv", columns=columns.split(), multi_label=True)


# -- the split that a run stores ----------------------------------------------------------


def test_an_image_that_moves_to_validation_is_noticed(tmp_path):
    header, file = ("path", "label", "split"), tmp_path / "split.csv"
    rows = [header, ("a", "x", "train"), ("b", "x", "val"), ("./=c", "x", "train")]
    assert store_split(rows, file) == []
    assert store_split(rows, file) == []
    moved = [header, ("a", "x", "train"), ("b", "x", "train"), ("./=c", "x", "val")]
    (told,) = store_split(moved, file)
    assert "1 validation images, such as ./=c, were training images at an earlier start" in told
    assert file.read_text().splitlines()[-1] == "./=c,x,val"
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert store_split(rows, file) == []
    assert not (tmp_path / "elsewhere").exists()
    file.write_bytes(b"\xff\n1,2\n")
    assert store_split(rows, file) == []


def test_the_stored_split_is_a_table(folder, tmp_path):
    names = {"-a.png": "cat", "=b.png": "cat", "c, d.png": "dog", "e.png": "dog"}
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    table = pandas.DataFrame({"path": [*names], "label": names.values()})
    table.to_csv(tmp_path / "labels.csv")
    config = arguments(tmp_path, labels=str(tmp_path / "labels.csv"), batch_size=1)
    store_split(split_rows(open_data(wanted(config)), str(tmp_path)), tmp_path / "split.csv")
    assert found(tmp_path, tmp_path / "split.csv") == found(tmp_path, tmp_path / "labels.csv")
