"""The names of classes and the prompts of zero-shot classification."""

import csv

import pytest

from data.files import DataFolderError
from features.image_text.texts import lines_of
from features.image_text.zero_shot import NAME, PROMPTS, names_of, open_zero_shot
from tests.support.archives import write_tar
from tests.support.resolved import on_gpus
from tests.support.table_files import write_tables
from training.errors import UsageError

pytestmark = pytest.mark.fast


def test_the_prompts_of_clip():
    prompts = lines_of("--prompts", str(PROMPTS))
    assert len({*prompts}) == 80
    assert all(prompt.count(NAME) == 1 for prompt in prompts)
    assert (prompts[0], prompts[-1]) == ("a bad photo of a {}.", "a tattoo of the {}.")


def test_names_of_classes(tmp_path):
    assert names_of(["great_white_shark", "hen"], 2, None) == ["great white shark", "hen"]
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffHai\r\n Henne \n\n".encode())
    assert names_of(["n01", "n02"], 2, str(file)) == ["Hai", "Henne"]
    for classes, count in ((["n01", "n02", "n03"], 3), (["n01"], 1), (None, 3)):
        with pytest.raises(DataFolderError, match=f"has 2 lines, but there are {count} classes"):
            names_of(classes, count, str(file))
    assert names_of(None, 1, str(file)) == ["Hai", "Henne"]  # no image of the last class
    with pytest.raises(DataFolderError, match="'_' is no name of a class"):
        names_of(["_", "hen"], 2, None)
    with pytest.raises(DataFolderError, match="set --class_names FILE, with a line for each of 3"):
        names_of(None, 3, None)


@pytest.fixture(scope="module")
def written(digits, tmp_path_factory):
    """The validation images of one folder in every other form."""
    folder = tmp_path_factory.mktemp("forms")
    write_tables(digits, folder)
    for split in ("train", "val"):
        content = {}
        for path in sorted(digits.glob(f"{split}/*/*.png")):
            key = f"{path.parent.name}_{path.stem}"
            content |= {f"{key}.png": path.read_bytes(), f"{key}.cls": path.parent.name.encode()}
        write_tar(folder / "shards" / f"{split}-0.tar", content)
    rows = [("file", "digit", "split")]
    for path in sorted(digits.glob("*/*/*.png")):
        rows.append((path.relative_to(digits), f"digit_{path.parent.name}", path.parts[-3]))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "names.txt").write_text("\n".join("zero one two 3 4 5 6 7 8 9".split()))
    return folder


def opened(*flags):
    of_pairs = "--data_source webdataset --data_dir /none --val_shards p-*.tar --image_size 16"
    model = "--objective siglip --tokenizer bytes --embed_dim 32 --num_heads 2 --depth 1"
    texts = "--text_depth 1 --text_width 16 --text_heads 2"
    run = on_gpus([*f"{of_pairs} --patch_size 4 {model} {texts}".split(), *flags])
    return open_zero_shot(run)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("shards --zero_shot_source webdataset --class_names {}/names.txt", "zero one two"),
        ("parquet --zero_shot_source parquet", "0 1 2"),
        ("parquet --zero_shot_source parquet --zero_shot_columns image label", "0 1 2"),
        ("saved --zero_shot_source huggingface", "0 1 2"),
        (
            "{digits} --zero_shot_labels {}/table.csv --zero_shot_columns file digit",
            "digit 0,digit 1,digit 2",
        ),
    ],
)
def test_every_form_has_the_same_images_and_labels(flags, names, digits, written):
    folder = flags.partition(" ")[0]
    words = flags.format(written, digits=digits).split()
    if folder != "{digits}":
        words[0] = str(written / folder)
    found, expected = opened("--zero_shot", *words), opened("--zero_shot", str(digits))
    assert found.names[:3] == names.split("," if "," in names else " ")
    there, here = (
        sorted((split.read(n), int(split.labels[n])) for n in range(len(split)))
        for split in (each.images.splits["val"] for each in (found, expected))
    )
    assert there == here


def test_messages_have_the_flags_of_zero_shot(written):
    with pytest.raises(UsageError, match="set --class_names FILE, with a line for each of 10"):
        opened("--zero_shot", str(written / "shards"), "--zero_shot_source", "webdataset")
    words = ["--zero_shot_source", "parquet", "--zero_shot_columns", "pixels", "label"]
    with pytest.raises(UsageError, match="has no column pixels"):
        opened("--zero_shot", str(written / "parquet"), *words)
    words = ["--zero_shot_labels", str(written / "table.csv"), "--zero_shot_columns", "file", "x"]
    with pytest.raises(UsageError, match="--zero_shot_columns"):
        opened("--zero_shot", str(written), *words)
    with pytest.raises(UsageError, match="--zero_shot /nowhere does not exist"):
        opened("--zero_shot", "/nowhere", "--zero_shot_source", "webdataset")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty: it needs a line for each text"),
        (b" \n\n", "is empty: it needs a line for each text"),
        (b"one\n\nthree", "line 2 is empty"),
        (b"\xff\xfe\xfd", "cannot be read: "),
    ],
)
def test_files_without_texts(content, text, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    with pytest.raises(DataFolderError, match=text):
        lines_of("--prompts", str(file))
