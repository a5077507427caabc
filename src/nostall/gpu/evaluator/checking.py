"""Check that a candidate computes what the original computes, on many random samples.

A *sample* is one set of random inputs: the original runs on it, then the candidate, and all output
buffers are compared.  Outputs are poisoned before each run, with a different byte for the candidate
than for the original.  The first samples run one by one: the original runs twice (to show that it
is deterministic), and the candidate's first launch runs with a cold L2 cache.  The other samples
run in CUDA graphs that also generate the inputs, so the GPU does not wait for the host.
"""

from __future__ import annotations

from typing import Any

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.gpu.device import MeasurementPlan
from nostall.gpu.driver import Cuda, KernelArguments, LoadedKernel
from nostall.gpu.evaluator.buffers import Buffers
from nostall.gpu.timing import L2Flush

SINGLE_SAMPLES = 16
"""Samples at the start of a check that run one by one."""
_SAMPLES_PER_GRAPH = 16
CHECK_START, SEARCH_START = 1 << 40, 0
"""First sample numbers of checks, and of the input sets that a search reuses."""


class Checker:
    """Runs kernels on random inputs of one launch and compares their outputs."""

    def __init__(
        self,
        cuda: Cuda,
        name: str,
        launch: LaunchSpec,
        sets: int,
        plan: MeasurementPlan,
        flush: L2Flush,
    ) -> None:
        """``name``: the kernel's name, for messages.  ``sets``: input sets to allocate."""
        self.cuda, self.name, self.launch, self.flush = cuda, name, launch, flush
        self.buffers = Buffers(cuda, launch, sets, plan.seed, plan.tolerance)
        self.arguments: KernelArguments | None = None

    def bind(self, kernel: LoadedKernel) -> KernelArguments:
        """The packed kernel arguments; the same for all candidates."""
        if self.arguments is None:
            count = sum(not hasattr(a, "constant") for a in self.launch.args)
            extra = self.cuda.missing_parameters(kernel, count)
            self.arguments = KernelArguments.pack(self.launch, self.buffers.pointers, extra)
        return self.arguments

    def run(self, kernel: LoadedKernel, index: int, cold: bool = False) -> None:
        """Launch a kernel once on input set ``index``, after an L2 flush if ``cold``."""
        self.buffers.reset(index)
        if cold:
            self.flush()
        self.cuda.launch(kernel, self.launch, self.bind(kernel))

    def prepare_set(self, original: LoadedKernel, sample: int, index: int) -> None:
        """Generate a sample as input set ``index``, with the outputs of the original.

        Raises :class:`BadInput` if the original gives different outputs in a second launch.
        """
        self.buffers.set_sample(sample)
        self.buffers.generate_inputs(index)
        self.run(original, index)
        self.buffers.save_expected(index)
        self.run(original, index)
        mismatches = self.buffers.count_mismatches(index)
        if mismatches:
            raise BadInput(
                f"{self.name} is not deterministic: {mismatches} {self._unit} of its outputs "
                "differ between two launches on the same inputs, so no candidate could be "
                "checked; tune a kernel whose outputs repeat (no floating-point atomics, no "
                "unwritten outputs), or allow a difference with --tolerance"
            )

    def count_mismatches(self, candidate: LoadedKernel, index: int, cold: bool = False) -> int:
        """Words or elements of the candidate's outputs that are wrong on input set ``index``."""
        self.run(candidate, index, cold)
        return self.buffers.count_mismatches(index)

    def count_early_reads(self, candidate: LoadedKernel, index: int) -> int:
        """Wrong words or elements of a dependent launch after a kernel that writes an input late.

        Each input is tested alone: it is zero until the kernel before the candidate, which lets
        its dependents start at once, has written it.  A candidate that does not wait reads zeros,
        so its outputs differ.
        """
        mismatches = 0
        for buffer in self.buffers.input_names:
            self.buffers.reset(index)
            self.buffers.write_late(index, buffer)
            arguments = self.bind(candidate)
            self.cuda.launch(candidate, self.launch, arguments, dependent=True)
            mismatches += self.buffers.count_mismatches(index)
        return mismatches

    def first_mismatch(
        self, original: LoadedKernel, candidate: LoadedKernel, first: int, count: int
    ) -> tuple[int, int] | None:
        """Check ``count`` samples from number ``first`` on.

        Returns the first sample on which the candidate is wrong and how many words or elements
        differ, or None if all outputs agree.  Many samples run together; if one of them differs,
        bisection finds it.

        Raises :class:`BadInput` if the original or the difference does not repeat.
        """
        singles = min(count, max(0, SINGLE_SAMPLES - first))
        for sample in range(first, first + singles):
            mismatches = self._check_single(original, candidate, sample, cold=sample == 0)
            if mismatches:
                return sample, mismatches
        first, rest = first + singles, count - singles
        if rest == 0 or not self._check_batch(original, candidate, first, rest):
            return None
        while rest > 1:
            half = rest // 2
            if self._check_batch(original, candidate, first, half):
                rest = half
            else:
                first, rest = first + half, rest - half
        mismatches = self._check_single(original, candidate, first)
        if mismatches:
            return first, mismatches
        raise BadInput(
            f"{self.name} is not deterministic: original and candidate differed on sample {first}, "
            "but not when it ran a second time; tune a kernel whose outputs repeat"
        )

    def describe(self, mismatch: tuple[int, int]) -> str:
        """A sentence about a result of :meth:`first_mismatch`."""
        sample, mismatches = mismatch
        return f"{mismatches} {self._unit} of the outputs differ on sample {sample}"

    def release(self) -> None:
        """Free the device memory."""
        self.buffers.release()

    @property
    def _unit(self) -> str:
        return "words" if self.buffers.tolerance is None else "words or elements"

    def _check_single(
        self, original: LoadedKernel, candidate: LoadedKernel, sample: int, cold: bool = False
    ) -> int:
        self.prepare_set(original, CHECK_START + sample, 0)
        return self.count_mismatches(candidate, 0, cold)

    def _check_batch(
        self, original: LoadedKernel, candidate: LoadedKernel, first: int, count: int
    ) -> int:
        """Total mismatches in ``count`` samples, which run as CUDA graphs."""

        def check_sample() -> None:
            self.buffers.generate_inputs(0)
            self.run(original, 0)
            self.buffers.save_expected(0)
            self.run(candidate, 0)
            self.buffers.add_mismatches(0)
            self.buffers.advance_sample()

        def check_samples() -> None:
            for _ in range(_SAMPLES_PER_GRAPH):
                check_sample()

        self.buffers.set_sample(CHECK_START + first)
        self.buffers.clear_mismatches()
        graph: Any = self.cuda.capture(check_samples) if count >= _SAMPLES_PER_GRAPH else None
        for _ in range(count // _SAMPLES_PER_GRAPH):
            self.cuda.replay(graph)
        for _ in range(count % _SAMPLES_PER_GRAPH):
            check_sample()
        mismatches = self.buffers.read_mismatches()
        if graph is not None:
            self.cuda.destroy_graph(graph)
        return mismatches
