"""Task tables of vLLM's steps, built on the host and copied to buffers that keep their addresses.

The capacity is that of the largest step that vLLM's scheduler can make, so that each step fits.
With asynchronous speculative decoding the host knows upper bounds of the key lengths. Tables of an
upper bound have units with keys behind the last one; the kernel masks them by the lengths on the
GPU, so that results stay right. With a sliding window they would lack keys at the front; then
lengths must be exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.launch import (
    FP8,
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
    Scales,
)
from nostall.serving.tables.columns import (
    COUNTS,
    PREFIX_COLUMNS,
    REDUCTION_COLUMNS,
    REDUCTIONS,
    TASK_COLUMNS,
    UNITS,
)
from nostall.serving.tables.device import DeviceTables
from nostall.serving.tables.host import HostBuilder, bounded_capacity
from nostall.serving.tables.settings import TaskTables

QUEUE_WORDS = 4
"""Words of the kernel's queue, two int64 numbers."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step of vLLM's scheduler."""

    sequences: int
    tokens: int
    keys: int
    """Keys of a sequence: the longest context."""
    drafts: int = 0
    """Tokens that speculation adds to a sequence's step."""

    @property
    def short_tokens(self) -> int:
        """Tokens of a step of decodes and verifies."""
        return max(self.sequences, min(self.sequences * (1 + self.drafts), self.tokens))

    @property
    def cut_tokens(self) -> int:
        """Tokens of the part of a step that is cut.

        There are as many of short chunks as of decodes, as in the batches that were measured.
        """
        return max(self.short_tokens, min(2 * self.sequences, self.tokens))


class StepDtypes(NamedTuple):
    """The dtypes of a group of layers."""

    results: Any
    stored: Any
    """Of queries and cache."""


PREFIX_LEVELS = 2
"""Shared prefixes that a sequence is in, on average over a step: the scratch grows with them. A
step that needs more is built without shared prefixes, and counted."""


