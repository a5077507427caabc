"""Tested pairs whose second instruction overwrites a register: WAW and WAR."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.sass.distances.microkernels.consumers import CONSUMERS, Consumer
from benchmarks.sass.distances.microkernels.pairs import Pair
from benchmarks.sass.distances.microkernels.producers import PRODUCERS, File

_SECOND_FORMS = (
    "IADD3 R{d}, R{a}, R{b}, R{c}",
    "MOV R{d}, R{b}",
    "IMAD.MOV.U32 R{d}, RZ, RZ, R{c}",
    "FADD R{d}, R{a}, R{b}",
    "HADD2 R{d}, R{a}, R{b}",
    "ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT",
    "PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0",
    "UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc}",
    "UMOV UR{ud}, UR{ub}",
    "ULDC UR{ud}, c[0x0][0x220]",
    "UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT",
)
"""Fast producers that overwrite what an earlier instruction of a WAR pair reads."""


def _writer(file: File, form: str, port: str, operands: str) -> Consumer:
    pairs = (item.partition("=") for item in operands.split())
    named = tuple((field, name) for field, _, name in pairs)
    values = "predicate" if file in ("P", "UP") else "data"
    return Consumer(form, port, named, file, values=values)  # type: ignore[arg-type]


WRITERS: tuple[Consumer, ...] = (
    _writer("R", "IADD3 R{d}, R{a}, R{b}, R{c}", "d", "a=A b=ZERO c=ZERO"),
    _writer("R", "MOV R{d}, R{b}", "d", "b=A"),
    _writer("R", "IMAD.MOV.U32 R{d}, RZ, RZ, R{c}", "d", "c=A"),
    _writer("R", "FADD R{d}, R{a}, R{b}", "d", "a=A b=FLOAT_ZERO"),
    _writer("R", "HADD2 R{d}, R{a}, R{b}", "d", "a=A b=HALF_ZERO"),
    _writer("P", "ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT", "pd", "a=ZERO b=ZERO"),
    _writer("P", "PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0", "pd", "ps=NO p2=PT p3=PT"),
    _writer("UR", "UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc}", "ud", "ua=U_A ub=U_ZERO uc=U_ZERO"),
    _writer("UR", "UMOV UR{ud}, UR{ub}", "ud", "ub=U_A"),
    _writer("UR", "ULDC UR{ud}, c[0x0][0x220]", "ud", ""),
    _writer("UP", "UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT", "pd", "ua=U_ZERO ub=U_ZERO"),
)
"""Second instructions of WAW pairs; each writes a fixed value."""


def overwrite_pairs() -> tuple[Pair, ...]:
    """All WAW pairs, then all WAR pairs."""
    return (*_double_writes(), *_overwritten_reads())


def _double_writes() -> Iterator[Pair]:
    for producer in PRODUCERS:
        for writer in WRITERS:
            if producer.file == writer.file:
                for part in range(min(producer.words, 2)):
                    yield Pair(producer, writer, part, 0, "WAW")


def _overwritten_reads() -> Iterator[Pair]:
    writers = [producer for producer in PRODUCERS if producer.form in _SECOND_FORMS]
    for reader in CONSUMERS:
        if not reader.has_fixed_latency or reader.form == "BRA":
            continue
        for writer in writers:
            if writer.file == reader.file:
                yield from (Pair(writer, reader, 0, word, "WAR") for word in range(reader.width))
