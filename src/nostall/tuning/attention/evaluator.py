"""Evaluator of attention kernels in the worker process: checks candidates, and times the step.

A sample is the time of the whole step: the kernel under search beside the step's other kernels,
over caches that rotate, in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nostall.core.errors import MissingPart
from nostall.gpu.clock import capture
from nostall.gpu.device import Kernel, MeasurementPlan, Outcome, Timing
from nostall.gpu.evaluator.checking import CHECK_START, SEARCH_START
from nostall.gpu.timing import launches_per_sample, round_orders
from nostall.serving.attention.winners.gpu_batch import GpuBatch
from nostall.tuning.attention.samples import Sample, odd_sample, own_sample
from nostall.tuning.attention.sources import attention_functions
from nostall.tuning.attention.step import AttentionStep
from nostall.tuning.attention.variants import TritonVariants, Variants, is_refused_launch

Replay = Callable[[], object]
_PROBES = 5
"""Samples that say how long a step takes."""


class StepEvaluator:
    """Checks and times candidates of one kernel of a step; an ``Evaluator`` of ``LocalGpu``."""

    def __init__(
        self,
        step: AttentionStep,
        kernel: Kernel,
        plan: MeasurementPlan,
        variants: Callable[[], Variants],
        device: torch.device,
        sms: int,
        gpu: Mapping[str, str],
    ) -> None:
        """Run the original, and compare it with fp64.

        ``variants`` is called after the original ran.  ``gpu``: what :meth:`info` says.  Raises
        :class:`~nostall.core.errors.BadInput` if the original's result is wrong.
        """
        self.step, self.kernel, self.plan = step, kernel, plan
        self.device, self.sms, self.gpu = device, sms, gpu
        self.batch = GpuBatch.of(step.ragged, step.shape, getattr(torch, step.dtype), device)
        self.own = own_sample(step, self.batch, sms)
        self.variants = variants()
        self.original = self.variants.load(kernel.cubin)
        with self.variants.using(self.original):
            self._searched = [
                odd_sample(step, SEARCH_START + plan.seed + index, sms, device)
                for index in range(1, plan.inputs)
            ]

    def info(self) -> Mapping[str, str]:
        """The GPU, and what was measured."""
        return {**self.gpu, "measured": f"attention step {self.step.name}"}

    def evaluate(self, cubin: bytes) -> Outcome:
        """Check a candidate on the step and on further batches, then time it with the original."""
        return self._with_candidate(cubin, self._evaluate)

    def check(self, cubin: bytes, first: int, count: int) -> Outcome:
        """Check a candidate on ``count`` new batches from number ``first`` on."""

        def check(candidate: Any) -> Outcome:
            begin = perf_counter()
            detail = self._problem(candidate, self.own)
            for number in range(first, first + count):
                if detail:
                    break
                with self.variants.using(self.original):
                    seed = CHECK_START + self.plan.seed + number
                    sample = odd_sample(self.step, seed, self.sms, self.device)
                detail = self._problem(candidate, sample)
            return Outcome(
                "wrong" if detail else "agrees",
                detail=detail,
                phase_seconds={"check": perf_counter() - begin},
            )

        return self._with_candidate(cubin, check)

    def compare(self, cubin: bytes, rounds: int) -> Outcome:
        """Time interleaved triples (original, candidate, original), over several loads of each."""
        loads = max(1, min(self.plan.loads, rounds // 2))
        begin = perf_counter()
        try:
            triples = [self._load_triple(cubin, number) for number in range(loads)]
        except RuntimeError as error:
            return Outcome("rejected", detail=str(error))
        samples: list[list[float]] = [[], [], []]
        shares = [len(part) for part in np.array_split(np.arange(rounds), loads)]
        for triple, share in zip(triples, shares, strict=True):
            timed = self._time([self._graph(variant) for variant in triple], share)
            for all_samples, new_samples in zip(samples, timed, strict=True):
                all_samples += new_samples
        for variant in (variant for triple in triples for variant in triple):
            self.variants.unload(variant)
        original, candidate, null = (tuple(row) for row in samples)
        timing = Timing(original, candidate, null, loads)
        return Outcome("timed", timing, phase_seconds={"time": perf_counter() - begin})

    def _load_triple(self, cubin: bytes, number: int) -> list[Any]:
        """Load original, candidate and original; the load order rotates with ``number``.

        All loads stay until the end of a comparison, so that each has another address: the address
        of a module changes its time a little.
        """
        cubins = (self.kernel.cubin, cubin, self.kernel.cubin)
        order = [(number + step) % 3 for step in range(3)]
        loaded = {index: self.variants.load(cubins[index]) for index in order}
        return [loaded[index] for index in range(3)]

    def _with_candidate(self, cubin: bytes, use: Callable[[Any], Outcome]) -> Outcome:
        try:
            candidate = self.variants.load(cubin)
        except RuntimeError as error:
            return Outcome("rejected", detail=str(error))
        try:
            outcome = use(candidate)
        except RuntimeError as error:
            if not is_refused_launch(error):
                raise  # the context may be broken: the worker ends
            outcome = Outcome("rejected", detail=str(error))
        self.variants.unload(candidate)
        return outcome

    def _evaluate(self, candidate: Any) -> Outcome:
        begin = perf_counter()
        for sample in (self.own, *self._searched):
            if detail := self._problem(candidate, sample):
                seconds = {"check": perf_counter() - begin}
                return Outcome("wrong", detail=detail, phase_seconds=seconds)
        checked = perf_counter()
        graphs = [self._original_graph, self._graph(candidate)]
        original, timed = self._time(graphs, self.plan.rounds)
        seconds = {"check": checked - begin, "time": perf_counter() - checked}
        return Outcome("timed", Timing(tuple(original), tuple(timed)), phase_seconds=seconds)

    def _problem(self, candidate: Any, sample: Sample) -> str:
        with self.variants.using(candidate):
            return sample.problem()

    @cached_property
    def _original_graph(self) -> Replay:
        return self._graph(self.original)

    @cached_property
    def _runs(self) -> int:
        """Runs of the step over all caches that fill a sample."""
        graph = self._captured(self.original, 1)
        seconds = float(np.median(interleaved([graph], _PROBES)[0]))
        return launches_per_sample(seconds, self.plan.batch_us)

    def _graph(self, variant: Any) -> Replay:
        return self._captured(variant, self._runs)

    def _captured(self, variant: Any, runs: int) -> Replay:
        """So many runs of a variant as one CUDA graph; on the CPU, for tests, the runs."""
        if self.device.type != "cuda":
            return partial(self._repeat, variant, runs)
        with self.variants.using(variant):
            replay: Replay = capture(self._run_caches, runs).replay
            return replay

    def _repeat(self, variant: Any, runs: int) -> None:
        with self.variants.using(variant):
            for _ in range(runs):
                self._run_caches()

    def _run_caches(self) -> None:
        for pages in self.batch.caches:
            self.own.launch(pages, self._out)

    @cached_property
    def _out(self) -> torch.Tensor:
        return torch.empty_like(self.batch.query)

    def _time(self, graphs: Sequence[Replay], rounds: int) -> list[list[float]]:
        """Seconds of one step by each graph, ``rounds`` samples each."""
        steps = self._runs * len(self.batch.caches)
        return [[sample / steps for sample in row] for row in interleaved(graphs, rounds)]


def interleaved(graphs: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Seconds of each graph, in the order of :func:`round_orders`; each runs once before."""
    for graph in graphs:
        graph()
    samples: list[list[float]] = [[] for _ in graphs]
    marks: list[tuple[int, Any, Any]] = []
    for order in round_orders(len(graphs), rounds):
        for index in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[index]()
            end.record()
            marks.append((index, start, end))
    torch.cuda.synchronize()
    for index, start, end in marks:
        samples[index].append(1e-3 * float(start.elapsed_time(end)))
    return samples


def make_evaluator(
    step: AttentionStep, kernel: Kernel, plan: MeasurementPlan, ordinal: int
) -> StepEvaluator:
    """The evaluator on a GPU; called in the worker process.

    Raises :class:`MissingPart` without a GPU.
    """
    if not torch.cuda.is_available():
        raise MissingPart("no GPU is present; run this command on the GPU that will serve")
    import triton

    # The originals are compiled, not the store's replacements of an earlier search.
    triton.knobs.cache.manager_class = None
    device = torch.device("cuda", ordinal)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    return StepEvaluator(
        step,
        kernel,
        plan,
        lambda: TritonVariants(attention_functions(), kernel.cubin, ordinal),
        device,
        properties.multi_processor_count,
        {
            "gpu": str(torch.cuda.get_device_name(device)),
            "architecture": f"sm_{properties.major}{properties.minor}",
            "torch": torch.__version__,
        },
    )
