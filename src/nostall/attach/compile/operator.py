"""``torch.ops.nostall.stitched``: a stitched kernel as an operator that others can call by name.

Compiled graphs that PyTorch's caches keep hold nothing but the name.  Another process finds the
kernel in the store, whatever it did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nostall.attach.compile.records import Kept, KernelRecord, TensorRecord
from nostall.fusion.codegen.kernel import BadTensor, load_source

_LIBRARY = torch.library.Library("nostall", "DEF")
_LIBRARY.define(
    "stitched(Tensor[] inputs, str kernel) -> Tensor[]",
    # Kernels are made for certain strides; a copy costs what stitching gains.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


class Runner:
    """A kernel that checks its inputs quickly, and copies those that lie otherwise."""

    def __init__(self, record: KernelRecord, functions: Sequence[Any]) -> None:
        self.record = record
        self._functions = functions
        self._inputs = [_layout(tensor) for tensor in record.inputs]
        self._outputs = [_layout(tensor) for tensor in record.outputs]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        fits = all(
            tensor.stride() == strides and tensor.shape == shape and tensor.dtype is dtype
            for tensor, (shape, strides, dtype) in zip(inputs, self._inputs, strict=True)
        )
        if not fits:
            inputs = self._laid_out(inputs)
        device = inputs[0].device
        outputs = self.empty(device)
        tensors = {f"p{at}": tensor for at, tensor in enumerate([*inputs, *outputs])}
        for space in self.record.workspaces:
            dtype = getattr(torch, space.dtype)
            tensors[space.name] = torch.empty(space.elements, dtype=dtype, device=device)
        for function, launch in zip(self._functions, self.record.launches, strict=True):
            arguments = [tensors[name] for name in launch.arguments]
            function[launch.grid](
                *arguments, *launch.counts, num_warps=launch.num_warps, enable_fp_fusion=True
            )
        return outputs

    def empty(self, device: torch.device) -> list[Tensor]:
        """Memory for the results."""
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self._outputs
        ]

    def warm(self, device: torch.device) -> None:
        """Compile without a launch, so that no step waits for it."""
        if device.type != "cuda":
            return
        every = [*self._inputs, *self._outputs]
        dtypes = {f"p{at}": dtype for at, (_, _, dtype) in enumerate(every)}
        dtypes |= {space.name: getattr(torch, space.dtype) for space in self.record.workspaces}
        for function, launch in zip(self._functions, self.record.launches, strict=True):
            function.warmup(
                *(dtypes[argument] for argument in launch.arguments),
                *launch.counts,
                grid=launch.grid,
                num_warps=launch.num_warps,
                enable_fp_fusion=True,
            )

    def _laid_out(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for tensor, (shape, strides, dtype) in zip(inputs, self._inputs, strict=True):
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


def _layout(tensor: TensorRecord) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.strides, getattr(torch, tensor.dtype)


@cache
def resolve(kernel: str) -> Runner:
    """The kernel of this name, from the store.  Raises :class:`BadStore`."""
    kept = Kept()
    record, source = kept.kernel(kernel)
    _, functions = load_source(source, [launch.name for launch in record.launches], kept.folder)
    return Runner(record, functions)


_observers: list[set[str]] = []


@contextmanager
def observed() -> Iterator[set[str]]:
    """The names of all kernels that are called meanwhile, by any thread: backward passes have
    their own."""
    called: set[str] = set()
    _observers.append(called)
    try:
        yield called
    finally:
        _observers.remove(called)


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
    return resolve(kernel).empty(inputs[0].device)


_LIBRARY.impl("stitched", _run, "CompositeExplicitAutograd")
torch.library.register_fake("nostall::stitched", _fake, lib=_LIBRARY)

STITCHED = torch.ops.nostall.stitched.default
"""What a graph calls: ``STITCHED(inputs, name)``."""
