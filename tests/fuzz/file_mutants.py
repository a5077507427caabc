"""Mutations of files of any format: bytes, and tokens of text formats."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

FileMutation = Callable[[bytes, random.Random], bytes]

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_STRING = re.compile(rb'"[^"\\\n]{0,200}"')
_PUNCTUATION = re.compile(rb'[][{}":,;=\n]')
_ABSURD_NUMBERS = (
    *(b"0", b"-1", b"-0.0", b"1e999", b"-1e999", b"1e-320", b"NaN", b"inf", b"-Infinity", b"null"),
    *(b"2147483648", b"4294967295", b"9223372036854775808", b"18446744073709551615", b"1e30"),
    *(
        b"9" * 400,
        b"9" * 5000,
        b"4096",
        b"0" * 50,
        b"0x1f",
        b"1_000",
        b"true",
        b'"7"',
        b'"x"',
        b"[]",
        b"{}",
        b"1.5",
    ),
    *(b"[" * 2000 + b"]" * 2000, b'{"a":' * 500 + b"1" + b"}" * 500),
)
_ABSURD_VALUES = (
    *(0, -1, 1.5, 7, 4096, 2**31, 2**53 + 1, 2**63, 10**30, 1e300, -1e300, 1e-300),
    *(float("inf"), float("nan"), True, False, "", "7", "x" * 3000, "\x1b[31m", "../../etc", "\0"),
    *([], {}, [[]], {"a": {}}, [1, 2], ["x"], [0] * 1000),
)
_ABSURD_STRINGS = (
    *(b'""', b'"\xff\xfe"', b'"\\ud800"', b'"\\q"', b'"\x1b[31m"', b'"\\u001b[2J"', b"null", b"7"),
    *(b'"' + b"A" * 100_000 + b'"', '"\u202e\u0000"'.encode(), b"[1, 2]", b'"../../etc"', b'"a,b"'),
)


def bit_flips(data: bytes, rng: random.Random) -> bytes:
    """Flip 1 to 64 bits anywhere."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if mutant:
            mutant[rng.randrange(len(mutant))] ^= 1 << rng.randrange(8)
    return bytes(mutant)


def byte_runs(data: bytes, rng: random.Random) -> bytes:
    """Write a run of equal or random bytes anywhere."""
    length = rng.choice((1, 4, 16, 64, 512))
    run = rng.choice((b"\0" * length, b"\xff" * length, rng.randbytes(length)))
    at = rng.randrange(len(data) + 1)
    return (data[:at] + run + data[at + length :])[: len(data)]


def truncation(data: bytes, rng: random.Random) -> bytes:
    """Keep only the beginning of the file."""
    return data[: rng.choice((rng.randrange(65), rng.randrange(len(data) + 1)))]


