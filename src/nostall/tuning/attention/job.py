"""Search native schedules of the kernels of an attention step, and store what is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial

from nostall.core.errors import BadInput, MissingPart
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.serving.errors import current_gpu
from nostall.store import Row, Store
from nostall.tuning.assembler.candidate import build_state, find_hazards
from nostall.tuning.assembler.job import open_setup, tune_assembler
from nostall.tuning.attention.evaluator import make_evaluator
from nostall.tuning.attention.sources import AttentionStep, step_sources
from nostall.tuning.job import TuningResult
from nostall.tuning.records.store_records import record_result, rejection_reason
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import ASSEMBLER, make_strategy

_DEADLINE = 30.0
"""Seconds for the answer to one candidate: a check draws batches and computes them in fp64."""

OpenDevice = Callable[[AttentionStep, Kernel, MeasurementPlan], AbstractContextManager[Device]]
"""Opens what measures the candidates of one kernel of a step."""


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides the code and the tables of a step."""

    name: str
    arch: str
    """Such as ``sm_90``."""
    sms: int

    @staticmethod
    def present() -> Gpu:
        """The current GPU.  Raises :class:`MissingPart` without one."""
        import torch

        name = current_gpu()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch = f"sm_{properties.major}{properties.minor}"
        return Gpu(name, arch, properties.multi_processor_count)


@dataclass(frozen=True)
class NativeResult:
    """The search of one kernel."""

    source: Source
    before: str
    """What a program on this GPU got for the kernel before the search, in words."""
    result: TuningResult
    row: Row | None
    """Its record in the store; None if no candidate is surely faster."""


def native_settings(seconds: float, seed: int) -> Settings:
    """Settings of the search of one kernel: ptxas' input, then moves of native instructions."""
    return Settings(ASSEMBLER, seed=seed, seconds=seconds, objective="gpu")


def open_local_gpu(
    step: AttentionStep, kernel: Kernel, plan: MeasurementPlan
) -> AbstractContextManager[Device]:
    """The first GPU, in a worker process that may crash or hang."""
    return LocalGpu(kernel, plan, make=partial(make_evaluator, step))


def tune_step(
    step: AttentionStep,
    gpu: Gpu,
    settings: Settings,
    store: Store,
    *,
    names: Collection[str] = (),
    open_device: OpenDevice = open_local_gpu,
    installed: Sequence[Assembler] | None = None,
    workers: int | None = None,
) -> Iterator[NativeResult]:
    """Search each kernel of a step, one after the other; a faster cubin is stored at once.

    ``settings``: of :func:`native_settings`; the seconds are those of each kernel.  ``names``: the
    kernels to search (empty: all).  ``installed``: versions of ptxas (None: those that are found).
    ``workers``: processes that assemble.

    A candidate is taken only if the verifier proves it, if its results have the bits of the
    original's on the step and on batches of odd lengths, and if a comparison in a fresh process
    says that the step is faster.  Raises :class:`BadInput` for a step without native search, and
    :class:`MissingPart` without ptxas or GPU.
    """
    assemblers = require_assemblers(installed)
    for source in step_sources(step, gpu.sms, gpu.arch):
        if names and source.kernel not in names:
            continue
        refuse_replacement(source, store)
        before = stored_answer(source, store, gpu.name)
        assert source.launch is not None
        kernel = Kernel(source.cubin, source.kernel, source.launch)
        plan = replace(settings.measurement_plan, deadline=_DEADLINE)
        with open_setup(source, assemblers, workers) as setup, ExitStack() as stack:
            # The workers start while the device opens, not in the seconds of the search.
            started = [setup.pool.submit_task(_start, None) for _ in range(setup.pool.workers)]
            device = stack.enter_context(open_device(step, kernel, plan))
            wait(started)
            result = tune_assembler(setup, make_strategy(settings.strategy), settings, device)
            row = None
            if result.improved:
                row = record_result(store, source, settings, result, device.info)
        yield NativeResult(source, before, result, row)


def _start(builder: object, argument: None) -> None:
    """Do nothing; the worker that runs it has its builder."""


def require_assemblers(installed: Sequence[Assembler] | None = None) -> list[Assembler]:
    """The installed versions of ptxas.  Raises :class:`MissingPart` if there are none."""
    found = list(find_assemblers() if installed is None else installed)
    if not found:
        raise MissingPart(
            "no ptxas is installed, so no kernel can be assembled; pip install triton, or install "
            "the CUDA toolkit and set CUDA_HOME"
        )
    return found


def refuse_replacement(source: Source, store: Store) -> None:
    """Raise :class:`BadInput` if the cubin to be searched is itself a result in the store."""
    if store.is_optimised(source.cubin):
        raise BadInput(
            f"{source.kernel} is a replacement from the store already; run the command without "
            "`nostall apply`, so that the search starts from what Triton compiles"
        )


def stored_answer(source: Source, store: Store, gpu: str | None) -> str:
    """What a program on the GPU ``gpu`` gets for a kernel from the store, in words."""
    lookup = store.lookup(source.cubin, gpu=gpu, kernel=source.kernel, dependent=True)
    if lookup.cubin is None:
        reasons = "; ".join(lookup.rejections)
        return f"what Triton compiles ({reasons or 'the store has no record of this cubin'})"
    row = lookup.cubin.row
    if reason := rejection_reason(store, row):
        return (
            f"record {row.id[:12]}, which this version's verifier refuses ({reason}): remove it "
            f"with `nostall store rm {row.id[:12]}`, and search again"
        )
    return f"record {row.id[:12]} of the store, {row.ratio:.4f} times as fast on {row.gpu}"


@dataclass(frozen=True)
class PortfolioCheck:
    """How many candidates of one kernel are built and accepted by the verifier."""

    source: Source
    registers: int
    """Registers of a thread of the original."""
    reproduces: bool
    """Whether an installed ptxas makes the original's code from its PTX."""
    statuses: Counter[str]
    """Candidates by the status of their build: ``built``, ``unproved`` and others."""
    codes: int
    """Different machine codes."""
    unsafe: tuple[str, ...]
    """Why the verifier of machine code refuses candidates, one text each."""


def check_portfolio(
    source: Source,
    installed: Sequence[Assembler] | None = None,
    workers: int | None = None,
    most: int | None = None,
) -> PortfolioCheck:
    """Assemble the portfolio of a kernel, or its first ``most`` states, and verify each cubin.

    Other arguments and errors are those of :func:`nostall.tuning.assembler.job.open_setup`.
    """
    with open_setup(source, installed, workers) as setup:
        states = setup.space.portfolio()[:most]
        tasks = [setup.pool.submit_task(build_state, state) for state in states]
        built = [task.result() for task in tasks]
        first = {candidate.code_sha256: candidate for candidate in built if candidate.cubin}
        checks = [setup.pool.submit_task(find_hazards, c.cubin) for c in first.values()]
        hazards = [check.result() for check in checks]
    return PortfolioCheck(
        source,
        setup.compiler.registers,
        setup.compiler.reproduces,
        Counter(candidate.status for candidate in built),
        len(first),
        tuple(hazard for hazard in hazards if hazard),
    )
