"""Tokens of texts, compared with those of transformers, and what is refused."""

import gzip
import json
import random
import sys
import types

import numpy as np
import pytest

from data.files import SizeLimit
from features.image_text import clip_vocabulary
from features.image_text.config import ImageTextConfig
from features.image_text.tokenizer import ByteTokenizer, FileTokenizer, canonical_text
from features.image_text.tokenizer_files import open_tokenizer, save_copy
from tests.support.resolved import on_gpus
from tests.support.tokenizer_files import save_clip_tokenizer, save_siglip_tokenizer
from training.errors import UsageError

pytestmark = pytest.mark.fast

TEXTS = [
    "the cat",
    "A Café, at NIGHT: isn't it?",
    "",
    "   ",
    "the cat and the mat " * 20,
    "日本 🐈",
    "<|endoftext|> </s>",
]


def opened(folder, length, **changed):
    content = (folder / "tokenizer.json").read_bytes()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    arguments = {"canonical": False, "name": "NAME"} | changed
    return FileTokenizer(content, settings["pad_token"], length, **arguments)


@pytest.mark.parametrize("save", [save_clip_tokenizer, save_siglip_tokenizer])
def test_tokens_are_those_of_transformers(save, tmp_path):
    theirs, length = save(tmp_path), 12
    ours = opened(tmp_path, length)
    expected = theirs(
        TEXTS, padding="max_length", truncation=True, max_length=length, return_tensors="np"
    )
    tokens = ours(TEXTS)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, expected.input_ids)
    assert ours.vocab_size == len(theirs)
    assert (ours.end, ours.pad) == (theirs.eos_token_id, theirs.pad_token_id)
    lengths = [len(each) for each in theirs(TEXTS).input_ids]
    assert [ours.is_truncated(text) for text in TEXTS] == [each > length for each in lengths]
    assert max(lengths) > length > min(lengths)


MODEL = "--fake_data --model vit_tiny_patch16_224"
MERGES = ["t h", "th e</w>", "c a", "ca t</w>", "n o", "no t</w>", "Ã ©</w>", "ð Ł"]
ODD = [
    *TEXTS,
    "don't can\u2019t I'LL we've they'd",
    "&amp; &lt;b&gt; &amp;amp;",
    "<|STARTOFTEXT|> <|startoftext|>the<|endoftext|>",
    "e\u0301 \u00e9 cafe\u0301 ﬁ ǅ İ ẞ",
    "\x00\x01\x1b[31m a\tb\r\nc \u2028 \x85 \xa0nb \u200b\u200d\ufeff",
    "½ Ⅷ ٣٤ 1234 a_b-c--d...e!!! № ™",
    "مرحبا बच्चा 😀👍🏽 👨‍👩‍👧 \U0010ffff \U000e0001",
]


def drawn_texts(count):
    """Texts of characters of any kind."""
    random.seed(0)
    ranges = [(0, 0x7F), (0, 0x2FF), (0, 0xD7FF), (0xE000, 0x1FFFF)]
    for _ in range(count):
        letters = (random.randint(*random.choice(ranges)) for _ in range(random.randint(1, 20)))
        yield "".join(map(chr, letters))


def packed(lines):
    return gzip.compress("\n".join(lines).encode())