def removal(data: bytes, rng: random.Random) -> bytes:
    """Cut a piece out, so that everything after it moves."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 8, 16, 100, 1000)) :]


def insertion(data: bytes, rng: random.Random) -> bytes:
    """Insert noise, or a piece of the file."""
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    length = rng.choice((1, 3, 16, 200, 3000))
    piece = rng.choice((rng.randbytes(length), data[other : other + length], b"\0" * length))
    return data[:at] + piece + data[at:]


def repetition(data: bytes, rng: random.Random) -> bytes:
    """Copy a piece of the file over another one."""
    start, at = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    length = rng.choice((4, 16, 64, 1024))
    return (data[:at] + data[start : start + length] + data[at + length :])[: len(data)]


def doubling(data: bytes, rng: random.Random) -> bytes:
    """Append the file, or text that does not belong to it."""
    return data + rng.choice((data, b"\n", b" trailing", b"\0" * 999, b"}]}" * 9, data[::-1]))


def numbers(data: bytes, rng: random.Random) -> bytes:
    """Replace numbers by absurd ones and by other values."""
    return _replace_tokens(data, rng, _NUMBER, _ABSURD_NUMBERS)


def strings(data: bytes, rng: random.Random) -> bytes:
    """Replace strings by absurd ones and by other values."""
    return _replace_tokens(data, rng, _STRING, _ABSURD_STRINGS)


def punctuation(data: bytes, rng: random.Random) -> bytes:
    """Replace brackets, quotes, separators and line ends by others."""
    others = tuple(bytes([byte]) for byte in b'[]{}":,;=\n\r x')
    return _replace_tokens(data, rng, _PUNCTUATION, others)


def exchanged_values(data: bytes, rng: random.Random) -> bytes:
    """Replace strings by other strings of the file, so that keys and values are exchanged."""
    return _replace_tokens(data, rng, _STRING, tuple(set(_STRING.findall(data))) or (b'""',))


def json_values(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove or repeat values of a JSON document, which stays JSON."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return numbers(data, rng)
    places = _places(document)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not places:
            break
        container, key = rng.choice(places)
        other, other_key = rng.choice(places)
        try:
            value = container[key]
            changed = rng.choice((rng.choice(_ABSURD_VALUES), other[other_key], [value], None))
            if isinstance(value, list) and rng.random() < 0.3:
                changed = rng.choice((value[:-1], value * 2, value[::-1], value * 40))
            if rng.random() < 0.15:
                del container[key]
            else:
                container[key] = changed
        except (LookupError, TypeError):
            continue  # an earlier change removed this place
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):  # the document contains itself
        return numbers(data, rng)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of each value of a JSON document."""
    places: list[tuple[Any, Any]] = []
    containers = [document]
    while containers:
        container = containers.pop()
        if not isinstance(container, dict | list):
            continue
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            places.append((container, key))
            containers.append(value)
    return places


def lines(data: bytes, rng: random.Random) -> bytes:
    """Remove, repeat or reorder lines."""
    rows = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 5))):
        i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
        rows[i : i + 1] = rng.choice(([], [rows[j]], [rows[i], rows[i]], [rows[i]] * 50))
        rows = rows or [b""]
    return b"\n".join(rows)


def encodings(data: bytes, rng: random.Random) -> bytes:
    """Another encoding: byte order marks, UTF-16, gzip, a damaged gzip stream."""
    packed = gzip.compress(data, mtime=0)
    text = data.decode(errors="replace")
    return rng.choice(
        (
            *(b"\xef\xbb\xbf" + data, text.encode("utf-16"), text.encode("utf-16-be"), packed),
            *(packed[: rng.randrange(len(packed))], bit_flips(packed, rng), gzip.compress(packed)),
            *(data.replace(b"\n", b"\r\n"), data.replace(b"\n", b"\r"), b""),
        )
    )


def _replace_tokens(
    data: bytes, rng: random.Random, pattern: re.Pattern[bytes], others: Sequence[bytes]
) -> bytes:
    tokens = list(pattern.finditer(data))
    if not tokens:
        return bit_flips(data, rng)
    for token in sorted(
        rng.sample(tokens, min(len(tokens), rng.choice((1, 1, 2, 10)))),
        key=lambda match: -match.start(),
    ):
        data = data[: token.start()] + rng.choice(others) + data[token.end() :]
    return data


BINARY_MUTATIONS: tuple[FileMutation, ...] = (
    bit_flips,
    byte_runs,
    truncation,
    removal,
    insertion,
    repetition,
    doubling,
)
"""Mutations for files of any format."""

TEXT_MUTATIONS: tuple[FileMutation, ...] = (
    *BINARY_MUTATIONS,
    numbers,
    numbers,
    json_values,
    json_values,
    json_values,
    strings,
    punctuation,
    exchanged_values,
    lines,
    encodings,
)
"""Mutations for JSON, CSV and TOML."""


def mutate(data: bytes, mutations: Sequence[FileMutation], rng: random.Random) -> tuple[str, bytes]:
    """(names of the mutations, mutant); in a quarter of all mutants two mutations are combined."""
    names = []
    for _ in range(1 + (rng.random() < 0.25)):
        mutation = rng.choice(mutations)
        data = mutation(data, rng)
        names.append(mutation.__name__)
    return "+".join(names), data
