"""Synthesised kernels: the pair is at the wanted distance, and nothing else depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.sass.distances.microkernels.consumers import CONSUMERS
from benchmarks.sass.distances.microkernels.kernel import (
    Experiment,
    build,
    experiment,
    framed,
    kernel_items,
)
from benchmarks.sass.distances.microkernels.lines import Item, Line, assemble
from benchmarks.sass.distances.microkernels.overwrites import WRITERS, overwrite_pairs
from benchmarks.sass.distances.microkernels.pairs import Pair, all_pairs
from benchmarks.sass.distances.microkernels.producers import PRODUCERS
from benchmarks.sass.distances.microkernels.reuse_flags import reuse_flags
from benchmarks.sass.distances.microkernels.windows import (
    SAFE_DISTANCE,
    SPACINGS,
    Spacing,
    Window,
    consumer_word,
    ordered,
    producer_word,
)
from benchmarks.sass.distances.microkernels.witnesses import CASES, VARIANTS, witness_items
from benchmarks.sass.distances.microkernels.words import word
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core.errors import BadInput
from nostall.sass.binary.encoding import REUSE, illegal_reason
from nostall.sass.program.program import Program
from tests.benchmarks.sass.distances.fake_prober import read_windows
from tests.benchmarks.sass.distances.test_words import disassembled

PAIRS = (*all_pairs(), *overwrite_pairs())
BY_NAME = {pair.name: pair for pair in PAIRS}
EXAMPLE = BY_NAME["DFMA>R+0|DADD.a+0"]


def lines_of(items: list[Item]) -> list[Line]:
    return [item for item in items if isinstance(item, Line)]


def test_every_producer_and_every_consumer_is_in_a_pair() -> None:
    assert len(BY_NAME) == len(PAIRS)
    assert {pair.producer for pair in PAIRS} == set(PRODUCERS)
    assert {pair.consumer for pair in PAIRS} == {*CONSUMERS, *WRITERS}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.integers(1, 44),
    st.sampled_from(SPACINGS),
    st.integers(0, 7),
)
def test_the_stalls_between_the_pair_sum_to_the_distance(
    template: bytes, pair: Pair, distance: int, spacing: Spacing, alignment: int
) -> None:
    subject = experiment(pair, alignment, [Window(distance, spacing)])
    rows = read_windows(build(template, subject), subject)
    rows = rows[:2] + rows[subject.comparisons :]
    expected = [(SAFE_DISTANCE, True), (SAFE_DISTANCE, False), (distance, True)]
    if pair.consumer.form == "BRA":  # the instruction that the branch skips lasts 15 more cycles
        expected = [(cycles + 15, produces) for cycles, produces in expected]
    assert [(cycles, produces) for cycles, _, produces, _ in rows] == expected
    assert all(place == (alignment + 1) % 8 for _, place, _, _ in rows)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(1, 44), st.sampled_from(SPACINGS))
def test_all_control_words_are_legal(pair: Pair, distance: int, spacing: Spacing) -> None:
    for line in lines_of(kernel_items(experiment(pair, 0, [Window(distance, spacing)]))):
        control = line.control
        assert illegal_reason(control) is None, (line, illegal_reason(control))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(1, 11), st.integers(1, 11))
def test_experiments_differ_in_the_stall_of_the_producer_only(
    template: bytes, pair: Pair, first: int, second: int
) -> None:
    cubins = [build(template, experiment(pair, 0, [Window(d, "stall")])) for d in (first, second)]
    different = [at for at, (a, b) in enumerate(zip(*cubins, strict=True)) if a != b]
    assert len({at // 16 for at in different}) == (first != second)
    assert all(at % 16 == 13 for at in different)  # bits 104 to 111 hold the stall field


def test_the_pair_is_what_was_asked(tmp_path: Path) -> None:
    pair = BY_NAME["IMAD.WIDE.U32>R+1|FFMA.b"]
    guard = BY_NAME["ISETP.NE.AND>P|LDS.guard"]
    twice = BY_NAME["WAW:DFMA>R+1|MOV.d"]
    words = [producer_word(pair), consumer_word(pair), consumer_word(guard)]
    words += [producer_word(twice), consumer_word(twice)]
    assert disassembled(words, tmp_path) == [
        "IMAD.WIDE.U32 R40, RZ, R25, R20",
        "FFMA R64, R44, R41, R32",
        "@P0 LDS R64, [R62]",
        "DFMA R40, R20, R28, R36",
        "MOV R41, R44",
    ]


@pytest.mark.parametrize("kind", ["WAW", "WAR"])
def test_overwritten_registers_are_accessed_in_the_order_of_the_kind(kind: str) -> None:
    pair = next(pair for pair in PAIRS if pair.kind == kind)
    normal, blind = (ordered(pair, Window(5, "stall", produces)) for produces in (True, False))
    producer = (pair.producer.form, producer_word(pair))
    consumer = (pair.consumer.form, consumer_word(pair))
    if kind == "WAR":
        assert normal == (consumer, producer) and blind == (producer, consumer)
    else:
        assert normal == (producer, consumer) and blind == (producer, ("NOP", word("NOP")))


def test_words_of_a_wide_result_become_stale_between_producer_and_consumer(
    template: bytes, tmp_path: Path
) -> None:
    subject = experiment(EXAMPLE, 0, [])
    assert [window.stale_words for window in subject.windows] == [0, 0, 0b01, 0b10]
    function = Program.from_cubin(build(template, subject)).functions[0]
    texts = [i.text for i in function.instructions]
    places = [at for at, text in enumerate(texts) if text.startswith("DFMA R40")]
    used = [
        [text for text in texts[at : at + 12] if text.startswith(("MOV R4", "DADD"))]
        for at in places
    ]
    assert used == [
        ["DADD R64, R40, R32"],
        ["MOV R40, R22", "DADD R64, R40, R32"],
        ["MOV R41, R23", "DADD R64, R40, R32"],
    ]


def test_nostall_decodes_a_kernel_and_finds_the_dependence(template: bytes) -> None:
    subject = Experiment(EXAMPLE, 0, (Window(8, "reuse"),))
    function = Program.from_cubin(build(template, subject)).functions[0]
    texts = [instruction.text for instruction in function.instructions]
    at = texts.index("CS2R.32 R8, SR_CLOCKLO") + 1
    producer, consumer = function.instructions[at : at + 2]
    assert producer.text == "DFMA R40, R20.reuse, R28.reuse, R36.reuse"
    assert consumer.text == "DADD R64, R40.reuse, R32.reuse"
    assert set(producer.defs) <= set(consumer.uses)
    assert producer.control.stall == 8


def test_nvdisasm_accepts_the_reuse_flags_of_every_form(tmp_path: Path) -> None:
    forms = {(pair.producer.form, producer_word(pair)) for pair in PAIRS}
    forms |= {(pair.consumer.form, consumer_word(pair)) for pair in PAIRS}
    flagged = [(code, reuse_flags(form, code)) for form, code in sorted(forms)]
    flagged = [(code, flags) for code, flags in flagged if flags]
    assert len(flagged) > 100
    texts = disassembled([code | flags << REUSE.low for code, flags in flagged], tmp_path)
    for text, (_, flags) in zip(texts, flagged, strict=True):
        assert text.count(".reuse") == flags.bit_count(), text


def test_code_that_does_not_fit_is_refused(template: bytes) -> None:
    windows = [Window(d, "nops") for d in range(1, 200)]
    with pytest.raises(BadInput, match="the template has room for 6"):
        build(template, experiment(EXAMPLE, 0, windows))


def test_witness_kernels_are_legal_and_wait_as_they_say(template: bytes) -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {c.family for c in CASES} == {c.family for c in CASES if c.is_control}
    assert all(case.values == "global" for case in CASES if "LDG" in case.name)
    assert all(case.values != "uniform" for case in CASES if "LDC" in case.name.split(",")[0])
    for case in CASES:
        lines = lines_of(framed(witness_items(case)))
        assert all(illegal_reason(line.control) is None for line in lines)
        code, _ = assemble(framed(witness_items(case)))
        assert len(code) // 16 < 1500
        waits = [line.wait for line in lines if line.wait in (0b10, 0b110)]
        # twice both scoreboards, once the later one; LDS of a stream waits for scoreboard 1, too
        assert waits.count(0b110) == 2 and len(VARIANTS) == 5
