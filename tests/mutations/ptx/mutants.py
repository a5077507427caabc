"""Seeded mutants of the committed PTX: an original and a candidate that violates it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from nostall.ptx.safety.validate import Validator
from tests.corpus.ptx_catalogue import ptx_texts
from tests.mutations.ptx.content_violations import CONTENTS
from tests.mutations.ptx.lines import Text
from tests.mutations.ptx.order_violations import ORDERS, Finder

VIOLATIONS: dict[str, Finder] = {**ORDERS, **CONTENTS}
"""Kind of violation -> finder of places for it."""
_MOST_PLACES = 20_000
"""Places of one kind in one text that are considered."""


@dataclass(frozen=True)
class Mutant:
    """One seeded violation."""

    kind: str
    text: str
    """Name of the PTX text."""
    original: str
    candidate: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.text}"


@lru_cache
def all_texts() -> tuple[Text, ...]:
    """The PTX texts of the corpus as lines."""
    return tuple(Text.parse(name, text) for name, text in ptx_texts().items())


@lru_cache(maxsize=64)
def validator(original: str) -> Validator:
    """The validator of an original; the same object for the same text."""
    return Validator(original, dependents_wait=True)


def mutants(kind: str, per_text: int, texts: tuple[Text, ...] | None = None) -> Iterator[Mutant]:
    """Up to ``per_text`` different mutants of a kind from each text, from fixed seeds."""
    for text in all_texts() if texts is None else texts:
        edits = list(islice(VIOLATIONS[kind](text), _MOST_PLACES))
        rng = random.Random(zlib.crc32(f"{kind} {text.name}".encode()))
        for prepare, change in rng.sample(edits, min(per_text, len(edits))):
            original, candidate = prepare.apply(text), change.apply(text)
            if original != candidate:
                yield Mutant(kind, text.name, original, candidate)
