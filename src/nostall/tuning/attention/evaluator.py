"""Evaluator of attention kernels in the worker process: checks candidates, and times the step.

A sample is the time of the whole step: the kernel under search beside the step's other kernels,
over caches that rotate, in a CUDA graph.

Checked launches of an attention step: its own batch, and seeded batches of odd lengths.

A candidate must give the bits of the original, whose result is compared with fp64. The scratch and
the result hold NaN before each launch, so that a result of an earlier launch is not taken for this
one's. In batches of odd lengths so do the slots of the cache that no sequence owns.

Other cubins for a compiled Triton kernel, launched by Triton's own launcher.

While a variant is in use, Triton's table of compiled kernels holds nothing else, so a launch that
needs another kernel is noticed: it would compile one.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from nostall.core.errors import BadInput
from nostall.gpu.clock import capture
from nostall.gpu.device import Kernel, MeasurementPlan, Outcome, Timing
from nostall.gpu.evaluator.checking import CHECK_START, SEARCH_START
from nostall.gpu.timing import launches_per_sample, round_orders
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.winners.on_gpu import GpuBatch, PlanLaunch, exact_token
from nostall.serving.batch.examples import odd_batch, unowned_slots
from nostall.serving.errors import current_gpu
from nostall.tuning.attention.sources import AttentionStep, attention_functions

_GUARD_ROWS, _GUARD = 64, 7.0
"""Rows behind the result that no kernel may write, and what they hold."""
_LIMIT = 1.1
"""Allowed error, in units of the roundings of weights and results to the inputs' dtype."""
_FEW_SMS = 7
_MOST_ELEMENTS = 1 << 24
"""Elements of a cache that is compared after each launch, at most."""
_LEAST_SPLIT = 256
"""Keys of a unit in checked batches, so that short sequences are split too."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A launch with known results."""

    batch: GpuBatch
    launch: PlanLaunch
    expected: Tensor
    """The original's result, with the rows behind it."""
    allowed: Tensor
    """Allowed error of the sampled tokens, (sampled, heads, head dimension)."""
    before: tuple[Tensor, ...]
    """Copies of what a launch reads."""

    @staticmethod
    def of(batch: GpuBatch, launch: PlanLaunch) -> Sample:
        """Run the original twice.

        Raises :class:`BadInput` if its result is wrong or does not repeat: then nothing can be
        compared with it.
        """
        before = tuple(tensor.clone() for tensor in _inputs(batch, launch))
        results = [_run(batch, launch) for _ in range(2)]
        sample = Sample(batch, launch, results[0], _allowed_error(batch), before)
        if not sample.is_exact(results[0]):
            raise BadInput(
                f"the original attention of {len(batch.ragged)} sequences differs from fp64; "
                "nothing can be compared with it: please report this bug"
            )
        if not _same(*results):
            raise BadInput(
                "two launches of the original attention differ; nothing can be compared with it: "
                "please report this bug"
            )
        return sample

    def is_exact(self, result: Tensor) -> bool:
        """Whether the sampled tokens are those of fp64, up to the roundings of the dtype."""
        error = (result[self.batch.sampled].double() - self.batch.exact).abs()
        return bool((error <= self.allowed).all())

    def problem(self) -> str:
        """Run the kernel that is in use now; why its result is refused, or an empty text."""
        result = _run(self.batch, self.launch)
        inputs = list(zip(_inputs(self.batch, self.launch), self.before, strict=True))
        checks = {
            "differs from the original's": _same(result, self.expected),
            "differs from fp64": self.is_exact(result),
            "comes with changed inputs": all(_same(now, then) for now, then in inputs),
            "comes with a queue that is not empty": not bool(self.launch.buffers.queue.any()),
        }
        wrong = [text for text, is_right in checks.items() if not is_right]
        for now, then in inputs if wrong else ():
            now.copy_(then)  # the next candidate is judged on the same inputs
        sequences = len(self.batch.ragged)
        return f"the result of {sequences} sequences {', and '.join(wrong)}" if wrong else ""


def own_sample(step: AttentionStep, batch: GpuBatch, sms: int) -> Sample:
    """The step itself, with the first cache of ``batch``."""
    first = replace(batch, caches=batch.caches[:1])
    return Sample.of(first, first.launch(step.plan, sms))


def odd_sample(step: AttentionStep, seed: int, sms: int, device: torch.device) -> Sample:
    """A batch of odd lengths for the same kernels; its tables are for the GPU or for a few SMs."""
    rng = np.random.default_rng(seed)
    shape = step.shape
    ragged = odd_batch(
        rng,
        shape.page_size,
        seed=seed,
        has_prefixes=shape.has_prefixes,
        has_trees=shape.has_trees,
    )
    if not ragged.query_lengths.any():
        return odd_sample(step, seed + (1 << 32), sms, device)
    plan = replace(
        step.plan, units_per_program=int(rng.choice([0, 1, 4])), least_split=_LEAST_SPLIT
    )
    batch = GpuBatch.of(ragged, shape, getattr(torch, step.dtype), device, most_copies=1)
    # Small scales spread the weights over many keys, large ones put them on few.
    batch.query.mul_(float(rng.choice([0.1, 1.0, 4.0])))
    cache = PagedCache(*(pages.clone() for pages in batch.caches[0][:2]))
    free = torch.from_numpy(unowned_slots(ragged)).to(device)
    for pages in cache[:2]:
        pages[free] = float("nan")
    exact = [exact_token(ragged, shape, batch.query, cache, int(t)) for t in batch.sampled]
    batch = replace(batch, caches=(cache,), exact=torch.stack(exact))
    return Sample.of(batch, batch.launch(plan, int(rng.choice([sms, _FEW_SMS]))))


