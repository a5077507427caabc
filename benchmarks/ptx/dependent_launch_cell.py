"""One kernel of the benchmark of dependent launches: its variants, and their comparisons."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.comparison import comparison_record
from benchmarks.harness.schema import Configuration, Options
from benchmarks.kernels.suite import Entry, build
from nostall.core import BadInput
from nostall.core.errors import NostallError
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan
from nostall.ptx.assemble.builder import Builder
from nostall.ptx.schedule.state import DependentLaunch, PtxState
from nostall.sass import Program
from nostall.sass.safety.dependent_launch import check_wait, find_waits
from nostall.tuning.assembler.candidate import Candidate, build_state, hazards
from nostall.tuning.assembler.job import prepare
from nostall.tuning.gpu_objective import Decision, decide
from nostall.tuning.sources.source import Source

OpenDevice = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]
FIGURES = ("order", "wait", "best", "triton")
"""Figures of a kernel; see :mod:`benchmarks.ptx.dependent_launch`."""
MODES: tuple[DependentLaunch, ...] = ("wait", "wait+trigger", "trigger+wait")
_PLAN = MeasurementPlan(batch_us=400.0, rounds=15, inputs=2)
"""Long samples: the first launch of a sample is not dependent."""
_CHECKS = 16
_TRITON_WAIT = "tl.extra.cuda.gdc_wait()"


@dataclass(frozen=True)
class ChainPlan:
    """What is known of a kernel, and how it is measured."""

    committed: tuple[Configuration, ...]
    winner: Mapping[str, Any] | None
    """Record of an earlier search; its order is measured if the same build is made here."""
    rounds: int
    open: OpenDevice = LocalGpu


@dataclass(frozen=True)
class Variant:
    """A cubin that is launched as a dependent launch."""

    label: str
    cubin: bytes
    wait: int
    """Position of the wait among the kernel's instructions."""


@dataclass(frozen=True)
class Prepared:
    """All cubins of a kernel, ready to be measured."""

    entry: Entry
    options: Options | None
    source: Source
    order: bytes
    """The best order without a wait; empty if none is known for this build."""
    variants: dict[str, list[Variant]]
    """By the order: ``compiler``, and ``best`` if one is known."""
    triton: Variant | None
    notes: list[str]
    """Why variants are missing."""


def prepare_chain(entry: Entry, plan: ChainPlan) -> Prepared:
    """Build the variants of one kernel.  Raises :class:`BadInput` if it does not compile."""
    options, source, best = find_build(entry, plan)
    _, spec, _ = prepare(source, dependents_wait=True)
    builder = Builder(spec)
    try:
        orders = {"compiler": PtxState(), **({} if best is None else {"best": best})}
        built = [(name, m, build_mode(builder, s, m)) for name, s in orders.items() for m in MODES]
        order = b"" if best is None else build_state(builder, best).cubin
    finally:
        builder.close()
    variants = {n: [_variant(m, c) for o, m, c in built if o == n and c.cubin] for n in orders}
    notes = [f"{o} {m}: {c.status} {c.detail}"[:200] for o, m, c in built if not c.cubin]
    triton, why = triton_variant(entry, options)
    return Prepared(
        entry, options, source, order, variants, triton, [*notes, *([why] if why else [])]
    )


def measure_chain(ready: Prepared, plan: ChainPlan) -> dict[str, Any]:
    """Measure one kernel; returns the record."""
    began = monotonic()
    source, figures = ready.source, dict[str, Any]()
    assert source.launch is not None
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    if ready.order:
        with plan.open(kernel, _PLAN) as gpu:
            figures["order"] = _figure("best order", decide(gpu, ready.order, plan.rounds, _CHECKS))
    with plan.open(kernel, replace(_PLAN, dependent_launch=True)) as gpu:
        screened = {name: screen(gpu, found) for name, found in ready.variants.items()}
        # A kernel without a wait must be noticed, or the check would prove nothing.
        missing_wait = gpu.evaluate(source.cubin).status
        chosen = {
            "wait": _fastest(screened["compiler"]),
            "best": _fastest([*screened["compiler"], *screened.get("best", [])]),
            "triton": ready.triton,
        }
        for name, variant in chosen.items():
            if variant is not None and name == "best" and variant is chosen["wait"]:
                figures[name] = figures["wait"]
            elif variant is not None:
                decision = decide(gpu, variant.cubin, plan.rounds, _CHECKS)
                figures[name] = _figure(variant.label, decision, variant.wait)
        about = dict(gpu.info)
    timed = next((f for f in figures.values() if f), None)
    return {
        "kernel": ready.entry.name,
        "options": None if ready.options is None else ready.options.model_dump(),
        "chain_us": float(np.median(timed["us"]["original"])) if timed else float("nan"),
        "figures": figures,
        "screened": {o: {v.label: r for v, r in s} for o, s in screened.items()},
        "notes": ready.notes,
        "missing_wait": missing_wait,
        "grid": source.launch.grid,
        "block": source.launch.block,
        "compiled": dict(source.provenance),
        "seconds": round(monotonic() - began, 2),
        "gpu": about,
    }


