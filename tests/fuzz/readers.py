"""The table of all readers that are fuzzed through the command line.

A reader is one row: a generator of sound inputs, mutations, and the arguments of the command.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz import documents
from tests.fuzz.command_line import Reader
from tests.fuzz.file_mutants import BINARY_MUTATIONS, TEXT_MUTATIONS

_OUTPUTS = ((), (), ("--format", "json"), ("--format", "json"), ("--report", "page.html"))


def _characterize(path: Path, rng: random.Random) -> list[str]:
    """A trace or a table, with any output and often with hardware and questions."""
    questions = ("memory=x2", "ethernet=100Gb/s", "to=pearl", "nodes=4,gradients=90MB", "nvlink=x3")
    options = list(rng.choice(_OUTPUTS))
    if rng.random() < 0.4:
        options += ["--hardware", "h200-dgx", "--what-if", rng.choice(questions)]
    others = sorted(p.name for p in path.parent.glob("rank1.json") if path.name == "rank0.json")
    return ["characterize", path.name, *others, *options]


def _hardware(path: Path, rng: random.Random) -> list[str]:
    return ["characterize", "jobs.csv", "--hardware", path.name, *rng.choice(_OUTPUTS)]


READERS = {
    reader.name: reader
    for reader in (
        Reader("trace", documents.traces, TEXT_MUTATIONS, _characterize),
        Reader("chakra", documents.chakra, BINARY_MUTATIONS, _characterize),
        Reader("csv", documents.csv_tables, TEXT_MUTATIONS, _characterize),
        Reader("parquet", documents.parquet_tables, BINARY_MUTATIONS, _characterize),
        Reader("hardware", documents.hardware_files, TEXT_MUTATIONS, _hardware),
    )
}
