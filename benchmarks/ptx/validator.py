"""Validator of PTX orders: what does it accept and refuse, and how long does a check take?

    python -m benchmarks run ptx.validator --orders 8 --mutants 4 \\
        --out benchmarks/ptx/results/validator.json

Texts: the committed PTX, and Triton's kernels of the corpus for sm_80, sm_90 and sm_100.

- ``itself``: each text is a candidate for itself.
- ``orders``: random orders of ``nostall.ptx.schedule``, which shares no code with the validator;
  every third one starts from the original, the others from the order before.
- ``settings``: random names, register budgets, cache hints and dependent launches on such orders.
- ``violations``, ``legal``: seeded edits of tests/mutations/ptx on the committed PTX.
- ``speed``: CPU time to read an original and to check an order, for kernels of 1,500 instructions
  and more. ``statements`` counts everything that ends with a semicolon, labels, braces and .loc.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.mutations.ptx.legal_edits import LEGAL_EDITS
from tests.mutations.ptx.mutants import VIOLATIONS, all_texts, mutants, validator

from benchmarks.harness.result_file import save
from benchmarks.ptx.random_orders import texts
from nostall.core.errors import NostallError
from nostall.ptx.program.module import parse
from nostall.ptx.safety.validate import Validator
from nostall.ptx.safety.verdict import Verdict
from nostall.ptx.schedule.hints import HINTS
from nostall.ptx.schedule.levers import Levers
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

SIGMAS = (1.0, 3.0, 8.0, 20.0, 80.0, 300.0)
SETTING_MOVES = 25
"""Random settings that one state of ``settings`` gets."""
LARGE = 1500
"""Instructions of a module from which its times are recorded."""
_STATEMENT = re.compile(r";|^\s*[\w$]+:|[{}]|^\s*\.loc\b", re.MULTILINE)

Row = dict[str, Any]


class Tally:
    """Counts of verdicts, and the candidates whose verdict is not the expected one."""

    def __init__(self, expect_accepted: bool) -> None:
        self.expect_accepted = expect_accepted
        self.checked = 0
        self.unexpected: list[str] = []

    def add(self, name: str, verdict: Verdict) -> None:
        self.checked += 1
        if verdict.accepted is not self.expect_accepted:
            reason = str(verdict.findings[0]) if verdict.findings else "accepted"
            self.unexpected.append(f"{name}: {reason}")

    def row(self) -> Row:
        return {"checked": self.checked, "unexpected": self.unexpected}


def random_states(space: PtxSpace, count: int, seed: int) -> Iterator[PtxState]:
    """Random orders; two of three are children of the order before."""
    rng = np.random.default_rng(seed)
    state = space.start()
    for number in range(count):
        parent = state if number % 3 else space.start()
        state = space.reorder(parent, rng, SIGMAS[number % len(SIGMAS)])
        yield state


def with_settings(space: PtxSpace, state: PtxState, seed: int) -> PtxState:
    """The state with random settings."""
    rng = np.random.default_rng(seed)
    for _ in range(SETTING_MOVES):
        move = space.draw(state, rng, frozenset(("lever",)))
        state = state if move is None else space.apply(state, move)
    return state


def all_levers(kernel: str, text: str) -> Levers:
    """Settings that the validator allows for this kernel."""
    return Levers(
        kernel_names=("", f"cutlass_{kernel}"),
        max_registers=(None, 64, 128),
        hints=HINTS,
        dependent_launch=("", "wait", "trigger+wait") if "sm_8" not in text else ("",),
    )


def check_text(name: str, text: str, orders: int, tallies: dict[str, Tally]) -> Row | None:
    """Check one text and its orders; returns its times if it is large."""
    began = time.process_time()
    checks = Validator(text, dependents_wait=True)
    reading = time.process_time() - began
    itself = checks.check(text)
    tallies["itself"].add(name, itself)
    seconds: list[float] = []
    module = parse(text)
    for kernel in module.kernels:
        seed = zlib.crc32(f"{name} {kernel.name}".encode())
        space = PtxSpace(module, kernel.name)
        for state in random_states(space, orders, seed):
            candidate = space.text(state)
            began = time.process_time()
            verdict = checks.check(candidate)
            seconds.append(time.process_time() - began)
            tallies["orders"].add(f"{name} {kernel.name}", verdict)
        space = PtxSpace(module, kernel.name, all_levers(kernel.name, text))
        for number, state in enumerate(random_states(space, max(orders // 4, 1), seed + 1)):
            candidate = space.text(with_settings(space, state, seed + number))
            tallies["settings"].add(f"{name} {kernel.name}", checks.check(candidate))
    if itself.checked < LARGE:
        return None
    return {
        "name": name,
        "instructions": itself.checked,
        "statements": len(_STATEMENT.findall(text)),
        "read_ms": round(1000 * reading, 1),
        "check_ms": round(1000 * statistics.median(seconds), 1),
    }


def check_mutants(per_text: int) -> Row:
    """Seeded violations by kind."""
    kinds: Row = {}
    for kind in VIOLATIONS:
        tally = Tally(expect_accepted=False)
        for mutant in mutants(kind, per_text):
            tally.add(str(mutant), validator(mutant.original).check(mutant.candidate))
        kinds[kind] = tally.row()
        print(f"{kind}: {tally.checked}, accepted {len(tally.unexpected)}", flush=True)
    return kinds


def check_legal_edits(per_text: int) -> Row:
    """Legal edits by kind."""
    kinds: Row = {}
    for kind, edit in LEGAL_EDITS.items():
        tally = Tally(expect_accepted=True)
        for text in all_texts():
            rng = random.Random(zlib.crc32(f"{kind} {text.name}".encode()))
            for _ in range(per_text):
                candidate = edit(text, rng)
                if candidate is not None:
                    tally.add(f"{kind} {text.name}", validator(str(text)).check(candidate))
        kinds[kind] = tally.row()
        print(f"{kind}: {tally.checked}, refused {len(tally.unexpected)}", flush=True)
    return kinds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--orders", type=int, default=8, help="random orders of each kernel")
    parser.add_argument("--mutants", type=int, default=4, help="edits of each kind and text")
    parser.add_argument("--every", type=int, default=1, help="take every N-th text")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Check everything; returns 1 if a verdict is not the expected one."""
    tallies = {name: Tally(expect_accepted=True) for name in ("itself", "orders", "settings")}
    speed: list[Row] = []
    unread: list[str] = []
    for name, text in texts(options.every):
        if text is None:
            continue
        try:
            row = check_text(name, text, options.orders, tallies)
        except NostallError as error:
            unread.append(f"{name}: {error}")
            continue
        speed += [row] if row else []
        print(f"{name}: {tallies['orders'].checked} orders so far", flush=True)
    violations = check_mutants(options.mutants)
    legal = check_legal_edits(options.mutants)
    groups = [*violations.values(), *legal.values(), *(t.row() for t in tallies.values())]
    failed = len(unread) + sum(len(group["unexpected"]) for group in groups)
    per_statement = [row["check_ms"] / row["statements"] for row in speed]
    save(
        options.out,
        failed=failed,
        **{name: tally.row() for name, tally in tallies.items()},
        unread=unread,
        violations_checked=sum(row["checked"] for row in violations.values()),
        legal_checked=sum(row["checked"] for row in legal.values()),
        ms_per_2000_statements=round(2000 * max(per_statement, default=0.0), 1),
        violations=violations,
        legal=legal,
        speed=sorted(speed, key=lambda row: str(row["name"])),
    )
    print(f"{failed} unexpected verdicts; {options.out}")
    return 1 if failed else 0
