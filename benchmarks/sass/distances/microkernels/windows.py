"""Windows: the loop that runs one pair at one distance, and reports result and cycles of each pass.

A window sets the target register to the stale value, reads the clock, issues the producer and the
consumer at the wanted distance, reads the clock again, and stores a hash of the result together
with its first words and the elapsed cycles.  All other instructions are settled: 15 cycles apart,
each behind the scoreboard of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from benchmarks.sass.distances.microkernels import registers as r
from benchmarks.sass.distances.microkernels.consumers import Result
from benchmarks.sass.distances.microkernels.lines import (
    Align,
    Item,
    Label,
    Line,
    jump,
    line,
    nops,
    number,
    scoreboards,
    settled,
)
from benchmarks.sass.distances.microkernels.pairs import Pair
from benchmarks.sass.distances.microkernels.reuse_flags import reuse_flags
from benchmarks.sass.distances.microkernels.words import PT, word

Spacing = Literal["stall", "yield", "nops", "burst", "reuse"]
"""What fills the distance: the producer's stall without or with yield, NOPs of one cycle, or the
stall with all reuse flags of both instructions.  ``burst``: the stall, behind instructions that
keep the producer's unit busy."""
SPACINGS: tuple[Spacing, ...] = ("stall", "yield", "nops", "burst", "reuse")
BURST_LENGTH, BURST_STALL = 6, 2
SAFE_DISTANCE = 66
"""Distance of the reference window, beyond every fixed latency."""
PASSES = 8
"""Passes of each window; from the second on its instructions are in the instruction cache."""
THREADS = 512
LEAD = TAIL = 15
"""Cycles from the first clock read to the next instruction, and from the consumer to the second."""
_MAX_STALL, _MAX_YIELDING_STALL = 11, 15
_CONSUMER_SB = 1
_OTHER_PREDICATE = 4


@dataclass(frozen=True, slots=True)
class Window:
    """One pair at one distance."""

    distance: int
    spacing: Spacing
    produces: bool = True
    """False for the blind window, which gives what a too short distance gives: a NOP replaces the
    producer (RAW) or the second writer (WAW), or the writer issues before the reader (WAR)."""
    stale_words: int = 0
    """Bit mask of the words of the result that are stale again when the consumer reads them."""

    @property
    def lead(self) -> int:
        """Cycles from the first clock read to the first instruction of the pair."""
        return LEAD + (BURST_LENGTH * BURST_STALL if self.spacing == "burst" else 0)


REFERENCE = Window(SAFE_DISTANCE, "stall")
BLIND = Window(SAFE_DISTANCE, "stall", produces=False)


def window_items(pair: Pair, window: Window, name: str, alignment: int) -> list[Item]:
    """The items of a window's loop.

    ``name``: prefix of its labels.  ``alignment``: position of the first clock read, modulo 8.
    """
    head, tail = _around(pair)
    if window.stale_words:
        return looped([*head, *_torn(pair, window), *tail], name)
    return looped([*head, Align(alignment), *_tested(pair, window, name), *tail], name)


def looped(body: Sequence[Item], name: str) -> list[Item]:
    """A loop of PASSES passes; the body counts them."""
    begin = [line("MOV R{d}, {i}", d=r.PASS, i=0), Label(f"{name}.loop")]
    end = [
        line("ISETP.LT.AND P{pd}, PT, R{a}, R{b}, PT", pd=r.P_LOOP, a=r.PASS, b=r.OTHER_TEMPORARY),
        *nops(1),
        jump(f"{name}.loop", f"P{r.P_LOOP}"),
    ]
    return [*begin, *body, *end]


