"""Tested pairs: two instructions that access one register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.sass.distances.microkernels.consumers import CONSUMERS, Consumer, Values
from benchmarks.sass.distances.microkernels.producers import PRODUCERS, Producer
from nostall.sass.safety.pairing import HazardKind

_ADDRESSES = ("shared", "global", "global_high", "constant", "offset")
_NEEDS_IDENTITY = (*_ADDRESSES, "shift")


@dataclass(frozen=True, slots=True)
class Pair:
    """A producer and a consumer port, with the words of the result and of the port that meet."""

    producer: Producer
    consumer: Consumer
    part: int
    """Word of the result that meets ``word``; wide results meet wide ports in all their words."""
    word: int
    """Word of the port that is read from the producer."""
    kind: HazardKind = "RAW"
    """RAW and WAW: the producer issues first.  WAR: the consumer does.  The consumer of a WAW pair
    is another writer of the same register."""

    @property
    def name(self) -> str:
        """Label of the pair, unique in :func:`all_pairs`."""
        consumer = self.consumer
        high = ":high" if consumer.values == "global_high" else ""
        part = f"+{self.part}" if self.producer.words > 1 else ""
        word = f"+{self.word}" if consumer.width > 1 else ""
        form = self.producer.form
        carry = ":carry" if self.producer.file == "R" and "P{pd}" in form else ""
        written, read = f"{self.producer.label}{carry}{part}", f"{consumer.label}{word}{high}"
        if self.kind == "WAR":
            return f"WAR:{read}|{written}"
        return f"{'' if self.kind == 'RAW' else 'WAW:'}{written}|{read}"

    @property
    def joint_words(self) -> int:
        """Words of the result that the port reads together; 1 unless both are wide."""
        if self.kind != "RAW" or self.consumer.values in ("global", "global_high"):
            return 1
        return min(self.producer.words, self.consumer.width)

    @property
    def values(self) -> Values:
        """What fresh and stale values are; uniform producers need equal values in a warp."""
        values = self.consumer.values
        if values == "data" and (self.producer.file in ("UR", "UP") or self.consumer.file == "UR"):
            return "uniform"
        if self.producer.label.startswith("R2UR") and values == "data":
            return "uniform"
        return values


def all_pairs() -> tuple[Pair, ...]:
    """All RAW pairs, every producer with every port that can read its result."""
    return tuple(
        Pair(producer, consumer, part, word)
        for producer in PRODUCERS
        for consumer in CONSUMERS
        if producer.file == consumer.file and _fits(producer, consumer)
        for part, word in _meetings(producer, consumer)
    )


def _fits(producer: Producer, consumer: Consumer) -> bool:
    """Whether every value that the producer may leave is harmless at the port."""
    return producer.is_identity or consumer.values not in _NEEDS_IDENTITY


def _meetings(producer: Producer, consumer: Consumer) -> Iterator[tuple[int, int]]:
    """(word of the result, word of the port) of each way in which they can meet."""
    if consumer.values == "global_high":
        yield (1, 1) if producer.words > 1 else (0, 1)
    elif consumer.values == "global":
        yield 0, 0
    elif consumer.width == 1:
        parts = 1 if consumer.values in _ADDRESSES else min(producer.words, 2)
        yield from ((part, 0) for part in range(parts))
    elif producer.words == 1:
        yield from ((0, word) for word in range(min(consumer.width, 2)))
    else:
        yield 0, 0
