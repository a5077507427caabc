"""Task tables of vLLM's steps, in buffers that keep their addresses.

The device builder reads the lengths that vLLM keeps on the GPU: with asynchronous speculative
decoding the host knows upper bounds only. The capacity is that of the largest step that vLLM's
scheduler can make, so that each step fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import (
    BatchTensors,
    DeviceTables,
    MetaAttention,
    PagedCache,
)
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.tables.bound import capacity_bound
from nostall.serving.tables.device import DeviceBuilder

MAX_SCRATCH_BYTES = 1 << 30
"""Most memory of the scratch; steps of a plan that needs more go to vLLM's own back end."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step of vLLM's scheduler."""

    sequences: int
    tokens: int
    keys: int
    """Keys of a sequence: the longest context."""


class StepTables:
    """The tables of one group of layers, built anew for each step."""

    def __init__(
        self, shape: AttentionShape, plan: AttentionPlan, limits: StepLimits, device: Any
    ) -> None:
        self.shape, self.plan, self.device = shape, plan, device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        settings = plan.table_settings(shape, sms)
        self.capacity = capacity_bound(settings, limits.sequences, limits.tokens, limits.keys)
        self._builder = DeviceBuilder.of(settings, self.capacity, str(device))
        self._attention = MetaAttention(shape, plan.kernel, plan.programs(sms))

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch."""
        return self.capacity.scratch_rows * (self.shape.head_dim + 1) * 4

    @cached_property
    def _buffers(self) -> DeviceTables:
        built, buffers = self._builder.tables, DeviceTables.empty(
            self.capacity, self.shape.head_dim, self.device
        )
        return DeviceTables(
            built.tasks,
            built.program_offsets,
            built.reductions,
            built.counts,
            buffers.queue,
            buffers.partial,
            buffers.partial_log_sums,
        )

    @cached_property
    def _no_trees(self) -> tuple[Any, Any]:
        offsets = torch.full((self.capacity.sequences,), -1, dtype=torch.int32, device=self.device)
        return offsets, torch.zeros(1, dtype=torch.int64, device=self.device)

    def build(self, query_starts: Any, kv_lengths: Any, block_table: Any) -> BatchTensors:
        """Build the tables of a step on the current stream; the arguments are on the device."""
        self._builder.build(query_starts, kv_lengths)
        return BatchTensors(query_starts, kv_lengths, block_table, *self._no_trees)

    def attend(self, query: Any, keys: Any, values: Any, out: Any, batch: BatchTensors) -> None:
        """Launch attention of the step whose tables were built last."""
        self._attention(query, PagedCache(keys, values), out, batch, self._buffers)
