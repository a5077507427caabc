"""Candidates of a kernel without measurements: built and verified, and packed for a GPU."""

from __future__ import annotations

import io
import json
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from nostall.core import Budget, LaunchSpec, Run
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.operators import GIVEN, SIGMAS, Proposal
from nostall.tuning.assembler.candidate import Candidate, build_proposal, find_hazards
from nostall.tuning.assembler.description import describe_resources
from nostall.tuning.assembler.job import Setup

BUNDLE_FILE = "measure.zip"
"""File of a run directory: what a machine with a GPU needs to measure the kernel."""
_ORDERS = 24
"""Random orders of a shortlist, beside the portfolio."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_README = """\
Measure the kernel {kernel} on a GPU (nostall, a ptxas and a CUDA driver are needed):

    sh measure.sh

It writes measured.json.  On any machine, `nostall tune TARGET --recording measured.json` replays it
for the kernel that this bundle was made from.
"""


@dataclass
class Shortlist:
    """Candidates that were built and verified; none was measured."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """Candidates by outcome; ``verified`` ones passed all checks that need no GPU."""
    registers: list[int] = field(default_factory=list[int])
    """Registers of the verified candidates."""
    failures: list[str] = field(default_factory=list[str])
    """Why candidates were refused."""
    stopped: str = "finished"


def build_shortlist(setup: Setup, budget: Budget, seed: int = 0) -> Shortlist:
    """Build the portfolio and some orders of a kernel, prove their PTX and check their code.

    ``budget``: time limit, and most candidates.  Ctrl-C ends it with the candidates so far.
    """
    states = _states(setup, budget.evaluations, seed)
    deadline = monotonic() + budget.seconds if budget.seconds is not None else None
    found, codes = Shortlist(), set[str]()
    waiting: dict[Future[Any], Candidate | None] = {}
    try:
        while True:
            is_late = deadline is not None and monotonic() > deadline
            while not is_late and len(waiting) <= setup.pool.workers:
                state = next(states, None)
                if state is None:
                    break
                proposal = Proposal(GIVEN, state)
                waiting[setup.pool.submit_task(build_proposal, proposal)] = None
            if is_late:
                found.stopped = "time limit"
            if not waiting:
                return found
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                built = waiting.pop(future)
                if built is not None:
                    _note_verdict(found, built, future.result())
                elif (checked := _note_build(found, codes, future.result())) is not None:
                    task = setup.pool.submit_task(find_hazards, checked.cubin)
                    waiting[task] = checked
    except KeyboardInterrupt:
        found.stopped = "interrupted"
        return found


def _states(setup: Setup, limit: int | None, seed: int) -> Iterator[PtxState]:
    """The portfolio, then orders near the original with each standard deviation in turn."""
    space = setup.space
    start = space.start()
    states = list(space.portfolio())
    for number in range(_ORDERS):
        rng = np.random.default_rng((seed, number))
        states.append(space.reorder(start, rng, SIGMAS[number % len(SIGMAS)]))
    return iter(list(dict.fromkeys(s for s in states if s != start))[:limit])


def _note_build(found: Shortlist, codes: set[str], candidate: Candidate) -> Candidate | None:
    """Count a build; returns the candidate if its machine code is to be verified."""
    if candidate.status != "built":
        found.counts[candidate.status] += 1
        found.failures.append(f"{candidate.status}: {candidate.detail}")
        return None
    if candidate.code_sha256 in codes:
        found.counts["duplicate"] += 1
        return None
    codes.add(candidate.code_sha256)
    return candidate


def _note_verdict(found: Shortlist, candidate: Candidate, hazards: str) -> None:
    if hazards:
        found.counts["unsafe"] += 1
        found.failures.append(f"unsafe: {hazards}")
        return
    found.counts["verified"] += 1
    if candidate.resources is not None:
        found.registers.append(candidate.resources.registers)


def record_shortlist(setup: Setup, found: Shortlist, run: Run) -> None:
    """Write the shortlist and the bundle for a GPU to a run directory."""
    source, compiler = setup.source, setup.compiler
    run.write("best.cubin", source.cubin)
    if source.launch is not None:
        run.write(BUNDLE_FILE, make_bundle(setup))
    result = {
        "shortlist": dict(found.counts),
        "improved": False,
        "stopped": found.stopped,
        "failures": found.failures[:20],
        "notes": ["nothing was measured: whether a candidate is faster is not known"],
        "assembler": {
            "ptxas": [assembler.version for assembler in compiler.assemblers],
            "arguments": list(compiler.command.arguments()),
            "reproduces": compiler.reproduces,
            "counts": dict(found.counts),
            "original": {
                **describe_resources(source.cubin, source.kernel, source.launch),
                "spill_bytes": compiler.spill_bytes,
            },
        },
    }
    run.finish("interrupted" if found.stopped == "interrupted" else "done", result)


def make_bundle(setup: Setup) -> bytes:
    """A zip file with the PTX, the launch and the command that measures the kernel on a GPU."""
    source, command = setup.source, setup.compiler.command
    assert source.ptx is not None and source.launch is not None
    options = shlex.join(option for option in command.options if option != "-v")
    words = ["nostall", "tune", "kernel.ptx", "--kernel", source.kernel, "--launch", "launch.toml"]
    words += ["--arch", command.target, f"--ptxas-options={options}"]
    words += ["--objective", "gpu", "--seconds", "60", "--record", "measured.json"]
    files = {
        "kernel.ptx": source.ptx,
        "launch.toml": launch_toml(source.launch),
        "measure.sh": f'#!/bin/sh\ncd "$(dirname "$0")" && exec {shlex.join(words)}\n',
        "README.txt": _README.format(kernel=source.kernel),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def launch_toml(launch: LaunchSpec) -> str:
    """A launch as the text of a launch file."""
    fields = launch.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    tables = {name: fields.pop(name) for name in ("args", "shapes") if name in fields}
    lines = [f"{name} = {_toml(value)}" for name, value in fields.items()]
    for name, entries in tables.items():
        for entry in entries:
            lines += ["", f"[[{name}]]", *(f"{key} = {_toml(v)}" for key, v in entry.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value in TOML; texts, numbers and lists are written as in JSON."""
    if isinstance(value, dict):
        entries = (f"{json.dumps(str(key))} = {_toml(entry)}" for key, entry in value.items())
        return "{ " + ", ".join(entries) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
