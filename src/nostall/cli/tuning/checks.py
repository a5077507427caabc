"""Checks of the options of ``nostall tune`` that need no kernel and no GPU."""

from __future__ import annotations

import math
from pathlib import Path

from nostall.core import BadInput
from nostall.gpu import sanitizer as compute_sanitizer
from nostall.ptx.program.module import parse
from nostall.ptx.schedule.dependent_launch import can_wait
from nostall.ptx.schedule.space import PtxSpace
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import ASSEMBLER, check_choice, make_strategy


def check_limits(seconds: float | None, evaluations: int | None) -> None:
    """Raise :class:`BadInput`, which names the option, for a limit that is not above 0."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise BadInput(
            f"--seconds is {seconds:g}; give a number of seconds greater than 0, such as 60 "
            "(Ctrl-C ends a search at any time)"
        )
    if evaluations is not None and evaluations < 1:
        raise BadInput(
            f"--evaluations is {evaluations}; give a whole number greater than 0, such as 1000"
        )


def check_settings(settings: Settings, scheduler: str | None, source: Source | None = None) -> None:
    """Raise an error for settings that cannot work, before anything is written.

    ``source`` is None before the kernel is compiled.
    """
    make_strategy(settings.strategy, policy=settings.policy)
    check_choice(
        settings.strategy,
        settings.objective,
        has_ptx=source is None or source.ptx is not None,
        is_distributed=scheduler is not None or (settings.workers or 1) > 1,
        origin=source.origin if source is not None else "the kernel",
    )
    if settings.measured_latencies and settings.strategy == ASSEMBLER:
        raise BadInput(
            "--measured-latencies changes searches that move native instructions; give --strategy "
            "anneal as well, or leave the option out"
        )
    if settings.native != Settings.native:
        _check_native(settings, source)
    if settings.pdl:
        _check_dependent_launch(settings, scheduler, source)
    if settings.workers is not None and settings.workers < 1:
        raise BadInput(f"--workers is {settings.workers}; give 1 or more, one per GPU")
    if settings.objective != "gpu" and (scheduler is not None or (settings.workers or 1) > 1):
        raise BadInput(
            "--workers and --scheduler distribute measurements; give --objective gpu as well"
        )
    is_cold_or_timed = settings.cold or settings.clock != "graph"
    if settings.objective != "gpu" and (
        settings.tolerance or settings.sanitizer or is_cold_or_timed
    ):
        raise BadInput(
            "--tolerance, --timing, --cold and --sanitizer are options of measurements; give "
            "--objective gpu as well"
        )
    if settings.sanitizer:
        compute_sanitizer.find()
    if settings.seed < 0:
        raise BadInput(f"--seed is {settings.seed}; give 0 or a greater whole number")
    _ = settings.budget  # raises BadInput if the limits are not positive


def _check_native(settings: Settings, source: Source | None) -> None:
    if settings.native == ASSEMBLER:
        raise BadInput(
            f"--native is {ASSEMBLER}, which moves no native instructions; give anneal, sip, "
            "random, cuasmrl or ppo"
        )
    make_strategy(settings.native)
    if source is not None and settings.strategy != ASSEMBLER:
        raise BadInput(
            f"--native goes on from the winner of --strategy {ASSEMBLER}, but the strategy is "
            f"{settings.strategy}; give one of them"
        )


def _check_dependent_launch(
    settings: Settings, scheduler: str | None, source: Source | None
) -> None:
    from nostall.tuning.assembler.dependent import MODES

    if settings.pdl not in MODES:
        raise BadInput(f"--pdl is {settings.pdl!r}; allowed are: {', '.join(MODES)}")
    if source is None:
        return
    if (settings.strategy, settings.objective) != (ASSEMBLER, "gpu"):
        raise BadInput(
            f"--pdl measures chains of what ptxas makes, but this search has strategy "
            f"{settings.strategy} and objective {settings.objective}; give a kernel with PTX and "
            "--objective gpu"
        )
    if scheduler is not None or (settings.workers or 1) > 1 or settings.clock != "graph":
        raise BadInput("--pdl measures on one GPU with --timing graph; leave the others out")
    assert source.ptx is not None
    module = parse(source.ptx)
    space = PtxSpace(module, source.kernel)
    if settings.cold or not can_wait(module, space.functions):
        raise BadInput(
            "--pdl cannot be used: launches with a cold cache have no neighbours (--cold), and a "
            "kernel with griddepcontrol of its own or for an architecture below sm_90 gets no "
            "other wait; leave the option out"
        )


def check_files(settings: Settings, record: Path | None, recording: Path | None) -> None:
    """Raise :class:`BadInput` for a recording file that the search can neither write nor read."""
    is_measured = settings.strategy == ASSEMBLER and settings.objective == "gpu"
    if record is not None and not is_measured:
        raise BadInput(
            f"--record needs a measured search of the assembler's input, but this one has strategy "
            f"{settings.strategy} and objective {settings.objective}; give --objective gpu"
        )
    if record is not None and not record.absolute().parent.is_dir():
        raise BadInput(f"--record is {record}, but {record.parent} is no folder; make it first")
    if recording is not None and settings.objective != "recorded":
        raise BadInput(
            f"--recording is read with --objective recorded, but it is {settings.objective}; leave "
            "one of them out"
        )
