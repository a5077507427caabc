"""Words that nvdisasm does not list, because control does not reach them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.corpus.catalogue import NVCC

from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Listing, disassemble
from nostall.sass.program.opcodes import UNREACHED
from nostall.sass.safety.verify import verify

DATA = (NVCC / "work_queue.sm_80.cubin").read_bytes()


@pytest.fixture(scope="module")
def listing() -> Listing:
    (found,) = disassemble(Cubin.parse(DATA)).values()
    return found


def program(listing: Listing, cubin: Cubin | None = None) -> Program:
    return Program.from_listings(cubin or Cubin.parse(DATA), {listing.name: listing})


def unreached(of: Program) -> list[int]:
    (function,) = of.functions
    return [at for at, i in enumerate(function.instructions) if i.base == UNREACHED]


def test_unreached_words_stay_where_they_are(listing: Listing) -> None:
    found = program(listing)
    (function,) = found.functions
    (at,) = unreached(found)
    assert function.instructions[at - 1].base == "BRA"
    assert function.instructions[at].is_barrier
    (block,) = [b for b in function.blocks if b.start <= at < b.end]
    assert (block.start, block.end, block.pred) == (at, at + 1, ())
    assert found.to_cubin() == DATA
    assert verify(DATA, DATA).safe
    swapped = list(function.instructions)
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    candidate = found.with_function(function.reordered(swapped)).to_cubin()
    assert not verify(DATA, candidate).safe


def test_a_missing_row_behind_reachable_code_is_refused(listing: Listing) -> None:
    rows = tuple(row for row in listing.rows if row.offset != 0x20)
    with pytest.raises(BadBinary, match="from 0x20 to 0x30, although control may reach them"):
        program(replace(listing, rows=rows))


def test_a_missing_first_row_is_refused(listing: Listing) -> None:
    with pytest.raises(BadBinary, match="from 0x0 to 0x10"):
        program(replace(listing, rows=listing.rows[1:]))


@pytest.mark.parametrize("inside", ["entry", "target"])
def test_unlisted_words_with_a_symbol_or_a_branch_target_are_refused(
    inside: str, listing: Listing
) -> None:
    (at,) = unreached(program(listing))
    cubin = Cubin.parse(DATA)
    (text,) = cubin.texts
    change: dict[str, Callable[[], object]] = {
        "entry": lambda: replace(text, entries=(*text.entries, (16 * at, "inner"))),
        "target": lambda: replace(
            text,
            records=(
                *text.records,
                replace(text.records[0], offset=16 * at, is_branch_target=True),
            ),
        ),
    }
    changed = replace(cubin, texts=(change[inside](),))
    with pytest.raises(BadBinary, match="although control may reach them"):
        program(listing, changed)
