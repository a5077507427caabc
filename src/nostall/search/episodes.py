"""What a strategy that plays in episodes leaves behind of them: ``episodes.csv``."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nostall.core import BadRun

NAME = "episodes.csv"

SEEDING = "annealing"
"""Move text of an evaluation that a learning strategy gave to annealing before it played."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that ended in ``rollout``, ``evaluations`` after the search began.  ``earned`` is
    the sum of its rewards, in per cent of the original's throughput."""

    rollout: int
    evaluations: int
    turns: int
    earned: float


class EpisodeLog:
    """Appends episodes to a file in ``logs``; nowhere without a directory.

    The file begins anew with each search: a resumed one plays its whole game again.
    """

    def __init__(self, logs: Path | None) -> None:
        self._path = logs / NAME if logs is not None else None
        if logs is not None and self._path is not None:
            logs.mkdir(parents=True, exist_ok=True)
            self._path.write_text(",".join(f.name for f in dataclasses.fields(Episode)) + "\n")

    def add(self, episode: Episode) -> None:
        """One more row, on disk at once."""
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(dataclasses.astuple(episode))


def read_episodes(logs: Path) -> list[Episode]:
    """The whole rows of the file in ``logs``, oldest first; empty where there is none.

    Raises :class:`BadRun` for a file that holds something else.
    """
    path = logs / NAME
    if not path.exists():
        return []
    try:
        text = path.read_text()
        # A killed process may leave a part of a row behind.
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        return [_episode(row) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadRun(f"{path} cannot be used ({error}); run the tuning again") from error


def _episode(row: Mapping[str, str]) -> Episode:
    rollout, evaluations, turns = (int(row[n]) for n in ("rollout", "evaluations", "turns"))
    earned = float(row["earned"])
    if not math.isfinite(earned):
        raise ValueError(f"earned is {earned}")
    return Episode(rollout, evaluations, turns, earned)
