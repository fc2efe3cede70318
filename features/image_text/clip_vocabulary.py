"""OpenAI's vocabulary of CLIP, ``bpe_simple_vocab_16e6.txt.gz``, as a ``tokenizer.json``.

The file, which CLIP's code and open_clip bring with them, has the merges of byte pairs, a line
each. All else is in their code (``simple_tokenizer.py``); here it is as in transformers'
``CLIPTokenizer``, which is what the weights on the Hub have. Unlike that code, it neither repairs
broken Unicode (ftfy) nor replaces HTML entities.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from data.files import TEXT

GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file."""
START, END = "<|startoftext|>", "<|endoftext|>"
_WORD_END = "</w>"
_MERGES = 48_894
"""The number of lines that count, after the first, which names the version; the file has more."""
_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


def tokenizer_of(content: bytes) -> bytes:
    """Return the ``tokenizer.json``, given the content of the compressed file. Raises ValueError if
    it is not such a file, or too large."""
    lines = _unpacked(content).decode().split("\n")
    merges = [line.split(" ") for line in lines[1 : _MERGES + 1] if line]
    if not lines[0].lstrip('"').startswith("bpe_simple_vocab") or any(len(m) != 2 for m in merges):
        raise ValueError("it is a gzip file, but not CLIP's bpe_simple_vocab_16e6.txt.gz")
    letters = _letters()
    tokens = [*letters, *(f"{letter}{_WORD_END}" for letter in letters), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate([*tokens, START, END])}
    return json.dumps(_tokenizer(vocabulary, merges)).encode()


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": vocabulary[token], "content": token, **plain, "special": True}
            for token in (START, END)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                {"type": "Lowercase"},
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _WORDS},
                    "behavior": "Removed",
                    "invert": True,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            ],
        },
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [END, vocabulary[END]],
            "cls": [START, vocabulary[START]],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "model": {
            "type": "BPE",
            "unk_token": END,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": _WORD_END,
            "fuse_unk": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _unpacked(content: bytes) -> bytes:
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)  # with the header of gzip
    try:
        found = unpacker.decompress(content, TEXT.size + 1)
    except zlib.error as error:
        raise ValueError(f"it is a damaged gzip file ({error})") from None
    TEXT.check(len(found), "its uncompressed content")
    if not unpacker.eof:
        raise ValueError("it is a truncated gzip file")
    return found


def _letters() -> list[str]:
    """Return what stands for each byte, in the order of their tokens: printable characters of
    Latin-1 for themselves, then all others, as characters from number 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(number) for number in [*printable, *range(256, 256 + others)]]
