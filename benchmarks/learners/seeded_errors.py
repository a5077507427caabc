"""Errors in the steps of both samplers: do tests of single steps catch each of them?

    python -m benchmarks run learners.seeded_errors \\
        --out benchmarks/learners/results/seeded_errors.json

Errors of ``source_errors`` change one line of the source; the others give one step of the topic
sampler a wrong argument.  A test draws all unknowns and data from the joint distribution, applies
one step, and compares statistics before and after it.  An error is caught if a statistic changes by
more than 4 standard errors; steps without an error must not.  The exit code is 1 if an error is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.workload.learning.invariance import LIMIT, largest_z
from tests.unit.workload.learning.topic_states import (
    PRIORS,
    STEPS,
    TopicState,
    topic_pair,
)

from benchmarks.harness.result_file import save
from benchmarks.learners.source_errors import ERRORS
from nostall.workload.learning.topics.classifier import draw_concentrations
from nostall.workload.learning.topics.tokens import Concentrations

NO_ERROR = ("no error: topics", "no error: multiview")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=10_000, help="states of each test")


def _scaled(step: str, field: str, factor: float) -> Any:
    """A step that gets a wrong concentration."""
    return topic_pair(
        STEPS[step], lambda hyper: hyper._replace(**{field: factor * getattr(hyper, field)})
    )


def _sizes(seats: int, extra: int) -> Any:
    """Concentrations drawn with wrong numbers of labelled documents or of new categories."""

    def step(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
        sizes = (seats, state.new_categories() + extra, 3)
        state.hyper = draw_concentrations(rng, state.counts, hyper, PRIORS, sizes)

    return topic_pair(step)


def _after(change: Callable[[TopicState], None]) -> Any:
    """A step that leaves a changed state."""

    def step(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
        STEPS["concentrations"](rng, state, hyper)
        change(state)

    return topic_pair(step)


def _lose_rest(state: TopicState) -> None:
    state.counts.rest[0] *= 0.5


def _tilt_sticks(state: TopicState) -> None:
    """Sticks in proportion to tokens instead of tables."""
    total = 1.0 - state.counts.rest[0]
    state.counts.sticks[:] = total * state.counts.topics / state.counts.topics.sum()


ARGUMENT_ERRORS = {
    "topics: half of a0": _scaled("topics", "categories", 0.5),
    "topics: gamma times 4 for the sticks of new topics": _scaled("topics", "topics", 4.0),
    "categories: double xi": _scaled("categories", "new_categories", 2.0),
    "categories: half of eta": _scaled("categories", "words", 0.5),
    "category split: xi times 4": _scaled("category split", "new_categories", 4.0),
    "category split: a0 times 4": _scaled("category split", "categories", 4.0),
    "topic split: gamma times 4": _scaled("topic split", "topics", 4.0),
    "concentrations: no seats of labelled documents": _sizes(0, 0),
    "concentrations: the labelled category counts as new": _sizes(1, 1),
    "sticks: half of the rest is lost": _after(_lose_rest),
    "sticks: from tokens instead of tables": _after(_tilt_sticks),
}


def main(options: argparse.Namespace) -> None:
    results = {}
    for name in (*NO_ERROR, *ERRORS):
        results[name] = _in_another_process(name, options.draws)
        print(name, results[name], flush=True)
    for name, pair in ARGUMENT_ERRORS.items():
        z, statistic = largest_z(pair, options.draws)
        results[name] = {"z": z, "test": name.partition(":")[0], "statistic": statistic}
        print(name, results[name], flush=True)
    missed = [name for name in results if name not in NO_ERROR and results[name]["z"] <= LIMIT]
    alarms = [name for name in NO_ERROR if results[name]["z"] > LIMIT]
    save(
        options.out,
        draws=options.draws,
        limit=LIMIT,
        listed_errors=[name for name, error in ERRORS.items() if error.is_listed],
        results=results,
        missed=missed,
        false_alarms=alarms,
    )
    sys.exit(bool(missed or alarms))


def _in_another_process(name: str, draws: int) -> dict[str, Any]:
    """The result of ``source_errors``; compiled functions with the error are thrown away."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.learners.source_errors", name]
        done = subprocess.run(
            [*command, "--draws", str(draws)],
            env={**os.environ, "NUMBA_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
