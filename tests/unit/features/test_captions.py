"""Pairs from every kind of source: which caption an image has, and which are left out."""

import itertools
import json
import re
import threading
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer

from data.batch import BatchShard, SampleIndex
from data.digits import read_digits
from data.files import DataFolderError
from data.pack import main as pack
from features.image_sizes.schedule import SizeScheduleView
from features.image_text.tokenizer import ByteTokenizer
from features.image_text.view import ImageTextView, describe_texts
from tests.support.archives import write_tar
from tests.support.captioned import LENGTH, ROWS, captions, image, opened, text, write_pairs
from tests.support.cli import ROOT
from tests.support.loading import check_same_epochs, concatenated

pytestmark = pytest.mark.fast

RECIPE = ROOT / "recipes" / "digits_siglip.args"
FORMS = ["txt", "json", "csv", "parquet", "huggingface"]


def texts(split, epoch=0):
    """The texts of a split's samples, in order."""
    return [text(split[SampleIndex(epoch, n)].fields["text"]) for n in range(len(split))]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(form, tmp_path):
    source = opened(tmp_path, write_pairs(tmp_path, form))
    several = form != "txt"
    for name, rows in ROWS.items():
        split = source.splits[name]
        assert len(split) == rows
        assert [split.read(n) for n in range(rows)] == [image(name, n) for n in range(rows)]
    val = [captions("val", n)[0] for n in range(ROWS["val"])]
    assert texts(source.splits["val"]) == texts(source.splits["val"], epoch=1) == val
    # Of several captions each is drawn in some epoch, and the same again in the same epoch.
    epochs = [texts(source.splits["train"], epoch) for epoch in range(12)]
    for number, found in enumerate(zip(*epochs, strict=True)):
        expected = captions("train", number)
        assert {*found} == {*(expected if several else expected[:1])}
    assert epochs[3] == texts(opened(tmp_path, source_flags(source)).splits["train"], 3)
    other = texts(opened(tmp_path, source_flags(source), seed=4).splits["train"], 3)
    assert (epochs[3] != other) == several


def source_flags(source):
    config = next(iter(source.splits.values())).request.config
    return {"data_source": config.data_source, "labels": config.labels}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_log_says_of_texts(form, tmp_path):
    split = opened(tmp_path, write_pairs(tmp_path, form)).splits["train"]
    count = ROWS["train"] + (8 if form != "txt" else 0)
    lengths = [len(text) for n in range(ROWS["train"]) for text in captions("train", n)]
    assert max(lengths) < 32
    whole = f"texts: 257 tokens (bytes); 0 of the first {count} captions are truncated"
    assert describe_texts(split, split.request.view, "bytes").startswith(whole)


def test_captions_far_away_are_read_at_the_same_time(tmp_path, monkeypatch):
    split = opened(tmp_path, write_pairs(tmp_path, "json")).splits["train"]
    both_asked, read = threading.Barrier(2, timeout=60), type(split).value

    def value(self, number, name):
        if number < 2:
            both_asked.wait()
        return read(self, number, name)

    monkeypatch.setattr(type(split), "value", value)
    assert "0 of the first 20 captions" in describe_texts(split, split.request.view, "bytes")


@pytest.mark.parametrize("form", ["json", "csv"])
def test_any_number_of_devices_reads_the_same_and_continues(form, tmp_path):
    flags = write_pairs(tmp_path, form)
    whole = [*opened(tmp_path, flags).train_loader(4, BatchShard()).epoch(1)]
    assert len(whole) == 3
    halves = [
        opened(tmp_path, flags | {"num_workers": 1}).train_loader(4, BatchShard(index, 2)).epoch(1)
        for index in range(2)
    ]
    check_same_epochs([concatenated(pair) for pair in zip(*halves, strict=True)], whole)
    rest = opened(tmp_path, flags).train_loader(4, BatchShard()).epoch(1, first_batch=2)
    check_same_epochs(rest, whole[2:])