def _tested(pair: Pair, window: Window, name: str) -> list[Item]:
    """The clock reads with the pair between them."""
    (first_form, first), (second_form, second) = ordered(pair, window)
    flags = (0, 0)
    if window.spacing == "reuse" and window.produces:
        flags = (reuse_flags(first_form, first), reuse_flags(second_form, second))
    sets = scoreboards(second_form, _CONSUMER_SB)
    last = Line(second, **sets)
    if flags[1]:
        last = Line(second, stall=_MAX_STALL, yields=False, reuse=flags[1], **sets)
    items: list[Item] = [line("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_BEFORE)]
    if window.spacing == "burst":
        items += _burst(pair)
    items += spaced(first, window.distance, window.spacing, flags[0])
    if pair.consumer.form == "BRA":
        items += [jump(f"{name}.skip", f"P{r.P_TARGET}"), _mov("RESULT", "B"),
                  Label(f"{name}.skip")]  # fmt: skip
    else:
        items.append(last)
        if flags[1]:
            items.append(Line(word("NOP"), stall=TAIL - _MAX_STALL))
    items.append(line("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_AFTER))
    return items


def _burst(pair: Pair) -> list[Item]:
    """Instructions of the producer's form that write other registers."""
    others = {"R": range(76, 76 + 4 * BURST_LENGTH, 4), "UR": range(32, 32 + 2 * BURST_LENGTH, 2)}
    targets = others.get(pair.producer.file, [_OTHER_PREDICATE] * BURST_LENGTH)
    return [
        Line(producer_word(pair, target), stall=BURST_STALL, yields=False) for target in targets
    ]


def ordered(pair: Pair, window: Window) -> tuple[tuple[str, int], tuple[str, int]]:
    """(form, word) of the first and of the second instruction of a window."""
    producer = (pair.producer.form, producer_word(pair))
    consumer = (pair.consumer.form, consumer_word(pair))
    nop = ("NOP", word("NOP"))
    if pair.kind == "RAW":
        return (producer if window.produces else nop), consumer
    if pair.kind == "WAW":
        return producer, (consumer if window.produces else nop)
    return (consumer, producer) if window.produces else (producer, consumer)


def _torn(pair: Pair, window: Window) -> list[Item]:
    """The producer, moves that make words of its result stale again, and the consumer; settled.

    The clock reads are not timed: results of the window serve for comparison only.
    """
    target = target_register(pair)
    moves = [
        line("MOV R{d}, R{b}", d=target + k, b=r.STALE_PAIR + k % 2)
        for k in range(pair.joint_words)
        if window.stale_words >> k & 1
    ]
    consumer = Line(consumer_word(pair), **scoreboards(pair.consumer.form, _CONSUMER_SB))
    clocks = [line("CS2R.32 R{d}, SR_CLOCKLO", d=d) for d in (r.CLOCK_BEFORE, r.CLOCK_AFTER)]
    return [*clocks, *spaced(producer_word(pair), window.distance, "stall"), *moves, consumer]


def spaced(first: int, distance: int, spacing: Spacing, reuse: int = 0) -> list[Item]:
    """The first instruction and NOPs, which together last ``distance`` cycles."""
    stalls: list[tuple[int, bool]] = []
    remaining = distance
    while remaining:
        if spacing == "nops":
            part = (1, False)
        elif spacing == "yield":
            part = (min(remaining, _MAX_YIELDING_STALL), True)
        elif distance <= _MAX_YIELDING_STALL and not reuse:
            part = (remaining, remaining > _MAX_STALL)
        else:
            part = (min(remaining, _MAX_STALL), False)
        stalls.append(part)
        remaining -= part[0]
    words = [first] + [word("NOP")] * (len(stalls) - 1)
    return [
        Line(payload, stall=stall, yields=yields, reuse=0 if at else reuse)
        for at, (payload, (stall, yields)) in enumerate(zip(words, stalls, strict=True))
    ]


def target_register(pair: Pair) -> int:
    """The first register that the producer writes, in the file of the pair."""
    file = pair.producer.file
    if file in ("P", "UP"):
        return r.P_TARGET
    if file == "UR":
        return r.U_TARGET
    return r.TARGET + (pair.word if pair.producer.words == 1 else 0)


def producer_word(pair: Pair, result: int | None = None) -> int:
    """The producer's word; ``result``: register that it writes instead of the target."""
    producer, target = pair.producer, target_register(pair)
    sources = {"SOURCE": r.FRESH_PAIR, "U_SOURCE": r.U_FRESH}
    if producer.file == "R":
        sources["SOURCE"] += (target - r.TARGET) & 1
    fields = {f: sources[n] if n in sources else number(n) for f, n in producer.operands}
    fields[producer.target_field] = target if result is None else result
    return word(producer.form, **fields)


def consumer_word(pair: Pair) -> int:
    """The consumer's word."""
    consumer = pair.consumer
    fields = {field: number(name) for field, name in consumer.operands}
    results = {"d": r.RESULT, "ud": r.U_RESULT, "pd": r.P_RESULT}
    fields = {**results, **fields}
    guard = ""
    if consumer.port == "guard":
        guard = f"P{r.P_TARGET}"
    elif pair.producer.file in ("P", "UP"):
        fields[consumer.port] = r.P_TARGET
    elif pair.producer.file == "UR":
        fields[consumer.port] = r.U_TARGET + pair.part
    else:
        fields[consumer.port] = r.TARGET + (pair.part if consumer.width == 1 else 0)
    return word(consumer.form, guard, **fields)


@lru_cache(64)
def _around(pair: Pair) -> tuple[list[Item], list[Item]]:
    """The settled lines before and after the tested part of a window."""
    steps = [_step(step) for step in pair.consumer.before]
    head = [*loaded_values(), *_prepared(pair), *steps, *nops(2)]
    after = [_step(step) for step in pair.consumer.after]
    result = pair.consumer.result
    if pair.kind == "WAW":
        after, result = _final_value(pair)
    tail = [*nops(4), *after, *reported(result)]
    return settled(head), settled(tail, waits=1 << _CONSUMER_SB)


def _final_value(pair: Pair) -> tuple[list[Line], Result]:
    """Lines that copy the register of a WAW pair to the result, and the file of the result."""
    target, part = target_register(pair), pair.part if pair.producer.words > 1 else 0
    copy = "PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0"
    uniform_copy = "PLOP3.LUT P{pd}, PT, PT, PT, UP{p3}, 0x80, 0x0"
    final: dict[str, tuple[Result, str, dict[str, int]]] = {
        "R": ("R", "MOV R{d}, R{b}", {"d": r.RESULT, "b": target + part}),
        "UR": ("R", "MOV R{d}, UR{ub}", {"d": r.RESULT, "ub": target + part}),
        "P": ("P", copy, {"pd": r.P_RESULT, "ps": target, "p2": PT, "p3": PT}),
        "UP": ("P", uniform_copy, {"pd": r.P_RESULT, "p3": target}),
    }
    result, form, fields = final[pair.producer.file]
    return [line(form, **fields)], result


def loaded_values() -> list[Item]:
    """Lines that load the values of the pass, copy them into pairs, and preset the result."""
    load = [
        line("IMAD.WIDE.U32 R{d}, R{a}, {i}, R{c}", d=r.IN, a=r.PASS, i=16 * THREADS, c=r.IN_BASE),
        line("IMAD.WIDE.U32 R{d}, R{a}, {i}, R{c}", d=r.OUT, a=r.RECORD, i=16 * THREADS,
             c=r.OUT_BASE),
        line("LDG.E.128 R{d}, desc[UR4][R{a}.64]", d=r.FRESH, a=r.IN),
    ]  # fmt: skip
    copies = [
        line("MOV R{d}, R{b}", d=r.FRESH_PAIR + k, b=b)
        for k, b in enumerate((r.FRESH, r.FRESH_HIGH, r.STALE, r.STALE_HIGH))
    ]
    presets = [
        line("MOV R{d}, R{b}", d=r.RESULT + k, b=number("B" if k else "A")) for k in range(4)
    ]
    return [*load, *copies, *presets]


def _prepared(pair: Pair) -> list[Item]:
    """Lines that set target and result registers to stale and fixed values."""
    producer, consumer = pair.producer, pair.consumer
    is_not_zero = "ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT"
    lines: list[Item] = []
    if {producer.file, consumer.file, consumer.result} & {"UR", "UP"}:
        lines += _uniform_prepared(pair)
    lines.append(line(is_not_zero, pd=r.P_FRESH, a=r.FRESH, b=number("ZERO")))
    lines.append(line(is_not_zero, pd=r.P_RESULT, a=number("ZERO"), b=number("ZERO")))
    if producer.file == "P":
        lines.append(line(is_not_zero, pd=r.P_TARGET, a=r.STALE, b=number("ZERO")))
    if producer.label == "P2R>R":
        lines.append(line(is_not_zero, pd=r.P_TARGET, a=r.FRESH, b=number("ZERO")))
    if producer.file == "R":
        first = target_register(pair) - r.TARGET
        produced = range(first, first + producer.words)
        lines += [
            line("MOV R{d}, R{b}", d=r.TARGET + k,
                 b=(r.STALE_PAIR if k in produced else r.FRESH_PAIR) + k % 2)
            for k in range(4)
        ]  # fmt: skip
    return lines


def _uniform_prepared(pair: Pair) -> list[Item]:
    lines: list[Item] = [
        line("R2UR UR{ud}, R{a}", ud=ud, a=a)
        for ud, a in zip(
            (r.U_FRESH, r.U_FRESH + 1, r.U_STALE, r.U_STALE + 1),
            range(r.FRESH_PAIR, r.FRESH_PAIR + 4),
            strict=True,
        )
    ]
    move = "UMOV UR{ud}, UR{ub}"
    zero = number("U_ZERO")
    is_not_zero = "UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT"
    lines += [line(move, ud=r.U_TARGET + k, ub=r.U_STALE + k) for k in range(2)]
    lines += [line(move, ud=r.U_RESULT, ub=zero)]
    lines.append(line(is_not_zero, pd=r.P_RESULT, ua=zero, ub=zero))
    if pair.producer.file == "UP":
        lines.append(line(is_not_zero, pd=r.P_TARGET, ua=r.U_STALE, ub=zero))
    return lines


def reported(result: Result) -> list[Item]:
    """Lines that store the result and count the pass.

    A record has four words: a hash of the result, the elapsed cycles, two words of the result.
    """
    select = line("SEL R{d}, R{a}, R{b}, P{ps}", d=r.RESULT, a=number("A"), b=number("B"),
                  ps=r.P_RESULT)  # fmt: skip
    to_predicate = line("PLOP3.LUT P{pd}, PT, PT, PT, UP{p3}, 0x80, 0x0", pd=r.P_RESULT,
                        p3=r.P_RESULT)  # fmt: skip
    final: dict[str, list[Item]] = {
        "R": [],
        "memory": [],
        "P": [select],
        "UP": [to_predicate, select],
        "UR": [line("MOV R{d}, UR{ub}", d=r.RESULT, ub=r.U_RESULT)],
    }
    raw = [line("MOV R{d}, R{b}", d=r.RAW_RESULT + k, b=r.RESULT + k) for k in range(2)]
    mix = [
        line("IMAD R{d}, R{a}, {i}, R{c}", d=r.RESULT, a=r.RESULT, i=0x9E3779B1, c=r.RESULT + k)
        for k in range(1, 4)
    ]
    cycles = [
        line("LOP3.LUT R{d}, R{a}, R{b}, R{c}, 0x96, !PT", d=r.TEMPORARY, a=r.CLOCK_BEFORE,
             b=number("ZERO_MINUS_ONE"), c=number("ZERO")),
        line("IADD3 R{d}, R{a}, R{b}, R{c}", d=r.RESULT + 1, a=r.CLOCK_AFTER, b=r.TEMPORARY,
             c=number("ONE")),
    ]  # fmt: skip
    count = [
        line("VIADD R{d}, R{a}, {i}", d=r.PASS, a=r.PASS, i=1),
        line("VIADD R{d}, R{a}, {i}", d=r.RECORD, a=r.RECORD, i=1),
        line("MOV R{d}, {i}", d=r.OTHER_TEMPORARY, i=PASSES),
    ]
    store = [
        line("STG.E.64 desc[UR4][R{a}.64], R{b}", a=r.OUT, b=r.RESULT),
        line("VIADD R{d}, R{a}, {i}", d=r.OUT, a=r.OUT, i=8),
        line("STG.E.64 desc[UR4][R{a}.64], R{b}", a=r.OUT, b=r.RAW_RESULT),
    ]
    return [*final[result], *raw, *mix, *cycles, *store, *count]


def _step(step: tuple[str, str, str]) -> Line:
    guard, form, text = step
    pairs = (item.partition("=") for item in text.split())
    return line(form, guard, **{field: number(name) for field, _, name in pairs})


def _mov(target: str, source: str) -> Line:
    return line("MOV R{d}, R{b}", d=number(target), b=number(source))
