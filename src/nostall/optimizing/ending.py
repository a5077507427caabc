"""How the program ended, in words for the user, and what is left of a run."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from nostall.core.errors import BadInput
from nostall.optimizing.program import Program, ProgramEnded
from nostall.optimizing.result import Result

INTERRUPTED = "interrupted: what was proven before is kept"


def explain_end(
    program: Program, end: ProgramEnded, result: Result, *, runs_on: bool, step: str | None
) -> None:
    """Say why there is nothing, or not everything, if the program ended by itself.

    ``runs_on``: it was to run to its end; ``step``: the function that ends a step, as given.
    """
    if program.exit_code == 128 + signal.SIGINT:  # Ctrl-C, which the terminal gave the program
        result.interrupted = True
        result.notes.append(INTERRUPTED)
        return
    if program.process.poll() is None:  # nostall's half stopped; the program runs on
        result.notes.append(str(end))
        program.process.wait() if runs_on else program.end(exits=True)
        return
    steps = max((e["steps"] for e in program.events if e["event"] == "exit"), default=0)
    unclear = next((e["reason"] for e in program.events if e["event"] == "no step"), "")
    if not program.events:
        reason = (
            "no Python process of the program was watched: it runs no Python, one without nostall, "
            "or one with -I, -E or -S, which leave nostall's start-up module out"
        )
    elif program.exit_code:
        missed = "all levels were tried" if result.facts else "enough steps were seen"
        reason = f"the program failed before {missed}; its output says why"
    elif result.facts is not None:
        reason = "the program ended before all levels were tried; a longer run shows more"
    elif steps:
        reason = f"the program ended after step {steps}; at least 10 are needed, give it more"
    elif step:
        reason = (
            f"--step {step} was never called: name a module that the program imports and "
            "a function in it; functions of the script itself are not found"
        )
    else:
        reason = "no step was seen: " + (
            unclear
            or "no optimiser, profiler or module was called in eager mode; "
            "name the function that ends a step with --step module:function"
        )
    result.notes.append(reason)


def note_end(program: Program, result: Result) -> None:
    """Say how the program ended, and which of its files may be incomplete."""
    code = program.process.returncode
    if program.was_killed and not program.hears_ctrl_c:
        result.notes.append(
            f"the program outlived {'its last step' if program.was_ended else 'an interrupt'} by "
            "10 s (a thread, a child or `except:`), so its process group was ended"
        )
    elif program.was_interrupted and not program.was_ended:
        result.notes.append(
            "the program came to no step within 10 s, so it was interrupted as by Ctrl-C"
        )
    elif code and not result.interrupted:
        after = " after its last step" if program.was_ended else ""
        by = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        result.notes.append(f"the program ended with {by}{after}")
    is_cut = program.was_ended or program.was_interrupted or program.was_killed
    if result.files and is_cut:
        more = f" and {len(result.files) - 1} more" if len(result.files) > 1 else ""
        result.notes.append(
            "the program was ended before its own end; these files changed while it ran, and are "
            f"incomplete if it wrote them: {result.files[0]}{more}"
        )


def forget_kernels(result: Result, events: Sequence[Mapping[str, Any]]) -> None:
    """Take the records of this run's searches out of the store if the program gains nothing.

    `nostall apply` would use them, because each was faster alone.  ``events``: the program's, with
    the searches of attempts that had no end.
    """
    searched = {e["original"]: set(e["known"]) for e in events if e["event"] == "search"}
    kernels = [(a.outcome == "kept", k) for a in result.attempts for k in a.kernels if k["record"]]
    kept = {k["record"] for is_kept, k in kernels if is_kept}
    dropped = {k["record"] for is_kept, k in kernels if not is_kept and k["searched"]} - kept
    if not (searched or dropped):
        return
    from nostall.store import Store  # lazy: few runs have kernels

    store = Store()
    try:
        rows = [
            row
            for row in store.rows()
            if row.id in dropped
            or (row.id not in kept and row.id not in searched.get(row.original, {row.id}))
        ]
        for row in rows:
            store.remove(row)
    except BadInput as error:  # of the store; the result stands
        result.notes.append(f"records of kernels without a gain are left: {error}")
        return
    if rows:
        result.notes.append(
            f"{len(rows)} binaries of kernels without a proven gain in the program, though faster "
            "alone, are not kept in the store"
        )


def gain_of_kernels(kernels: Sequence[Mapping[str, Any]]) -> str:
    """The gains of single kernels, back to back, in words."""
    found = [f"{k['kernel']} {k['ratio']:.3f}" for k in kernels if k["record"]]
    return f"; kernels alone: {', '.join(found)}" if found else ""