def test_img2dataset_as_it_is(tmp_path):
    for shard in range(2):
        content = {}
        for number in range(4):
            key = f"{shard:05}{number:04}"
            about = {"caption": f"pair {key}", "status": "success", "key": key}
            content[f"{key}.jpg"] = image("train", number)
            content[f"{key}.json"] = json.dumps(about).encode()
            content[f"{key}.txt"] = about["caption"].encode()
        write_tar(tmp_path / f"{shard:05}.tar", content)
        (tmp_path / f"{shard:05}_stats.json").write_text("{}")
        (tmp_path / f"{shard:05}.parquet").write_bytes(b"")
    for keys in ((), ("caption",), ("txt",)):
        source = opened(tmp_path, {"data_source": "webdataset"}, keys)
        assert "val" not in source.splits
        expected = [f"pair {shard:05}{n:04}" for shard in range(2) for n in range(4)]
        assert texts(source.splits["train"]) == expected


def test_packed_captions_are_those_of_the_table(tmp_path, monkeypatch, capsys):
    flags = write_pairs(tmp_path, "csv")
    command = f"data.pack {tmp_path} {tmp_path}/shards --labels {flags['labels']} --workers 1"
    monkeypatch.setattr("sys.argv", [*command.split(), "--without_labels", "--captions", "caption"])
    pack()
    table, shards = opened(tmp_path, flags), opened(tmp_path / "shards", PACKED)
    for name in ROWS:
        for epoch in range(4):
            ours, expected = (texts(each.splits[name], epoch) for each in (shards, table))
            assert ours == expected
    monkeypatch.setattr("sys.argv", [*command.split(), "--without_labels", "--captions", "title"])
    (tmp_path / "shards").rename(tmp_path / "packed")
    with pytest.raises(SystemExit):
        pack()
    assert "pairs.csv has no column title for the caption of an image" in capsys.readouterr().err


PACKED = {"data_source": "webdataset"}


def test_several_keys_are_several_captions(tmp_path):
    content = {}
    for number in range(4):
        content |= {f"{number}.png": image("train", number), f"{number}.txt": b"alt"}
        content[f"{number}.json"] = b'{"long": "a longer one", "number": 1}'
    write_tar(tmp_path / "train-0.tar", content)
    train = opened(tmp_path, {"data_source": "webdataset"}, ("txt", "long")).splits["train"]
    assert {*texts(train), *texts(train, 1)} == {"alt", "a longer one"}


# -- left out ---------------------------------------------------------------------------

BAD = {
    "missing": ({}, "it has no caption"),
    "empty": ({"txt": b""}, "its caption is empty"),
    "blank": ({"txt": b" \n"}, "its caption is empty"),
    "null": ({"json": b'{"caption": null}'}, "it has no caption"),
    "none": ({"json": b'{"caption": []}'}, "it has no caption"),
    "latin": ({"txt": b"caf\xe9"}, "its caption is not valid Unicode"),
    "half": ({"json": b'{"caption": "\\ud800"}'}, "its caption is not valid Unicode"),
    "number": ({"json": b'{"caption": 3}'}, "its caption is not text, but of type int"),
    "damaged": ({"json": b'{"caption": '}, "its .json cannot be read: Expecting value"),
    "large": ({"txt": b"a" * (2**20 + 1)}, "the limit for a value of a sample is 1,048,576"),
}


def test_pairs_without_a_caption_are_left_out_as_unreadable_images(tmp_path):
    for split in ("train", "val"):
        content = {"0000.png": image(split, 0), "0000.txt": b"good"}
        for number, (files, _) in enumerate(BAD.values(), 1):
            content[f"{number:04}.png"] = image(split, number)
            content |= {f"{number:04}.{ending}": each for ending, each in files.items()}
        for number in range(100, 130):
            content |= {f"{number:04}.png": image(split, 0), f"{number:04}.txt": b"good"}
        write_tar(tmp_path / f"{split}-0.tar", content)
    source = opened(tmp_path, {"data_source": "webdataset"})
    val = source.splits["val"]
    for number, (_, reason) in enumerate(BAD.values(), 1):
        sample = val[SampleIndex(0, number)]
        ((name, found, at),) = sample.bad
        assert (name.rpartition(": ")[2], at) == (f"{number:04}", number)
        assert reason in found
        assert int(sample.fields["index"]) == -1
        assert not sample.fields["text"].any()
    # In training another pair takes its place.
    train = source.splits["train"]
    for number in range(1, 1 + len(BAD)):
        sample = train[SampleIndex(0, number)]
        assert text(sample.fields["text"]) == "good"
        assert sample.bad[0][2] == number


