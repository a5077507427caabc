"""The state of a mining run on disk: samples of functions, sightings, and what was done.

A run that is killed continues from its last checkpoint.  A checkpoint is one file that replaces the
earlier one at once, so sightings and progress never disagree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from nostall.core.files.atomic import create_folder
from tools.mining.functions import CodeFunction, Contents
from tools.mining.marks import Marks
from tools.mining.tallies import Tallies
from tools.typed_file import read_typed, write_typed


@dataclass(slots=True)
class SourceRecord:
    """What a source contains and how much of it was mined."""

    contents: Contents
    """Without its sample, which is in files of its own."""
    sampled: dict[int, int]
    """Architecture -> functions of the sample."""
    taken: Counter[int] = field(default_factory=Counter[int])
    """Architecture -> functions of the sample that were taken."""
    cuda: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    """Architecture -> CUDA version -> functions that were mined."""


@dataclass(slots=True)
class Checkpoint:
    """The progress of a run."""

    seed: int
    sources: dict[str, SourceRecord] = field(default_factory=dict[str, SourceRecord])
    tallies: dict[int, Tallies] = field(default_factory=dict[int, Tallies])
    marks: dict[int, Marks] = field(default_factory=dict[int, Marks])
    seen: set[bytes] = field(default_factory=set[bytes])
    """Keys of the functions that were mined."""
    duplicates: int = 0
    """Functions of a sample that another source had as well."""
    rejected: int = 0
    """Functions that nvdisasm does not list."""


class Store:
    """The files of one run."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Open a run; ``seed`` is for a new one."""
        self.folder = folder
        create_folder(folder)
        path = folder / "checkpoint"
        self.checkpoint = read_typed(path, Checkpoint) if path.exists() else Checkpoint(seed)

    def save(self) -> None:
        """Write a checkpoint."""
        write_typed(self.folder / "checkpoint", self.checkpoint)

    def add_source(self, name: str, contents: Contents) -> None:
        """Keep the sample of a source and record the source."""
        sampled = {sm: len(functions) for sm, functions in sorted(contents.sample.items())}
        for sm, functions in contents.sample.items():
            write_typed(self.folder / f"{name}.sm_{sm}", functions)
        contents.sample = {}
        self.checkpoint.sources[name] = SourceRecord(contents, sampled)
        self.save()

    def sample(self, name: str, sm: int) -> list[CodeFunction]:
        """The sample of one architecture of a source."""
        return read_typed(self.folder / f"{name}.sm_{sm}", list[CodeFunction])
