"""Sightings that are counted without register marks equal those that are counted with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tools.mining.archive import images, source_name
from tools.mining.count import SightingCounter
from tools.mining.functions import read_source
from tools.mining.run import Options, mine
from tools.mining.store import Store

from nostall.core.errors import BadInput
from nostall.sass import Program
from tools.mining import floors as mining

CORPUS = Path(__file__).resolve().parents[2] / "corpus" / "nvcc"
CUBIN = CORPUS / "arithmetic.sm_90.cubin"
EVERYTHING = 1 << 20


def test_sightings_are_those_of_a_full_listing() -> None:
    functions = read_source(CUBIN, 0, EVERYTHING, EVERYTHING).sample[90]
    counter = SightingCounter(90)
    counter.add(functions)
    found = Counter[tuple[str, str, int]]()
    for (kind, name, _, _, cycles), tally in counter.tallies.tallies.items():
        found[kind, name, cycles] += tally.seen
    sightings: mining.Sightings = Counter()
    for function in Program.from_cubin(CUBIN.read_bytes()).functions:
        for block in function.blocks:
            order = function.instructions[block.start : block.end]
            mining.count_distances(order, 90, sightings)
    full = Counter[tuple[str, str, int]]()
    for (kind, name, _, cycles), seen in sightings.items():
        full[kind, name, cycles] += seen
    assert not found - full  # nothing is invented
    assert found.total() > full.total() / 2  # one small file teaches few shapes


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    options = Options(limit=EVERYTHING, max_size=EVERYTHING, seconds=60, workers=1)
    whole = Store(tmp_path / "whole", 0)
    mine([CUBIN], whole, options)
    part = Store(tmp_path / "part", 0)
    mine([CUBIN], part, Options(EVERYTHING, EVERYTHING, 0, 1))  # reads only
    again = Store(tmp_path / "part", 0)
    mine([CUBIN], again, options)
    mine([CUBIN], again, options)  # nothing is left
    assert again.checkpoint.tallies[90].tallies == whole.checkpoint.tallies[90].tallies
    reread = Store(tmp_path / "part", 0).checkpoint
    assert reread.seen and reread == again.checkpoint


def test_files_without_machine_code_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give a wheel"):
        list(images(tmp_path / "missing.whl", frozenset((90,))))
    assert source_name(Path("nvidia_npp-13.2.0.93-py3-none-any.whl")) == "nvidia_npp-13.2.0.93"