@pytest.mark.parametrize(
    ("form", "keys", "message"),
    [
        ("json", ["title"], "and the next images have no caption (it has no title): set"),
        ("txt", ["title"], "no image has a title: neither 00000.title exists, nor 00000.json"),
        ("none", [], "no image has a caption: neither 00000.caption or 00000.captions or"),
        (
            "csv",
            ["title"],
            "pairs.csv has no column title for the title of an image: set --caption",
        ),
        ("parquet", ["title"], "has no column title for the title of an image: set --caption_key"),
        ("parquet", ["id"], "no caption (its id is not text, but of type int)"),
        ("huggingface", ["title"], "has no column title for the title of an image: set --caption"),
    ],
)
def test_a_source_without_captions_is_one_line(form, keys, message, tmp_path):
    flags = write_pairs(tmp_path, form)
    with pytest.raises(DataFolderError) as caught:
        opened(tmp_path, flags, keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "use --labels FILE, a table with the columns path and caption"),
        ({"data_source": "digits"}, "which --data_source digits does not have: use webdataset"),
    ],
)
def test_sources_that_have_no_captions(flags, message, tmp_path):
    with pytest.raises(DataFolderError, match=message):
        opened(tmp_path, flags)


def test_lines_about_one_image_agree(tmp_path):
    flags = write_pairs(tmp_path, "csv")
    with open(tmp_path / "pairs.csv", "a") as file:
        file.write("images/val1.png,train,other\n")
    with pytest.raises(DataFolderError, match=r"line 31 .*was already listed, in line 25, with an"):
        opened(tmp_path, flags)


# -- mosaics of digits --------------------------------------------------------------------


@pytest.fixture(scope="module")
def mosaics():
    """The captions of every combination, by split."""
    splits = opened("", {"data_source": "captioned_mosaics"}, size=24).splits
    return {
        name: list(dict.fromkeys(tuple(split.value(n, "caption")) for n in range(len(split))))
        for name, split in splits.items()
    }


def bag(caption):
    """The words of a caption, without their order."""
    return tuple(sorted(caption.replace(",", "").split()))


def test_mosaics_hold_out_combinations_with_the_same_words_together(mosaics):
    assert {name: len(found) for name, found in mosaics.items()} == {"train": 582, "val": 88}
    bags = {
        name: {bag(caption) for captions in found for caption in captions}
        for name, found in mosaics.items()
    }
    assert not bags["train"] & bags["val"]
    # 35 pairs differ in the order of their words alone, so that bags of words find 60 % at best.
    first = [captions[0] for captions in mosaics["val"]]
    assert len(set(first)) == 88
    alike = Counter(map(bag, first))
    assert Counter(alike.values()) == {2: 35, 1: 18}
    assert {"a seven above a two", "a two above a seven", "five twos"} <= {*first}


def test_mosaics_for_training_have_each_word_place_and_count(mosaics):
    of = {
        name: [caption for captions in found for caption in captions]
        for name, found in mosaics.items()
    }
    words = {name: {word for each in found for word in each.split()} for name, found in of.items()}
    assert words["val"] <= words["train"]
    text = "\n".join(of["train"])
    for single, plural in zip(SINGULAR, PLURAL, strict=True):
        for place in "above|below|over|under|left of|right of".split("|"):
            assert re.search(rf"\ban? {single} (to the )?{place} ", text)
            assert re.search(rf" {place} an? {single}$", text, re.MULTILINE)
        for count in ("two", "three"):
            assert re.search(rf"\b{count} {plural} and ", text)
    for row, column in itertools.product(("top", "", "bottom"), ("left", "", "right")):
        where = " ".join(filter(None, (row, column))) or "center"
        assert len(re.findall(rf"^an? \w+ at the {where}$", text, re.MULTILINE)) >= 8
    for count in ("two", "three", "four", "five"):
        assert len(re.findall(rf"^{count} \w+s$", text, re.MULTILINE)) >= 8


