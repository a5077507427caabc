"""Check that a candidate computes what the original computes, on many random samples.

A *sample* is one set of random inputs: the original runs on it, then the candidate, and all output
buffers are compared.  Outputs are poisoned before each run, with a different byte for the candidate
than for the original.  The first samples run one by one: the original runs twice (to show that it
is deterministic), and the candidate's first launch runs with a cold L2 cache.  The other samples
run in CUDA graphs that also generate the inputs, so the GPU does not wait for the host.

Device buffers of a launch: random inputs, expected outputs and their comparison on the GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from nostall.core.errors import BadInput
from nostall.core.launch import Buffer, LaunchSpec
from nostall.core.tolerance import Tolerance
from nostall.gpu.device import MeasurementPlan
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel
from nostall.gpu.evaluator import device_code
from nostall.gpu.timing import L2Flush

ELEMENT_BYTES = {
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f8e4m3": 1,
    "f8e5m2": 1,
    **{f"{sign}{bits}": bits // 8 for sign in "iu" for bits in (8, 16, 32, 64)},
}
_POISON = (0xFF, 0x5A)
"""Bytes that fill outputs before a checked launch, alternately.  An output that a kernel does not
write cannot equal the expected one after both."""
_KEY = 0x5851F42D4C957F2D
_LATE_NS, _LATE_BLOCKS = 30_000, 16
"""Nanoseconds for which a late kernel waits before it writes, and its blocks at most."""
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True)
class _DeviceBuffer:
    """The working copy of a buffer in device memory."""

    spec: Buffer
    count: int  # elements
    size: int  # bytes
    padded: int  # bytes, rounded up to a multiple of 16
    pointer: int


class Buffers:
    """Device memory of one launch: working copies, sets of random inputs, expected outputs.

    The inputs of a *sample* are a function of the seed and the sample's number alone.
    """

    def __init__(
        self, cuda: Cuda, launch: LaunchSpec, sets: int, seed: int, tolerance: Tolerance | None
    ) -> None:
        """Allocate ``sets`` sets of inputs and expected outputs.

        Raises :class:`BadInput` if the GPU has too little free memory.
        """
        self.cuda, self.seed, self.tolerance = cuda, seed, tolerance
        self._allocated: list[int] = []
        args = [a for a in launch.args if isinstance(a, Buffer)]
        _check_free_memory(cuda, args, sets)
        try:
            self.working = [self._allocate_buffer(spec) for spec in args]
            self._inputs = [
                {b.spec.name: self._allocate(b.padded) for b in self._input_buffers()}
                for _ in range(sets)
            ]
            self._expected = [
                {b.spec.name: self._allocate(b.padded) for b in self._output_buffers()}
                for _ in range(sets)
            ]
            self._words = self._allocate(16)
        except DriverError as error:
            raise BadInput(_out_of_memory(args, sets, cuda.memory()[0], str(error))) from error
        self.pointers = {buffer.spec.name: buffer.pointer for buffer in self.working}
        self._sample, self._mismatches = self._words, self._words + 8
        self._fill_kernels = {
            b.spec.dtype: cuda.load_helper(device_code.fill(b.spec.dtype), "fill")
            for b in self._input_buffers()
        }
        self._compare_kernels = {
            b.spec.dtype: self._compare_kernel(b.spec.dtype) for b in self._output_buffers()
        }
        self._advance_kernel = cuda.load_helper(device_code.advance(), "advance")
        self._resets = 0

    def set_sample(self, number: int) -> None:
        """Set the number of the sample that :meth:`generate_inputs` generates next."""
        self.cuda.upload_word(self._sample, number)

    def advance_sample(self) -> None:
        """Add 1 to the sample's number; can be captured in a graph."""
        values = (self._sample,)
        self._launch(self._advance_kernel, 1, (values, (ctypes.c_void_p,)), threads=1)

    def generate_inputs(self, index: int) -> None:
        """Fill input set ``index`` with the current sample; can be captured in a graph."""
        for position, buffer in enumerate(self._input_buffers()):
            spec = buffer.spec
            key = (self.seed * device_code.GOLDEN + (position + 1) * _KEY) & _MAX_INT64
            values = (
                self._inputs[index][spec.name],
                buffer.count,
                self._sample,
                key,
                spec.low,
                spec.high - spec.low,
                spec.bound or 0,
            )
            types = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
            range_types = (ctypes.c_float, ctypes.c_float, ctypes.c_uint64)
            kernel = self._fill_kernels[spec.dtype]
            self._launch(kernel, buffer.count, (values, (*types, *range_types)))

    def reset(self, index: int) -> None:
        """Prepare the working copies for a launch: inputs of set ``index``, poisoned outputs."""
        self._resets += 1
        for buffer in self.working:
            role = buffer.spec.role
            if role in ("in", "inout"):
                source = self._inputs[index][buffer.spec.name]
                self.cuda.copy(buffer.pointer, source, buffer.padded)
            else:
                byte = _POISON[self._resets % 2] if role == "out" else 0
                self.cuda.fill(buffer.pointer, byte, buffer.padded)

    @property
    def input_names(self) -> list[str]:
        """The names of the buffers that the kernel reads."""
        return [buffer.spec.name for buffer in self._input_buffers()]

    def write_late(self, index: int, name: str) -> None:
        """Set an input to zero, then write its values of set ``index`` by a kernel that is late.

        The kernel lets its dependents start before it writes.  Needs sm_90.
        """
        buffer = next(b for b in self.working if b.spec.name == name)
        self.cuda.fill(buffer.pointer, 0, buffer.padded)
        source = self._inputs[index][name]
        kernel = self.cuda.load_helper(device_code.late_copy(), "late_copy")
        count = buffer.padded // 4
        values = (buffer.pointer, source, count, _LATE_NS)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        # Few blocks: the candidate's blocks must fit beside them.
        self._launch(kernel, min(count, _LATE_BLOCKS * 256), (values, types))

    def save_expected(self, index: int) -> None:
        """Save the current outputs as the expected ones of set ``index``.

        Padding is compared as well, so it is set to zero first on both sides.
        """
        for buffer in self._output_buffers():
            self._clear_padding(buffer)
            expected = self._expected[index][buffer.spec.name]
            self.cuda.copy(expected, buffer.pointer, buffer.padded)

    def clear_mismatches(self) -> None:
        """Set the mismatch counter to zero."""
        self.cuda.fill(self._mismatches, 0, 8)

    def add_mismatches(self, index: int) -> None:
        """Add the outputs that differ from the expected ones of set ``index`` to the counter.

        Counts 32-bit words, or elements if there is a tolerance and the dtype is floating-point.
        Can be captured in a graph.
        """
        for buffer in self._output_buffers():
            self._clear_padding(buffer)
            kernel = self._compare_kernels[buffer.spec.dtype]
            expected = self._expected[index][buffer.spec.name]
            bitwise = self.tolerance is None or buffer.spec.dtype not in device_code.FLOAT_DTYPES
            count = buffer.padded // 4 if bitwise else buffer.count
            limits = (0.0, 0.0) if bitwise else (self.tolerance.rtol, self.tolerance.atol)  # type: ignore[union-attr]
            values = (buffer.pointer, expected, count, self._mismatches, *limits)
            pointers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
            self._launch(kernel, count, (values, (*pointers, ctypes.c_double, ctypes.c_double)))

    def read_mismatches(self) -> int:
        """The mismatch counter; waits for the device."""
        return self.cuda.download_word(self._mismatches)

    def count_mismatches(self, index: int) -> int:
        """Words or elements of the current outputs that differ from those of set ``index``."""
        self.clear_mismatches()
        self.add_mismatches(index)
        return self.read_mismatches()

    def release(self) -> None:
        """Free the device memory.  The buffers must not be used afterwards."""
        self.cuda.synchronize()
        while self._allocated:
            self.cuda.free(self._allocated.pop())

    def _input_buffers(self) -> list[_DeviceBuffer]:
        return [b for b in self.working if b.spec.role in ("in", "inout")]

    def _output_buffers(self) -> list[_DeviceBuffer]:
        return [b for b in self.working if b.spec.role in ("out", "inout")]

    def _allocate_buffer(self, spec: Buffer) -> _DeviceBuffer:
        count, size, padded = _sizes(spec)
        return _DeviceBuffer(spec, count, size, padded, self._allocate(padded))

    def _allocate(self, size: int) -> int:
        pointer = self.cuda.allocate(size)
        self._allocated.append(pointer)
        return pointer

    def _compare_kernel(self, dtype: str) -> LoadedKernel:
        if self.tolerance is not None and dtype in device_code.FLOAT_DTYPES:
            return self.cuda.load_helper(device_code.differing_beyond(dtype), "differing")
        return self.cuda.load_helper(device_code.differing(), "differing")

    def _clear_padding(self, buffer: _DeviceBuffer) -> None:
        if buffer.padded > buffer.size:
            self.cuda.fill(buffer.pointer + buffer.size, 0, buffer.padded - buffer.size)

    def _launch(
        self,
        kernel: LoadedKernel,
        count: int,
        packed: tuple[tuple[Any, ...], tuple[Any, ...]],
        threads: int = 256,
    ) -> None:
        """Launch a helper kernel with a grid-stride loop over ``count`` elements."""
        blocks = min(1024, -(-count // threads))
        self.cuda.call(
            "cuLaunchKernel",
            kernel.function,
            *(blocks, 1, 1),
            *(threads, 1, 1),
            0,
            self.cuda.stream,
            packed,
            0,
        )


def _sizes(spec: Buffer) -> tuple[int, int, int]:
    """Elements, bytes, and bytes rounded up to a multiple of 16."""
    count = 1
    for n in spec.shape:
        count *= n
    size = count * ELEMENT_BYTES[spec.dtype]
    return count, size, -(-size // 16) * 16


def required_bytes(args: list[Buffer], sets: int) -> int:
    """Bytes of device memory: one working copy each, and ``sets`` copies of inputs and outputs."""
    total = 0
    for spec in args:
        copies = {"in": sets, "out": sets, "inout": 2 * sets, "scratch": 0}[spec.role]
        total += _sizes(spec)[2] * (1 + copies)
    return total


def _check_free_memory(cuda: Cuda, args: list[Buffer], sets: int) -> None:
    free, _ = cuda.memory()
    if required_bytes(args, sets) > free:
        raise BadInput(_out_of_memory(args, sets, free, "too little memory"))


def _out_of_memory(args: list[Buffer], sets: int, free: int, cause: str) -> str:
    largest = max(args, key=lambda spec: _sizes(spec)[1])
    return (
        f"the buffers of this launch do not fit on the GPU ({cause}): "
        f"{required_bytes(args, sets):,} bytes are needed ({len(args)} buffers with {sets} sets of "
        f"inputs and expected outputs; the largest is {largest.name!r} with "
        f"{_sizes(largest)[1]:,} bytes), {free:,} are free; make the shapes smaller, or end other "
        "processes that use this GPU"
    )


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