def _run(batch: GpuBatch, launch: PlanLaunch) -> Tensor:
    """The result of one launch with the first cache, and the rows behind it."""
    tokens = len(batch.query)
    size = (tokens + _GUARD_ROWS, *batch.query.shape[1:])
    guarded = torch.full(size, _GUARD, dtype=batch.query.dtype, device=batch.query.device)
    guarded[:tokens] = float("nan")
    launch.buffers.queue.zero_()
    launch.buffers.partial.fill_(float("nan"))
    launch.buffers.partial_log_sums.fill_(float("nan"))
    launch(batch.caches[0], guarded[:tokens])
    return guarded


def _allowed_error(batch: GpuBatch) -> Tensor:
    """The allowed error of the sampled tokens: roundings of the weights and of the result."""
    pages = batch.caches[0]
    absolute = pages._replace(values=pages.values.abs())
    sums = [
        exact_token(batch.ragged, batch.shape, batch.query, absolute, int(token))
        for token in batch.sampled
    ]
    roundoff = torch.finfo(batch.query.dtype).eps / 2
    return _LIMIT * (roundoff * (batch.exact.abs() + torch.stack(sums)) + 1e-6)


def _inputs(batch: GpuBatch, launch: PlanLaunch) -> tuple[Tensor, ...]:
    """What a launch reads; large caches are left out, to save time and memory."""
    tables = launch.buffers.tables
    pages = batch.caches[0][:2]
    is_small = pages[0].numel() < _MOST_ELEMENTS
    return (
        batch.query,
        *(pages if is_small else ()),
        *batch.tensors,
        tables.tasks,
        tables.program_offsets,
        tables.reductions,
        tables.counts,
        tables.prefix_rows,
    )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return bool(torch.equal(first.view(words), second.view(words)))


_REFUSED = ("out of resource", "invalid argument")
"""Parts of the driver's messages for a launch that did not start; the context is intact."""


class TritonVariants:
    """Variants of one kernel of the present GPU."""

    def __init__(self, functions: Sequence[Any], cubin: bytes, ordinal: int) -> None:
        """``functions``: Triton functions, one of which compiled ``cubin`` for the GPU ``ordinal``.

        Raises :class:`BadInput` if none did.
        """
        self._tables = [
            function.device_caches[ordinal][0]
            for function in functions
            if ordinal in function.device_caches
        ]
        found = [
            (table, compiled)
            for table in self._tables
            for compiled in table.values()
            if compiled.asm.get("cubin") == cubin
        ]
        if not found:
            raise BadInput(
                "this GPU's launch of the step compiles another kernel than the one to be tuned; "
                "search on the GPU and with the versions that will serve"
            )
        self._table, self._compiled = found[0]

    def load(self, cubin: bytes) -> Any:
        """The kernel with another cubin.  Raises ``RuntimeError`` if the driver refuses it."""
        variant = copy.copy(self._compiled)
        variant.asm = type(self._compiled.asm)(self._compiled.asm)
        variant.asm.pop("sass", None)
        variant.asm["cubin"] = variant.kernel = cubin
        variant.module = variant.function = variant._run = None
        try:
            variant._init_handles()
        except OutOfResources as error:
            raise RuntimeError(str(error)) from error
        return variant

    @contextmanager
    def using(self, variant: Any) -> Iterator[None]:
        """A context in which launches of the kernel run the variant.

        Raises :class:`BadInput` at the end if a launch needed another compiled kernel.
        """
        cubin = self._compiled.asm["cubin"]
        saved = dict(self._table)
        same = [key for key, compiled in saved.items() if compiled.asm.get("cubin") == cubin]
        self._table.clear()
        self._table.update(dict.fromkeys(same, variant))
        try:
            yield
            if any(compiled is not variant for compiled in self._table.values()):
                raise BadInput(
                    "a checked launch compiled another kernel than the one to be tuned, so it did "
                    "not check it; please report this bug"
                )
        finally:
            self._table.clear()
            self._table.update(saved)

    def unload(self, variant: Any) -> None:
        """Free the module; newer versions of Triton do it themselves with the object."""
        module, variant.module = variant.module, None
        if module is not None:
            torch.cuda.synchronize()
            ctypes.CDLL("libcuda.so.1").cuModuleUnload(ctypes.c_void_p(module))


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
        variants: Callable[[], Any],
        device: torch.device,
        sms: int,
        gpu: Mapping[str, str],
    ) -> None:
        """Run the original, and compare it with fp64.

        ``variants`` makes :class:`TritonVariants`, after the original ran.  ``gpu``: what
        :meth:`info` says.  Raises :class:`~nostall.core.errors.BadInput` if the original's result
        is wrong.
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
            if not any(part in str(error).lower() for part in _REFUSED):
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

    Raises ``MissingPart`` without a GPU.
    """
    current_gpu()
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
