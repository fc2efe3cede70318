"""From texts to tokens: tokenizers, and the canonical form of a text."""

from __future__ import annotations

import abc
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from data.files import printable
from training.errors import UsageError

BYTES = "bytes"
"""The name of the tokenizer that needs no file."""


class Tokenizer(abc.ABC):
    """Maps texts to tokens, whose numbers are below ``vocab_size``."""

    vocab_size: int
    end: int | None
    """The token that ends each text, also a truncated one; None: there is none."""
    pad: int
    """The token that follows a text that is shorter than ``length``."""
    checksum: str
    """Identifies what the tokens of a text are, besides ``length`` and ``canonical``."""

    def __init__(self, name: str, length: int, specials: int, *, canonical: bool) -> None:
        """``length``: number of tokens of a text, of which ``specials`` are the same in each.
        ``canonical``: whether texts become ``canonical_text`` first. Raises UsageError."""
        if length <= specials:
            raise UsageError(
                f"--text_length {length} leaves no room for text: --tokenizer {name} adds "
                f"{specials} to each: use a larger --text_length"
            )
        self.length, self.canonical = length, canonical

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the tokens of texts, (texts, length), int32, truncated or padded. Raises
        ValueError for a text that is not valid Unicode."""
        tokens = np.full((len(texts), self.length), self.pad, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            found, _ = self._encode(self._prepared(text))
            row[: len(found)] = found
        return tokens

    def is_truncated(self, text: str) -> bool:
        """Return whether a text has more tokens than ``length``."""
        return self._encode(self._prepared(text))[1]

    def _prepared(self, text: str) -> str:
        text.encode()  # not half of a surrogate pair, as JSON may contain
        return canonical_text(text) if self.canonical else text

    @abc.abstractmethod
    def _encode(self, text: str) -> tuple[Sequence[int], bool]:
        """Return the tokens of a text, at most ``length``, and whether others are left out."""


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical_text(text: str) -> str:
    """Return ``text`` in lower case, without punctuation (of ASCII) and with single spaces, as
    big_vision's ``canonicalize_text``, which transformers' ``SiglipTokenizer`` has, too."""
    return re.sub(r"\s+", " ", text.lower().translate(_PUNCTUATION)).strip()


class ByteTokenizer(Tokenizer):
    """The bytes of a text in UTF-8, then one or more of the token ``end``, which has the largest
    number, as ``--text_pool argmax`` needs it."""

    vocab_size = 257
    end = pad = 256
    checksum = BYTES

    def __init__(self, length: int, *, canonical: bool) -> None:
        super().__init__(BYTES, length, 1, canonical=canonical)

    def _encode(self, text: str) -> tuple[Sequence[int], bool]:
        content = text.encode()
        return [*content[: self.length - 1], self.end], len(content) >= self.length


class FileTokenizer(Tokenizer):
    """A tokenizer of the library ``tokenizers``, in the format of its ``tokenizer.json``."""

    def __init__(
        self, content: bytes, pad_token: str | None, length: int, *, canonical: bool, name: str
    ) -> None:
        """``content``: of the file ``name``. ``pad_token``: used unless the file sets the padding.
        Raises UsageError."""
        self._tokenizer = tokenizer = _parsed(content, name)
        padding = tokenizer.padding
        tokenizer.no_padding()
        specials = tokenizer.encode("").ids
        super().__init__(name, length, len(specials), canonical=canonical)
        tokenizer.enable_truncation(length)
        pad = padding["pad_id"] if padding else pad_token and tokenizer.token_to_id(pad_token)
        if pad is None:
            what = f"has no token {pad_token!r}" if pad_token else "sets no padding token"
            raise UsageError(
                f"--tokenizer {name} {what}: name one as pad_token in tokenizer_config.json beside "
                "it"
            )
        self.pad, self.end = int(pad), specials[-1] if specials else None
        numbers = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(self.pad, *numbers) + 1
        self.checksum = xxhash.xxh3_64_hexdigest(content + f"\n{self.pad}".encode())

    def _encode(self, text: str) -> tuple[Sequence[int], bool]:
        found = self._tokenizer.encode(text)
        return found.ids, bool(found.overflowing)


def _parsed(content: bytes, name: str) -> Any:
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError:
        raise UsageError(
            f"--tokenizer {name} requires the package tokenizers: python3 -m pip install tokenizers"
        ) from None
    try:
        tokenizer = LibraryTokenizer.from_str(content.decode())
        tokenizer.encode(_UNKNOWN)
    except Exception as error:  # noqa: BLE001 - it raises what it likes
        reason = printable(" ".join(str(error).split()))[:200]
        raise UsageError(f"--tokenizer {name} is not a usable tokenizer.json: {reason}") from None
    return tokenizer


_UNKNOWN = "a \U0010ffff"
"""A text with a character that no vocabulary has: a damaged file may fail at the first one only."""