def test_the_vocabulary_of_clip(tmp_path):
    """With fewer merges than OpenAI's file; lines after them count for nothing there."""
    from transformers import CLIPTokenizer

    file = tmp_path / "bpe_simple_vocab_16e6.txt.gz"
    file.write_bytes(packed(['"bpe_simple_vocab_16e6.txt#version: 0.2', *MERGES, ""]))
    run = on_gpus(f"--objective clip {MODEL} --tokenizer {file} --text_length 300")
    ours, letters = open_tokenizer(run.config), clip_vocabulary._letters()
    assert len({*letters}) == 256
    assert letters[ord("a") - ord("!")] == "a"
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [merge.replace(" ", "") for merge in MERGES]
    words += ["<|startoftext|>", "<|endoftext|>"]
    theirs = CLIPTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[tuple(merge.split()) for merge in MERGES],
    )
    texts = [*ODD, *drawn_texts(500)]
    how = {"padding": "max_length", "truncation": True, "max_length": 300}
    expected = theirs(texts, **how, return_tensors="np").input_ids
    np.testing.assert_array_equal(ours(texts), expected)
    # A checkpoint's copy is the same tokenizer.
    save_copy(run.config, tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    again = FileTokenizer(content, "<|endoftext|>", 300, canonical=False, name="NAME")
    assert again.checksum == ours.checksum


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(["bpe_simple_vocab", "a b c"]), "a gzip file, but not CLIP's"),
        (packed(["a b", "c d"]), "a gzip file, but not CLIP's"),
        (packed(["bpe_simple_vocab", "a b"])[:-9], "a truncated gzip file"),
        (clip_vocabulary.GZIP + b"x" * 30, "a damaged gzip file"),
        (packed(["bpe_simple_vocab", "a" * 2000]), "has 1,001 bytes; the limit for"),
    ],
)
def test_other_compressed_files_are_one_line(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(clip_vocabulary, "TEXT", SizeLimit("a file of text or JSON", 1000))
    file = tmp_path / "x.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"--tokenizer {file} cannot be read: .*{message}"):
        on_gpus(f"--objective clip {MODEL} --tokenizer {file}")


def test_files_of_sentencepiece_are_converted_by_others(tmp_path):
    file = tmp_path / "spiece.model"
    file.write_bytes(b"\n\x0e\n\x05<pad>\x15\x00\x00\x00\x00\x18\x03")
    for name in (file, tmp_path):
        with pytest.raises(UsageError, match=r"spiece\.model is a file of SentencePiece: convert"):
            on_gpus(f"--objective siglip {MODEL} --tokenizer {name}")


def test_bytes_end_each_text():
    tokenizer = ByteTokenizer(6, canonical=False)
    rows = tokenizer(["ab", "é", "", "abcde", "abcdef"]).tolist()
    end = 256
    assert rows == [
        [97, 98, end, end, end, end],
        [0xC3, 0xA9, end, end, end, end],
        [end] * 6,
        [*b"abcde", end],
        [*b"abcde", end],
    ]
    assert [tokenizer.is_truncated("a" * n) for n in (5, 6)] == [False, True]
    assert tokenizer.vocab_size == end + 1


def test_canonical_texts_are_those_of_transformers(monkeypatch):
    # Its module needs this package for reading vocabularies only.
    monkeypatch.setitem(sys.modules, "sentencepiece", types.ModuleType("sentencepiece"))
    from transformers.models.siglip.tokenization_siglip import SiglipTokenizer

    theirs = types.SimpleNamespace(do_lower_case=True)
    theirs.remove_punctuation = lambda text: SiglipTokenizer.remove_punctuation(theirs, text)
    for text in [*TEXTS, "A\tB\n\n c!", "¿Qué?—“Sí”", "ÄÖÜ ẞ İ"]:
        assert canonical_text(text) == SiglipTokenizer.canonicalize_text(theirs, text)
    assert canonical_text(" A cat, (two) ") == "a cat two"
    tokenizer = ByteTokenizer(9, canonical=True)
    np.testing.assert_array_equal(tokenizer(["A-B!"]), ByteTokenizer(9, canonical=False)(["ab"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a usable tokenizer.json: EOF"),
        (b"\x80\x04", "is not a usable tokenizer.json: 'utf-8' codec"),
        (b"[" * 100_000, "is not a usable tokenizer.json: "),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}', "is not a usable"),
        (b'{"model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0}, '
         b'"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}}', "UNK"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "sets no padding token"),
    ],
)  # fmt: skip
def test_unusable_files_are_one_line(content, message):
    with pytest.raises(UsageError, match="--tokenizer NAME") as caught:
        FileTokenizer(content, None, 8, canonical=False, name="NAME")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_length_has_room_for_text(tmp_path):
    save_clip_tokenizer(tmp_path)
    assert opened(tmp_path, 3)(["the"]).shape == (1, 3)
    with pytest.raises(UsageError, match="--text_length 2 leaves no room for text"):
        opened(tmp_path, 2)


def test_half_of_a_surrogate_pair_is_no_text():
    with pytest.raises(ValueError, match="surrogates not allowed"):
        ByteTokenizer(4, canonical=False)(["\ud800"])


def test_the_padding_is_part_of_the_checksum(tmp_path):
    save_siglip_tokenizer(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    with_end, with_pad = (
        FileTokenizer(content, token, 8, canonical=False, name="NAME")
        for token in ("</s>", "<pad>")
    )
    assert (with_end.pad, with_pad.pad) == (1, 0)
    assert with_end.checksum != with_pad.checksum


# -- as flags name them ------------------------------------------------------------------


def resolved(flags, objective="siglip"):
    """The flags of a resolved run, and its tokenizer."""
    run = on_gpus(
        f"--fake_data --objective {objective} --model vit_tiny_patch16_224 --batch_size 8 "
        f"--text_depth 1 --text_width 16 --text_heads 2 {flags}"
    )
    return run.config.of(ImageTextConfig), open_tokenizer(run.config)


def test_the_vocabulary_follows_bytes():
    flags, tokenizer = resolved("--tokenizer bytes")
    assert flags.text_vocab_size == tokenizer.vocab_size == 257
    assert (tokenizer.length, tokenizer.canonical) == (64, True)
    flags, tokenizer = resolved("--tokenizer bytes", "clip")
    assert (tokenizer.length, tokenizer.canonical) == (77, False)
    flags, tokenizer = resolved("--tokenizer bytes --text_vocab_size 300 --no_canonical_text")
    assert (flags.text_vocab_size, tokenizer.canonical) == (300, False)
    flags, tokenizer = resolved("")
    assert (flags.text_vocab_size, tokenizer) == (32_000, None)


def test_a_file_or_its_folder_is_found(tmp_path):
    theirs = save_clip_tokenizer(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        flags, tokenizer = resolved(f"--tokenizer {path}", "clip")
        assert flags.tokenizer_checksum == tokenizer.checksum
        assert tokenizer(["the cat"])[0, :4].tolist() == theirs("the cat").input_ids
        resolved(f"--tokenizer {path} --tokenizer_checksum {tokenizer.checksum}", "clip")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer {0}/clip --text_vocab_size 100", "tokens, but --text_vocab_size is 100: use"),
        ("--tokenizer {0}/siglip --text_pool argmax", "use --text_pool last"),
        ("--tokenizer {0}/nothing", "cannot be read: No such file"),
        ("--tokenizer {0}", "cannot be read: "),
        ("--tokenizer {0}/large", "cannot be read: large has 3,221,225,472 bytes; the limit for"),
        ("--tokenizer {0}/clip --tokenizer_checksum 0123", "not 0123, with which the run was"),
        ("--tokenizer bytes --text_vocab_size 256", "use --text_vocab_size 257"),
        ("--tokenizer bytes --text_length 1", "--text_length 1 leaves no room for text"),
        ("--tokenizer hf-hub:nothing", "use hf-hub:OWNER/NAME"),
        ("--tokenizer_checksum 0123", "requires --tokenizer"),
    ],
)
def test_an_unsuitable_tokenizer_is_one_line(flags, message, tmp_path):
    save_clip_tokenizer(tmp_path / "clip")
    save_siglip_tokenizer(tmp_path / "siglip")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(UsageError) as caught:
        resolved(flags.format(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_used_checkpoint_brings_its_copy(tmp_path):
    save_clip_tokenizer(tmp_path / "made")
    named = f"--tokenizer {tmp_path}/made"
    _, before = resolved(named, "clip")
    checksum = f"--tokenizer_checksum {before.checksum}"
    (tmp_path / "run" / "step_5").mkdir(parents=True)
    save_copy(
        on_gpus(f"--fake_data --objective clip --model vit_tiny_patch16_224 {named}").config,
        tmp_path / "run",
    )
    (tmp_path / "made").rename(tmp_path / "moved")
    for used in (f"--ckpt_dir {tmp_path}/run", f"--resume {tmp_path}/run/step_5"):
        _, after = resolved(f"{named} {checksum} {used}", "clip")
        assert after.checksum == before.checksum
        np.testing.assert_array_equal(after(["the cat"]), before(["the cat"]))
        with pytest.raises(UsageError, match="No such file"):  # of a new run
            resolved(f"{named} {used}", "clip")
