"""Damage to files of text and bytes: what disks, editors and attackers make of them, by a seed."""

import random
import re
from collections.abc import Callable, Iterator

_NUMBERS = (
    "0 -1 1 0.0 -0.0 1e400 -1e400 1e308 1e-308 1e18 4e9 3e9 1.5 NaN Infinity -Infinity true null "
    "9223372036854775808 1700000000.0 "
).split()
NUMBERS = [*_NUMBERS, "9" * 400, "-" + "9" * 400, "9" * 5000, "1" + "0" * 309]
TEXTS = ['""', '"x"', '"\\u0000"', '"\\ud800"', '"../../x"', '"/etc/passwd"', '"🧪"', '"%s{}"']
NESTED = ["[]", "{}", "[1]", '{"x": 1}', "[" * 30_000, '{"a":' * 30_000, "[" * 900 + "]" * 900]
VALUES = [*NUMBERS, *TEXTS, *NESTED, '"' + "x" * 100_000 + '"']
WHOLE = [b"", b"\n", b"\0", b"\xff\xfe", b"[]", b"null", b"3", b'"x"', b"{}", b"[" * 30_000, b"\r"]

_VALUE = re.compile(rb'(?<=: )(?:"[^"]*"|[-\w.+]+|\[[^\[\]]*\])')
_NUMBER = re.compile(rb"(?<=[ ,\[(])-?\d[\d.e+-]*")
_NAME = re.compile(rb'"[^"]*"(?=: )')

Damage = Callable[[bytes, random.Random], bytes]


def _replace(pattern: re.Pattern[bytes], values: list[str]) -> Damage:
    """Replace one match by one of the values."""

    def replace(content: bytes, rng: random.Random) -> bytes:
        if not (found := [*pattern.finditer(content)]):
            return content
        place = rng.choice(found)
        return content[: place.start()] + rng.choice(values).encode() + content[place.end() :]

    return replace


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(content: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return rng.choice([content[:start], content[end:], content[:start] + content[end:]])


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    garbage = [b"\0" * 9, rng.randbytes(50), b"\n", b"\r\n", b"\xef\xbb\xbf", b"x" * 3_000_000]
    return content[:at] + rng.choice(garbage) + content[at:]


def _lines(content: bytes, rng: random.Random) -> bytes:
    """Lose, double or mix lines, or end them as Windows and old Macs did."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    number, kind = rng.randrange(len(lines)), rng.randrange(6)
    if kind == 0:
        del lines[number]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), lines[number])
    elif kind == 2:
        rng.shuffle(lines)
    elif kind == 3:
        lines[number] = lines[number].rstrip(b"\n")
    elif kind == 4:
        lines = [b"\xef\xbb\xbf", *(line.replace(b"\n", b"\r\n") for line in lines)]
    else:
        lines = [line.replace(b"\n", b"\r") for line in lines]
    return b"".join(lines)


_DAMAGE: list[Damage] = [
    *[_replace(_VALUE, VALUES)] * 4,
    *[_replace(_NUMBER, NUMBERS)] * 4,
    _replace(_NAME, TEXTS),
    _flip,
    _cut,
    _insert,
    _lines,
    lambda content, rng: rng.choice(WHOLE),
]


def damaged(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """So many damaged forms of a file, each with one to three damages."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = content
        for _ in range(rng.choice([1, 1, 2, 3])):
            changed = rng.choice(_DAMAGE)(changed, rng)
        yield changed
