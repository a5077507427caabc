"""``torch.ops.nostall.stitched``: a stitched kernel as an operator that others can call by name.

Compiled graphs that PyTorch's caches keep hold nothing but the name.  Another process finds the
kernel in the store, whatever it did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from nostall.attach.compile.records import Kept
from nostall.fusion.codegen.kernel import BadTensor, StitchedKernel, empty, load

_LIBRARY = torch.library.Library("nostall", "DEF")
_LIBRARY.define(
    "stitched(Tensor[] inputs, str kernel) -> Tensor[]",
    # Kernels are made for certain strides; a copy costs what stitching gains.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


class Runner:
    """A kernel that checks its inputs quickly, and copies those that lie otherwise."""

    def __init__(self, kernel: StitchedKernel) -> None:
        self.kernel = kernel
        graph, program = kernel.program.graph, kernel.program
        self.inputs = [graph[i] for i in program.inputs]
        self.outputs = [graph[i] for i in program.outputs]
        self._wanted = [(n.shape, n.strides, getattr(torch, n.dtype)) for n in self.inputs]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        fits = all(
            tensor.stride() == strides and tensor.shape == shape and tensor.dtype is dtype
            for tensor, (shape, strides, dtype) in zip(inputs, self._wanted, strict=True)
        )
        if not fits:
            inputs = self._laid_out(inputs)
        device = inputs[0].device
        outputs = [empty(node, device) for node in self.outputs]
        spaces = {
            space.name: torch.empty(
                space.elements, dtype=getattr(torch, space.dtype), device=device
            )
            for space in self.kernel.program.workspaces
        }
        self.kernel.launch(inputs, outputs, spaces)
        return outputs

    def warm(self, device: torch.device) -> None:
        """Compile without a launch, so that no step waits for it."""
        if device.type != "cuda":
            return
        graph, program = self.kernel.program.graph, self.kernel.program
        dtypes = {f"p{i}": getattr(torch, graph[i].dtype) for i in range(len(graph))}
        dtypes |= {space.name: getattr(torch, space.dtype) for space in program.workspaces}
        for function, launch in zip(self.kernel.functions, program.launches, strict=True):
            function.warmup(
                *(dtypes[argument] for argument in launch.arguments),
                *launch.counts,
                grid=launch.grid,
                num_warps=launch.num_warps,
                enable_fp_fusion=True,
            )

    def _laid_out(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for tensor, node in zip(inputs, self.inputs, strict=True):
            if tuple(tensor.shape) != node.shape or str(tensor.dtype) != f"torch.{node.dtype}":
                raise BadTensor(
                    f"input {node} got a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; "
                    "compiled graphs call kernels with what they were made for: empty PyTorch's "
                    "caches (TORCHINDUCTOR_CACHE_DIR)"
                )
            if tensor.stride() != node.strides:
                tensor = empty(node, tensor.device).copy_(tensor)
            found.append(tensor)
        return found


@cache
def resolve(kernel: str) -> Runner:
    """The kernel of this name, from the store.  Raises :class:`BadStore`."""
    kept = Kept()
    return Runner(load(kept.program(kernel), kept.folder))


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


def fake(inputs: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """What a kernel would give for fake tensors (to be called where tensors are fake)."""
    return [empty(node, inputs[0].device) for node in resolve(kernel).outputs]


_LIBRARY.impl("stitched", _run, "CompositeExplicitAutograd")
torch.library.register_fake("nostall::stitched", fake, lib=_LIBRARY)
