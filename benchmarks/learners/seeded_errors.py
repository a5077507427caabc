"""Errors in the topic sampler's steps: does Geweke's test catch each of them?

    python -m benchmarks run learners.seeded_errors \\
        --out benchmarks/learners/results/seeded_errors.json

Each error changes what one step of a sweep gets or leaves, and nothing else.  An error is caught if
a statistic differs from its prior mean by more than 4 standard errors; the sampler without an
error must not.  The exit code is 1 if an error is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.unit.workload.learning.test_topics import GewekeChain, geweke_scores

from benchmarks.harness.result_file import save
from nostall.workload.learning.topics.tokens import Concentrations

LIMIT = 4.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=10000)


def _scaled(step: str, field: str, factor: float) -> type[GewekeChain]:
    """A chain in which one step gets a wrong concentration."""

    class Chain(GewekeChain):
        def of(self, name: str) -> Concentrations:
            if name != step:
                return self.hyper
            return self.hyper._replace(**{field: factor * getattr(self.hyper, field)})

    return Chain


def _after(change: Callable[[GewekeChain], None]) -> type[GewekeChain]:
    """A chain whose state is changed after each sweep."""

    class Chain(GewekeChain):
        def step(self) -> list[float]:
            result = super().step()
            change(self)
            return result

    return Chain


class _NoSeats(GewekeChain):
    def sizes(self, new: int) -> tuple[int, int, int]:
        return 0, new, 3


class _LabelledIsNew(GewekeChain):
    def sizes(self, new: int) -> tuple[int, int, int]:
        return 1, new + 1, 3


def _lose_rest(chain: GewekeChain) -> None:
    chain.counts.rest[0] *= 0.5


def _tilt_sticks(chain: GewekeChain) -> None:
    """Sticks in proportion to tokens instead of tables."""
    total = 1.0 - chain.counts.rest[0]
    chain.counts.sticks[:] = total * chain.counts.topics / chain.counts.topics.sum()


ERRORS: dict[str, type[GewekeChain]] = {
    "topics: half of a0": _scaled("topics", "categories", 0.5),
    "topics: gamma times 4 for the sticks of new topics": _scaled("topics", "topics", 4.0),
    "categories: double xi": _scaled("categories", "new_categories", 2.0),
    "categories: half of eta": _scaled("categories", "words", 0.5),
    "category split: xi times 4": _scaled("category split", "new_categories", 4.0),
    "category split: a0 times 4": _scaled("category split", "categories", 4.0),
    "topic split: gamma times 4": _scaled("topic split", "topics", 4.0),
    "concentrations: no seats of labelled documents": _NoSeats,
    "concentrations: the labelled category counts as new": _LabelledIsNew,
    "sticks: half of the rest is lost": _after(_lose_rest),
    "sticks: from tokens instead of tables": _after(_tilt_sticks),
}


def main(options: argparse.Namespace) -> None:
    scores = {"no error": float(np.abs(geweke_scores(GewekeChain, options.draws)).max())}
    for name, chain in ERRORS.items():
        scores[name] = float(np.abs(geweke_scores(chain, options.draws)).max())
        print(name, scores[name], flush=True)
    missed = [name for name in ERRORS if scores[name] <= LIMIT]
    save(options.out, draws=options.draws, largest_z=scores, missed=missed)
    sys.exit(bool(missed) or scores["no error"] >= LIMIT)