class LayerTables:
    """What the tables of one group of layers need, and the launch of their attention."""

    buffers: AttentionBuffers
    """The tables of the step that was built last, and the scratch."""

    def __init__(
        self,
        shape: AttentionShape,
        plan: AttentionPlan,
        limits: StepLimits,
        device: Any,
        grouped_tokens: int = 0,
    ) -> None:
        """``shape``: what the layers compute.

        ``grouped_tokens``: query tokens of the largest step, of tables with shared prefixes.
        """
        self.shape, self.plan, self.device = shape, plan, device
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernel_shape = replace(shape, has_prefixes=grouped_tokens > 0)
        self._settings = plan.table_settings(kernel_shape, self.sms)
        self.tokens = grouped_tokens or limits.tokens
        levels = PREFIX_LEVELS if grouped_tokens else 0
        self.capacity = bounded_capacity(
            self._settings, limits.sequences, self.tokens, limits.keys, levels
        )
        programs = plan.launched_programs(self.sms, self.capacity.units)
        self._attention = MetaAttention(kernel_shape, plan.kernel, programs)

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch."""
        return self.capacity.scratch_rows * (self.shape.head_dim + 1) * 4

    @cached_property
    def _no_trees(self) -> tuple[Any, Any]:
        offsets = torch.full((self.capacity.sequences,), -1, dtype=torch.int32, device=self.device)
        return offsets, torch.zeros(1, dtype=torch.int64, device=self.device)

    def batch(self, query_starts: Any, kv_lengths: Any, block_table: Any) -> BatchTensors:
        """The tensors of a step on the device, as the kernel reads them."""
        return BatchTensors(query_starts, kv_lengths, block_table, *self._no_trees)

    def attend(self, query: Any, cache: PagedCache, out: Any, batch: BatchTensors) -> None:
        """Launch attention of the step whose tables were built last."""
        self._attention(query, cache, out, batch, self.buffers)


class StepTables(LayerTables):
    """The tables of one group of layers, built anew for each step on the host."""

    def __init__(
        self, shape: AttentionShape, plan: AttentionPlan, limits: StepLimits, device: Any
    ) -> None:
        super().__init__(shape, plan, limits, device)
        self._builder = HostBuilder.of(self._settings, self.capacity)
        self._offsets = QUEUE_WORDS + _aligned(COUNTS)
        """Words before the program offsets: the queue and the counts."""
        self._head = self._offsets + _aligned(self.capacity.programs + 1)
        """Words before the tasks."""

    @cached_property
    def _words(self) -> Any:
        """Queue, counts, program offsets and tasks, one buffer on the device."""
        words = self._head + max(self.capacity.units, 1) * TASK_COLUMNS
        return torch.zeros(words, dtype=torch.int32, device=self.device)

    @cached_property
    def buffers(self) -> AttentionBuffers:  # type: ignore[override]
        """The tables of the step that was built last, and the scratch."""
        reductions = torch.zeros(
            (max(self.capacity.reductions, 1), REDUCTION_COLUMNS),
            dtype=torch.int32,
            device=self.device,
        )
        tables = DeviceTables(
            tasks=self._words[self._head :].view(-1, TASK_COLUMNS),
            program_offsets=self._words[self._offsets : self._head],
            reductions=reductions,
            counts=self._words[QUEUE_WORDS:][:COUNTS],
            # vLLM does not say which sequences share a prefix.
            prefix_rows=torch.zeros((1, PREFIX_COLUMNS), dtype=torch.int32, device=self.device),
            has_prefixes=self.capacity.prefix_rows > 0,
        )
        queue = self._words[:QUEUE_WORDS].view(torch.int64)
        rows = self.capacity.scratch_rows
        return AttentionBuffers.around(tables, rows, self.shape.head_dim, queue)

    def warm_up(self, dtypes: StepDtypes, table_width: int) -> None:
        """Compile the kernel, so that no step of a running server waits for it."""
        one = np.ones(1, np.int32)
        self.build(one, one)
        ints = partial(torch.zeros, dtype=torch.int32, device=self.device)
        batch = self.batch(ints(2), ints(1), ints((1, table_width)))
        self.attend(*zero_step(self.shape, dtypes, self.device), batch)
        torch.cuda.synchronize(self.device)

    def build(self, query_lengths: Any, kv_lengths: Any) -> None:
        """Build the tables of a step, and copy them on the current stream.

        The lengths are int32 numpy arrays of the sequences of the step.
        """
        self._copy(self._builder.build(query_lengths, kv_lengths))

    def _copy(self, tables: TaskTables) -> None:
        """Copy what a step uses; the pinned memory is freed when the copy has ended.

        An empty queue is copied with it: the memory may hold anything, because vLLM allocates these
        buffers in the pool whose contents its sleep discards.
        """
        units, reductions = int(tables.counts[UNITS]), int(tables.counts[REDUCTIONS])
        tasks = tables.tasks[:units].reshape(-1)
        words = np.zeros(self._head + len(tasks), np.int32)
        words[QUEUE_WORDS:][:COUNTS] = tables.counts
        words[self._offsets :][: len(tables.program_offsets)] = tables.program_offsets
        words[self._head :] = tasks
        _send(words, self._words)
        if reductions:
            target = self.buffers.tables.reductions.view(-1)
            _send(tables.reductions[:reductions].reshape(-1), target)


def zero_step(
    shape: AttentionShape, dtypes: StepDtypes, device: Any
) -> tuple[Any, PagedCache, Any]:
    """Query, cache and result of a step of one token, all zero.

    Their strides are those of vLLM's, on which Triton specialises: in 16 bits queries are a part of
    the rows of one product, and a block has keys and values.
    """
    zeros = partial(torch.zeros, device=device)
    is_fp8 = dtypes.stored == FP8
    width = shape.heads + (0 if is_fp8 else 2 * shape.kv_heads)
    query = zeros((1, width, shape.head_dim), dtype=dtypes.stored)[:, : shape.heads]
    blocks = zeros((1, 2, shape.page_size, shape.kv_heads, shape.head_dim), dtype=dtypes.stored)
    scales = Scales(*(zeros(()) for _ in Scales._fields)) if is_fp8 else None
    out = zeros((1, shape.heads, shape.head_dim), dtype=dtypes.results)
    return query, PagedCache(blocks[:, 0], blocks[:, 1], scales), out


def _aligned(words: int) -> int:
    """The words up to the next border of 16 bytes.

    For tables that do not begin there Triton may compile another kernel than `nostall serving
    native` searches.
    """
    return -(-words // 4) * 4


def _send(words: NDArray[np.int32], target: Any) -> None:
    """Copy words from pinned memory to the front of a buffer on the device."""
    pinned = torch.empty(len(words), dtype=torch.int32, pin_memory=target.is_cuda)
    pinned.numpy()[:] = words
    target[: len(words)].copy_(pinned, non_blocking=True)
