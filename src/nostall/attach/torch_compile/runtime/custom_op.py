"""``torch.ops.nostall.stitched``: the custom operator that runs a stitched kernel by its name.

Compiled graphs in PyTorch's caches contain only the name.  Any process finds the kernel's record
and source in the store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nostall.attach.torch_compile.runtime.launcher import Call, Functions, Launcher
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import KernelRecord
from nostall.fusion.codegen.runtime.kernel import BadTensor, check_triton, load_source
from nostall.fusion.graph.dynamic_size import Size, placeholder_size, resized

PTXAS_VARIABLE = "TRITON_PTXAS_PATH"


def use_inductor_ptxas() -> None:
    """Make Triton use the ptxas that Inductor selects at its first compilation.

    PyTorch may bring its own ptxas.  Triton's cache keys contain the version of ptxas, so binaries
    that are compiled before Inductor selects it, or in a process without Inductor, would not be
    found later.
    """
    with contextlib.suppress(ImportError, AttributeError):
        if PTXAS_VARIABLE not in os.environ:
            from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

            _set_triton_ptxas_path()
        if PTXAS_VARIABLE in os.environ:
            from triton.backends.nvidia.compiler import get_ptxas_version

            get_ptxas_version.cache_clear()  # it may hold the version of another ptxas


use_inductor_ptxas()
_LIBRARY = torch.library.Library("nostall", "DEF")
_LIBRARY.define(
    "stitched(Tensor[] inputs, str kernel) -> Tensor[]",
    # A kernel is generated for certain strides; copying an input costs what fusion gains.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


MAX_SIZES = 256
"""Launchers that one kernel of dynamic sizes keeps; if there are more sizes, all are dropped."""


class StitchedOp:
    """A stitched kernel, with one launcher for each combination of dynamic sizes.

    A call checks its inputs and copies those with other strides.  :meth:`launcher` and
    :attr:`unchecked_call` leave that to their caller.
    """

    def __init__(self, record: KernelRecord, functions: Functions) -> None:
        self.record = record
        self._functions = functions
        self._read_size = record.size_reader
        self._launchers: dict[Size | None, Launcher] = {}
        # Checked binaries of a kernel of dynamic sizes, by index of the device.
        self._checked_binaries: dict[int, Sequence[Any]] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        launcher = self.launcher(self._read_size([tensor.shape for tensor in inputs]))
        fits = all(
            tensor.stride() == strides and tensor.shape == shape and tensor.dtype is dtype
            for tensor, (shape, strides, dtype) in zip(inputs, launcher.inputs, strict=True)
        )
        return launcher(inputs if fits else self._with_layouts(inputs, launcher))

    def launcher(self, size: Size | None) -> Launcher:
        """The launcher for dynamic sizes; ``size`` is None for a kernel of static sizes."""
        launcher = self._launchers.get(size)
        if launcher is None:
            if len(self._launchers) >= MAX_SIZES:
                self._launchers.clear()
            # Recording the binaries of one size among many costs more than other processes gain.
            record, use_cache = self.record.with_size(size), size is None
            checked = None if size is None else self._checked_binaries
            launcher = Launcher(record, self._functions, use_cache=use_cache, checked=checked)
            self._launchers[size] = launcher
        return launcher

    @property
    def unchecked_call(self) -> Call:
        """A function that launches the kernel without checks of its inputs."""
        if self.record.varying is None:
            return self.launcher(None)
        read = self._read_size
        return lambda inputs: self.launcher(read([x.shape for x in inputs]))(inputs)

    def allocate_outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialized outputs; sizes may be symbols."""
        varying, size = self.record.varying, self.record.dynamic_size(inputs)

        def at_size(numbers: Sequence[int]) -> tuple[int, ...]:
            return tuple(resized(number, varying, size) for number in numbers)

        return [
            torch.empty_strided(
                at_size(output.shape),
                at_size(output.strides),
                dtype=getattr(torch, output.dtype),
                device=inputs[0].device,
            )
            for output in self.record.outputs
        ]

    def compile(self, device: torch.device) -> None:
        """Compile the kernel without a launch, so that no step waits for it."""
        if device.type == "cuda":
            # All sizes have the same binaries.
            self.launcher(placeholder_size(self.record.varying)).compile()

    def _with_layouts(self, inputs: Sequence[Tensor], launcher: Launcher) -> list[Tensor]:
        """The inputs with the strides that the kernel takes, copied if necessary.

        Raises :class:`BadTensor` if a shape or dtype differs.
        """
        tensors: list[Tensor] = []
        for tensor, (shape, strides, dtype) in zip(inputs, launcher.inputs, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise BadTensor(
                    f"a stitched kernel got {tensor.dtype} {tuple(tensor.shape)}; it takes "
                    f"{dtype} {shape}: empty PyTorch's caches (TORCHINDUCTOR_CACHE_DIR)"
                )
            if tensor.stride() != strides and len(tensors) < self.record.mutated:
                raise BadTensor(
                    f"a stitched kernel got strides {tensor.stride()} of a tensor that it changes; "
                    f"it takes {strides}: empty PyTorch's caches (TORCHINDUCTOR_CACHE_DIR)"
                )
            if tensor.stride() != strides:
                copy = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
                tensor = copy.copy_(tensor)
            tensors.append(tensor)
        return tensors


@cache
def load_op(kernel: str) -> StitchedOp:
    """The kernel of this name, from the store.  Raises :class:`BadStore`."""
    check_triton()
    store = KernelStore()
    record, source = store.load_kernel(kernel)

    @cache
    def functions() -> Sequence[Any]:
        return load_source(source, [launch.name for launch in record.launches], store.folder)[1]

    return StitchedOp(record, functions)


class _UncheckedCalls(dict[str, Call]):
    """Unchecked calls by kernel name, loaded at the first access."""

    def __missing__(self, kernel: str) -> Call:
        call = self[kernel] = load_op(kernel).unchecked_call
        return call


_unchecked_calls = _UncheckedCalls()


def launch(inputs: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Run a kernel past PyTorch's dispatcher; Inductor's generated code calls this function.

    Nothing is checked: the inputs must have the kernel's layouts, and their device must be the
    current one.
    """
    if _recordings:
        record_call(kernel, inputs)
    return _unchecked_calls[kernel](inputs)


_recordings: list[set[str]] = []


@contextlib.contextmanager
def record_calls() -> Iterator[set[str]]:
    """Record the names of all kernels that any thread calls inside the context.

    All threads, because backward passes run in threads of their own.
    """
    called: set[str] = set()
    _recordings.append(called)
    try:
        yield called
    finally:
        # By identity: contexts may be nested, and their sets may be equal.
        _recordings[:] = [names for names in _recordings if names is not called]


_input_recordings: list[dict[str, list[Tensor]]] = []


@contextlib.contextmanager
def record_inputs() -> Iterator[dict[str, list[Tensor]]]:
    """Record copies of the inputs of each kernel's first call inside the context."""
    recorded: dict[str, list[Tensor]] = {}
    _input_recordings.append(recorded)
    try:
        with record_calls():
            yield recorded
    finally:
        _input_recordings[:] = [inputs for inputs in _input_recordings if inputs is not recorded]


def record_call(kernel: str, inputs: Sequence[Tensor] = ()) -> None:
    """Add a kernel to all active recordings."""
    for called in _recordings:
        called.add(kernel)
    for recorded in _input_recordings:
        if kernel not in recorded:
            recorded[kernel] = [x.detach().clone() for x in inputs]


def run_op(inputs: list[Tensor], kernel: str) -> list[Tensor]:
    """Run a kernel with checks of its inputs, on their device."""
    record_call(kernel, inputs)
    op = load_op(kernel)
    device = inputs[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return op(inputs)
    return op(inputs)


def _run_fake(inputs: list[Tensor], kernel: str) -> list[Tensor]:
    return load_op(kernel).allocate_outputs(inputs)


_LIBRARY.impl("stitched", run_op, "CompositeExplicitAutograd")
# ``register_fake`` would search all imported modules for the source of its caller.
_LIBRARY.impl("stitched", _run_fake, "Meta")

STITCHED_OP = torch.ops.nostall.stitched.default
"""The operator in a graph: ``STITCHED_OP(inputs, kernel)``."""
