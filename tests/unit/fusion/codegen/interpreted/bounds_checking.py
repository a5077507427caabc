"""Interpreted kernels whose loads and stores are checked against the memory of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nostall.fusion.codegen.runtime.kernel import StitchedKernel

Memory = list[tuple[int, int]]
"""Address ranges: first byte, end (exclusive)."""


class BoundsCheckedKernel:
    """A kernel in Triton's interpreter that records accesses outside its tensors.

    Loads must be within the tensors of the launch and stores within outputs and workspaces; masked
    lanes may be anywhere. ``violations`` describes all other accesses.
    """

    def __init__(self, kernel: StitchedKernel) -> None:
        self.kernel = kernel
        self.program = kernel.program
        self.file = kernel.file
        self.violations: list[str] = []

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        workspaces: Mapping[str, Tensor],
        size: int | None = None,
    ) -> None:
        from triton.runtime.interpreter import InterpreterBuilder as Builder

        readable = [_memory(t) for t in (*inputs, *outputs, *workspaces.values())]
        writable = readable[len(inputs) :]
        load, store = Builder.create_masked_load, Builder.create_masked_store

        def checked_load(builder: Any, at: Any, mask: Any, *others: Any) -> Any:
            self._check("read", at, mask, readable)
            return load(builder, at, mask, *others)

        def checked_store(builder: Any, at: Any, value: Any, mask: Any, *others: Any) -> Any:
            self._check("written", at, mask, writable)
            return store(builder, at, value, mask, *others)

        Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
        try:
            self.kernel.launch(inputs, outputs, workspaces, size)
        finally:
            Builder.create_masked_load, Builder.create_masked_store = load, store

    def _check(self, access: str, at: Any, mask: Any, memory: Memory) -> None:
        addresses = at.data[np.broadcast_to(mask.data, at.data.shape)].astype(np.int64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for first, end in memory:
            inside |= (addresses >= first) & (addresses < end)
        if not inside.all():
            count = int((~inside).sum())
            self.violations.append(f"{count} elements are {access} outside of all tensors")


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The address range of a tensor."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
