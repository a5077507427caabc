"""Layout of tables and sentences: words stay whole at every width, and nothing is lost."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nostall.cli.terminal.console import (
    MAX_WORD,
    PlainConsole,
    align_numbers,
    column_widths,
    fitting,
    list_rows,
    show_table,
)

WORDS = st.text(alphabet="abcdefgh0123→µ", min_size=1, max_size=12)
CELLS = st.lists(WORDS, max_size=6).map(" ".join)


@given(
    columns=st.lists(WORDS, min_size=1, max_size=6),
    data=st.data(),
    width=st.integers(20, 160),
)
def test_columns_fit_and_keep_their_words(
    columns: list[str], data: st.DataObject, width: int
) -> None:
    row = st.lists(CELLS, min_size=len(columns), max_size=len(columns))
    rows = data.draw(st.lists(row, max_size=5))
    widths = column_widths(columns, rows, width)
    cells = [[header, *(row[i] for row in rows)] for i, header in enumerate(columns)]
    longest = [max(cell_len(word) for word in " ".join(column).split()) for column in cells]
    needed = sum(longest) + 2 * (len(columns) - 1)
    if widths is None:
        assert needed > width
        lines = list(list_rows(columns, rows))
        empty = sum(not cell.strip() for row_cells in rows for cell in row_cells[1:])
        assert len(lines) == len(rows) * len(columns) - empty
        for row_cells in rows:
            for text in row_cells:
                assert any(" ".join(text.split()) in line for line in lines)
        return
    assert sum(widths) + 2 * (len(columns) - 1) <= width
    assert all(given >= word for given, word in zip(widths, longest, strict=True))


def test_long_words_may_be_folded() -> None:
    assert column_widths(("path",), [("x" * 200,)], 80) == [80]
    assert column_widths(("path",), [("x" * 200,)], MAX_WORD) == [MAX_WORD]


def test_numbers_of_a_column_have_equal_decimals_and_stand_at_the_right() -> None:
    rows = [("a", "2", "1 %", "3.6.0", "7"), ("b", "1.875", "12.5 %", "3.6", "-")]
    assert align_numbers(rows) == (
        [["a", "2.000", "1 %", "3.6.0", "7"], ["b", "1.875", "12.5 %", "3.6", "-"]],
        [False, True, True, False, True],
    )
    assert align_numbers([]) == ([], [])


def test_a_printed_table_has_numbers_below_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show_table(
        "Times of [b]stages[/b]", ("stage", "ms"), [("first", "4.2"), ("second", "1,012.545")]
    )
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Times of [b]stages[/b]",
        "stage          ms",
        "─────────────────",
        "first       4.200",
        "second  1,012.545",
    ]


@given(width=st.integers(13, 120))
def test_optional_columns_are_dropped_before_a_line_is_divided(width: int) -> None:
    columns, row = ("kernel", "plan", "schedules", "ms"), ("a kernel", "a long plan", "57", "1.5")
    found, rows, numbers = fitting(
        columns, [row], (False, False, True, True), width, ("schedules", "plan")
    )
    kept = tuple(found)
    assert kept in (columns, ("kernel", "plan", "ms"), ("kernel", "ms"))
    assert rows == [[row[columns.index(name)] for name in kept]]
    assert numbers == [name in ("schedules", "ms") for name in kept]
    assert (kept == columns) == (width >= len("a kernel" + "a long plan" + "schedules" + "1.5") + 6)


SENTENCE = "cause:     the registers of a thread 128 -> 131, so that fewer warps fit into an SM"


def printed(text: str, width: int, *, terminal: bool) -> str:
    console = PlainConsole()
    console.file, console.width = StringIO(), width
    console._force_terminal = terminal
    console.print(text)
    return console.file.getvalue()


@given(st.lists(WORDS, min_size=1, max_size=40).map(" ".join), st.integers(20, 120))
def test_a_terminal_gets_sentences_that_end_between_words(text: str, width: int) -> None:
    lines = printed(text, width, terminal=True).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert " ".join(lines).split() == text.split()


def test_the_lines_of_a_labelled_sentence_begin_below_each_other() -> None:
    first, *others = printed(SENTENCE, 40, terminal=True).splitlines()
    assert others and first.startswith("cause:     the")
    assert all(line.startswith(" " * 11) and line[11] != " " for line in others)


@pytest.mark.parametrize(
    "text",
    [
        "next:     nostall verify runs/a/original.cubin runs/a/best.cubin --measured-latencies",
        "nostall tune kernels.py:kernel --objective gpu --seed 1 --evaluations 10000",
        "    return tl.load(pointer + offsets, mask=mask, other=0.0) * scale + bias",
        "plan:     " + 60 * "a",
    ],
)
def test_commands_source_text_and_paths_stay_whole(text: str) -> None:
    assert text.removeprefix("plan:     ") in printed(text, 40, terminal=True)
    assert len(printed(SENTENCE, 40, terminal=False).splitlines()) == 1