def test_mosaics_have_the_sizes_of_a_schedule():
    tokenizer = ByteTokenizer(LENGTH, canonical=False)
    pairs = ImageTextView(LENGTH, tokenizer.vocab_size, tokenizer, ())
    sizes = {"image_size_schedule": ["16:0.5", "24:0.5"], "scale": (1.0, 1.0), "hflip": 0.0}
    flags = {"data_source": "captioned_mosaics", **sizes}
    whole = opened("", {"data_source": "captioned_mosaics", **sizes}, size=24)
    source = opened("", flags, size=24, view=SizeScheduleView(view=pairs))
    loader = source.train_loader(4, BatchShard(), steps=4).epoch(0)
    plain = whole.train_loader(4, BatchShard(), steps=4).epoch(0)
    for side, batch, other in zip((16, 16, 24, 24), loader, plain, strict=False):
        assert batch["image"].shape == (4, 3, side, side)
        assert batch["text"].equal(other["text"])
        resized = torch.nn.functional.interpolate(
            other["image"].float(), side, mode="bicubic", antialias=True
        )
        assert (batch["image"] - resized).abs().mean() < 3


def test_the_recipe_has_a_token_for_each_word_of_the_mosaics(mosaics):
    lines = RECIPE.read_text().splitlines()
    flags = " ".join(line for line in lines if not line.startswith("#")).split()
    length, size = (
        int(flags[flags.index(name) + 1]) for name in ("--text_length", "--text_vocab_size")
    )
    path = RECIPE.parent.parent / flags[flags.index("--tokenizer") + 1]
    tokenizer = Tokenizer.from_file(str(path))
    unknown = tokenizer.token_to_id("[UNK]")
    captions = {caption for found in mosaics.values() for each in found for caption in each}
    encoded = [tokenizer.encode(caption.replace(",", "")).ids for caption in captions]
    assert unknown not in itertools.chain.from_iterable(encoded)
    assert max(map(len, encoded)) == length
    assert tokenizer.get_vocab_size() == size


def test_mosaics_show_what_their_captions_say():
    """The digits in the cells, found by comparing them with all digits of the split."""
    source = opened("", {"data_source": "captioned_mosaics"}, size=24)
    known = {
        split: {
            pixels.tobytes(): digit for each, digit, _, pixels in read_digits() if each == split
        }
        for split in ROWS
    }
    for name, numbers in (("val", range(88)), ("train", range(582))):
        split = source.splits[name]
        for number in numbers:
            pixels = split.open(number).pixels()[:, :, 0]
            cells = pixels.reshape(3, 8, 3, 8).swapaxes(1, 2)
            there = {
                (row, column): known[name][cells[row, column].tobytes()]
                for row in range(3)
                for column in range(3)
                if cells[row, column].any()
            }
            captions = split.value(number, "caption")
            assert all(is_true(caption, there) for caption in captions), (captions, there)
    assert not is_true("a seven above a one", {(1, 0): 7, (0, 0): 1})


NUMBERS = {word: number for number, word in enumerate("zero one two three four five".split())}
SINGULAR = "zero one two three four five six seven eight nine".split()
PLURAL = "zeros ones twos threes fours fives sixes sevens eights nines".split()


def is_true(caption, there):
    """Whether a caption is true of the digits in these cells, and says all of them."""
    digits = [*there.values()]
    words = caption.replace(",", "").split()
    named = [word for word in words if word in PLURAL]
    singles = re.findall(r"\ban? (\w+)", caption) or re.findall(r"^one (\w+)", caption)
    by = re.search(r" (above|over|below|under|left|right)( of)? ", caption)
    if by and " at the " not in caption and len(singles) == 2:
        cell = {digit: at for at, digit in there.items()}
        first, second = (cell[SINGULAR.index(word)] for word in singles)
        axis = 0 if by[1] in ("above", "over", "below", "under") else 1
        is_first = by[1] in ("above", "over", "left")
        low, high = (first, second) if is_first else (second, first)
        return len(there) == 2 and low[axis] < high[axis] and low[1 - axis] == high[1 - axis]
    if not named:
        ((row, column),) = there
        where = " ".join(filter(None, [("top", "", "bottom")[row], ("left", "", "right")[column]]))
        return digits == [SINGULAR.index(singles[0])] and re.search(
            rf"(the |, ){where or 'center'}( |$)", caption
        )
    expected = [SINGULAR.index(word) for word in singles]
    for at, word in enumerate(words):
        if word in PLURAL:
            expected += [PLURAL.index(word)] * NUMBERS[words[at - 1]]
    return sorted(expected) == sorted(digits)
