"""``torch.ops.nostall.stitched``: a stitched kernel as an operator that others can call by name.

Compiled graphs that PyTorch's caches keep hold nothing but the name.  Another process finds the
kernel in the store, whatever it did before.
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
from nostall.attach.torch_compile.store.records import Kept, KernelRecord
from nostall.fusion.codegen.runtime.kernel import BadTensor, check_triton, load_source
from nostall.fusion.graph.dynamic_size import resized

PTXAS = "TRITON_PTXAS_PATH"


def as_inductor_compiles() -> None:
    """PyTorch may bring a ptxas of its own, which Inductor has Triton take from its first
    compilation on.  What is compiled before that, or by a process without one, is another binary
    under another name: nobody would find it later.
    """
    with contextlib.suppress(ImportError, AttributeError):
        if PTXAS not in os.environ:
            from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

            _set_triton_ptxas_path()
        if PTXAS in os.environ:
            from triton.backends.nvidia.compiler import get_ptxas_version

            get_ptxas_version.cache_clear()  # who asked before it was set was told of another one


as_inductor_compiles()
_LIBRARY = torch.library.Library("nostall", "DEF")
_LIBRARY.define(
    "stitched(Tensor[] inputs, str kernel) -> Tensor[]",
    # Kernels are made for certain strides; a copy costs what stitching gains.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


MOST_SIZES = 256
"""Of one kernel, for which everything is decided beforehand; where there are more, all go."""


class Runner:
    """A kernel by name.  Called, it checks its inputs and copies those that lie otherwise; what
    calls :meth:`launcher` itself answers for that."""

    def __init__(self, record: KernelRecord, functions: Functions) -> None:
        self.record = record
        self._functions = functions
        self._sized: dict[int | None, Launcher] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        launcher = self.launcher(self.record.size_of(inputs))
        fits = all(
            tensor.stride() == strides and tensor.shape == shape and tensor.dtype is dtype
            for tensor, (shape, strides, dtype) in zip(inputs, launcher.inputs, strict=True)
        )
        return launcher(inputs if fits else self._laid_out(inputs, launcher))

    def launcher(self, size: int | None) -> Launcher:
        """The kernel where what varies, if something does, is ``size``."""
        found = self._sized.get(size)
        if found is None:
            if len(self._sized) >= MOST_SIZES:
                self._sized.clear()
            # One size of many would pay more for being left than others gain by finding it.
            record, shared = self.record.at(size), size is None
            found = self._sized[size] = Launcher(record, self._functions, shared=shared)
        return found

    @property
    def direct(self) -> Call:
        """Without checks."""
        if self.record.varying is None:
            return self.launcher(None)
        return lambda inputs: self.launcher(self.record.size_of(inputs))(inputs)

    def empty(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Memory for the results; sizes may be symbols."""
        varying, size = self.record.varying, self.record.size_of(inputs)
        return [
            torch.empty_strided(
                tuple(resized(number, varying, size) for number in one.shape),
                one.strides,
                dtype=getattr(torch, one.dtype),
                device=inputs[0].device,
            )
            for one in self.record.outputs
        ]

    def warm(self, device: torch.device) -> None:
        """Compile without a launch, so that no step waits for it."""
        if device.type == "cuda":
            self.launcher(self.record.varying).warm()

    def _laid_out(self, inputs: Sequence[Tensor], launcher: Launcher) -> list[Tensor]:
        found = []
        for tensor, (shape, strides, dtype) in zip(inputs, launcher.inputs, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise BadTensor(
                    f"a stitched kernel got {tensor.dtype} {tuple(tensor.shape)}; it takes "
                    f"{dtype} {shape}: empty PyTorch's caches (TORCHINDUCTOR_CACHE_DIR)"
                )
            if tensor.stride() != strides:
                laid = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
                tensor = laid.copy_(tensor)
            found.append(tensor)
        return found


@cache
def resolve(kernel: str) -> Runner:
    """The kernel of this name, from the store.  Raises :class:`BadStore`."""
    check_triton()
    kept = Kept()
    record, source = kept.kernel(kernel)

    @cache
    def functions() -> Sequence[Any]:
        return load_source(source, [launch.name for launch in record.launches], kept.folder)[1]

    return Runner(record, functions)


class _Direct(dict[str, Call]):
    """By name, without what finding one costs."""

    def __missing__(self, kernel: str) -> Call:
        found = self[kernel] = resolve(kernel).direct
        return found


_direct = _Direct()


def launch(inputs: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """What Inductor's code calls, past PyTorch's dispatcher, where it has made sure that the inputs
    lie as the kernel was made for and that their device is the current one."""
    if _observers:
        note(kernel)
    return _direct[kernel](inputs)


_observers: list[set[str]] = []


@contextlib.contextmanager
def observed() -> Iterator[set[str]]:
    """The names of all kernels that are called meanwhile, by any thread: backward passes have
    their own."""
    called: set[str] = set()
    _observers.append(called)
    try:
        yield called
    finally:
        # Not the first one that is equal: observers may be nested.
        _observers[:] = [one for one in _observers if one is not called]


def note(kernel: str) -> None:
    """A kernel is called."""
    for called in _observers:
        called.add(kernel)


def _run(inputs: list[Tensor], kernel: str) -> list[Tensor]:
    note(kernel)
    runner = resolve(kernel)
    device = inputs[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return runner(inputs)
    return runner(inputs)


def _fake(inputs: list[Tensor], kernel: str) -> list[Tensor]:
    return resolve(kernel).empty(inputs)


_LIBRARY.impl("stitched", _run, "CompositeExplicitAutograd")
# Not by ``register_fake``, which looks for its caller's source among all modules there are.
_LIBRARY.impl("stitched", _fake, "Meta")

STITCHED = torch.ops.nostall.stitched.default
"""What a graph calls: ``STITCHED(inputs, name)``."""