def find_build(entry: Entry, plan: ChainPlan) -> tuple[Options | None, Source, PtxState | None]:
    """The configuration, its build, and the best order that is known for it.

    The build of the winner's record is taken if it is among the configurations, else the fastest
    committed one, or the first.
    """
    ran = sorted((c for c in plan.committed if c.us is not None), key=lambda c: c.us or 0.0)
    tried: list[Options | None] = [c.options for c in ran[:3]] or [*(entry.options or [None])]
    first: tuple[Options | None, Source] | None = None
    for options in tried:
        try:
            source = build(entry, options)
        except NostallError:
            continue
        if (state := winner_state(source, plan.winner)) is not None:
            return options, source, state
        first = first or (options, source)
        if plan.winner is None:
            break
    if first is None:
        raise BadInput(f"{entry.name}: no configuration compiles; see ptx.assembler_suite")
    return (*first, None)


def winner_state(source: Source, record: Mapping[str, Any] | None) -> PtxState | None:
    """The state of a record's winner, if this build gives the same machine code with it."""
    if record is None or source.launch is None or not record.get("recipe"):
        return None
    if tuple(record["grid"]) != source.launch.grid:
        return None
    _, spec, space = prepare(source)
    builder = Builder(spec)
    try:
        state = space.load(record["recipe"]["state"])
        candidate = build_state(builder, state)
    except NostallError:
        return None
    finally:
        builder.close()
    return state if candidate.status == "built" else None


def build_mode(builder: Builder, state: PtxState, mode: DependentLaunch) -> Candidate:
    """A state with a wait; without a cubin if the verifier of machine code rejects it."""
    candidate = build_state(builder, replace(state, dependent_launch=mode))
    if candidate.cubin and (problem := hazards(candidate.cubin, builder.spec.kernel)):
        return replace(candidate, cubin=b"", detail=problem)
    return candidate


def triton_variant(entry: Entry, options: Options | None) -> tuple[Variant | None, str]:
    """The kernel with Triton's own wait as its first statement, or why there is none."""
    if options is None:
        return None, "not a Triton kernel"
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        copy = Path(folder) / entry.file.name
        copy.write_text(with_first_statement(entry.file.read_text(), entry.kernel, _TRITON_WAIT))
        try:
            source = build(replace(entry, file=copy), options)
        except NostallError as error:
            return None, str(error)[:300]
    if problem := check_wait(source.cubin, source.kernel):
        return None, problem
    return _variant("gdc_wait first", source), ""


def with_first_statement(source: str, function: str, statement: str) -> str:
    """Python source with a statement at the start of a function, after its docstring."""
    body = next(
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    first = body[1 if has_docstring else 0]
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}{statement}\n")
    return "".join(lines)


def screen(gpu: Device, variants: list[Variant]) -> list[tuple[Variant, float | str]]:
    """Each variant with its ratio in a few samples, or why it was not timed."""
    found: list[tuple[Variant, float | str]] = []
    for variant in variants:
        outcome = gpu.evaluate(variant.cubin)
        result: float | str = f"{outcome.status}: {outcome.detail}"
        if outcome.timing is not None:
            ratios = np.asarray(outcome.timing.original) / outcome.timing.candidate
            result = round(float(np.median(ratios)), 4)
        found.append((variant, result))
    return found


def _fastest(screened: list[tuple[Variant, float | str]]) -> Variant | None:
    timed = [(ratio, n) for n, (_, ratio) in enumerate(screened) if isinstance(ratio, float)]
    return screened[max(timed)[1]][0] if timed else None


def _variant(label: str, built: Candidate | Source) -> Variant:
    program = Program.from_cubin(built.cubin)
    function = program.kernels[0]
    return Variant(label, built.cubin, find_waits(function)[0])


def _figure(label: str, decision: Decision, wait: int | None = None) -> dict[str, Any] | None:
    """A comparison with all its samples, in microseconds; None if nothing was timed."""
    record = comparison_record(decision)
    return None if record is None else {"variant": label, "wait": wait, **record}
