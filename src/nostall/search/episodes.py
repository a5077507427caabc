"""Episode log of a learning strategy: the file ``episodes.csv``."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from nostall.core import BadRun

NAME = "episodes.csv"

ANNEALING_MOVE = "annealing"
"""Move text of the trials that a learning strategy spends on annealing before its episodes."""

_COLUMNS = ("rollout", "evaluations", "turns", "earned")
"""Columns of the file, in the order of the fields of :class:`Episode`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    rollout: int
    """Number of the rollout in which it ended."""
    evaluations: int
    """Evaluations of the search when it ended."""
    steps: int
    total_reward: float
    """Sum of the rewards, in per cent of the original's throughput."""


class EpisodeLog:
    """Appends episodes to a file in ``logs``; does nothing if ``logs`` is None.

    Each search starts a new file, because a resumed search repeats all of its episodes.
    """

    def __init__(self, logs: Path | None) -> None:
        self._path = logs / NAME if logs is not None else None
        if logs is not None and self._path is not None:
            logs.mkdir(parents=True, exist_ok=True)
            self._path.write_text(",".join(_COLUMNS) + "\n")

    def add(self, episode: Episode) -> None:
        """Append one row and close the file."""
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(astuple(episode))


def read_episodes(logs: Path) -> list[Episode]:
    """Read the complete rows of the file in ``logs``, oldest first; [] without a file.

    Raises :class:`BadRun` for a file with other contents.
    """
    path = logs / NAME
    if not path.exists():
        return []
    try:
        text = path.read_text()
        # A killed process can leave an incomplete last row.
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        return [_read_row(row) for row in rows]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadRun(f"{path} cannot be used ({error}); run the tuning again") from error


def _read_row(row: Mapping[str, str]) -> Episode:
    rollout, evaluations, turns, earned = (row[column] for column in _COLUMNS)
    total_reward = float(earned)
    if not math.isfinite(total_reward):
        raise ValueError(f"earned is {total_reward}")
    return Episode(int(rollout), int(evaluations), int(turns), total_reward)
