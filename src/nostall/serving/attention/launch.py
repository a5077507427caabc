"""Launches of the meta-attention kernel over device buffers that keep their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.serving.attention.config import (
    SCHEDULES,
    AttentionShape,
    KernelConfig,
    check_prefixes,
)
from nostall.serving.attention.gluon_launch import launch_gluon
from nostall.serving.attention.kernel import meta_attention
from nostall.serving.attention.reduce import reduce_splits
from nostall.serving.batch.ragged import PackedTrees
from nostall.serving.tables.columns import SCRATCH_ROWS
from nostall.serving.tables.device import DeviceTables
from nostall.serving.tables.settings import TaskTables

REDUCED_ELEMENTS = 8192
"""Elements of all splits that a program of the reduction adds at a time, at most."""
SHORT_TILE = 16
"""Rows of tiles whose reductions are few and have many splits, such as those of long decodes."""


FP8 = torch.float8_e4m3fn
"""The dtype of 8 bits that queries and caches may have."""


class ReductionTile(NamedTuple):
    """What a program of the reduction adds at a time."""

    rows: int
    span: int
    """Dimensions of a head."""
    parts: int
    """Splits at most."""


def reduction_tile(shape: AttentionShape, max_rows: int) -> ReductionTile:
    """The tile of the reduction for tiles of at most ``max_rows`` rows."""
    if max_rows > SHORT_TILE:
        return ReductionTile(16, min(128, shape.padded_head_dim), 1)
    rows = min(SHORT_TILE, 1 << (shape.group - 1).bit_length())
    return ReductionTile(rows, 32, min(64, REDUCED_ELEMENTS // (rows * 32)))


@dataclass(frozen=True, eq=False)
class AttentionBuffers:
    """Task tables and scratch of one capacity; a CUDA graph keeps their addresses.

    Launches that may run at the same time need buffers of their own.
    """

    tables: DeviceTables
    """As :class:`nostall.serving.tables.device.DeviceBuilder` fills them, or a copy of a host's."""
    queue: Tensor
    """int64 (2,): units taken, and programs that have finished; 0 between launches."""
    partial: Tensor
    """fp32 (scratch rows, head dimension): results of units whose keys are split."""
    partial_log_sums: Tensor
    """fp32 (scratch rows,): their base-2 logarithms of the sums of exponents."""

    @staticmethod
    def around(
        tables: DeviceTables, scratch_rows: int, head_dim: int, queue: Tensor | None = None
    ) -> AttentionBuffers:
        """Scratch for the tensors of a device builder; None: a queue of its own."""
        device, rows = tables.tasks.device, max(scratch_rows, 1)
        return AttentionBuffers(
            tables,
            torch.zeros(2, dtype=torch.int64, device=device) if queue is None else queue,
            torch.empty(rows, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @staticmethod
    def of(tables: TaskTables, head_dim: int, device: torch.device) -> AttentionBuffers:
        """Buffers of exactly the size of a host builder's tables, with their content."""

        def copied(array: NDArray[np.int32]) -> Tensor:
            rows = np.zeros((max(len(array), 1), *array.shape[1:]), np.int32)
            rows[: len(array)] = array
            return torch.from_numpy(rows).to(device)

        on_device = DeviceTables(
            copied(tables.tasks), copied(tables.program_offsets), copied(tables.reductions),
            copied(tables.counts), copied(tables.prefix_rows), len(tables.prefix_rows) > 0,
        )  # fmt: skip
        return AttentionBuffers.around(on_device, int(tables.counts[SCRATCH_ROWS]), head_dim)


class BatchTensors(NamedTuple):
    """Lengths of a batch on the device, as vLLM's metadata has them."""

    query_starts: Tensor
    """int32 (S + 1,): first row of each sequence in the packed queries, and the total."""
    kv_lengths: Tensor
    """int32 (S,)."""
    block_table: Tensor
    """int32 (S, blocks); entries past the last key are not read."""
    tree_offsets: Tensor
    """int32 (S,): first word of each sequence, -1 without a tree."""
    tree_words: Tensor
    """int64: words of the tree masks; see :class:`nostall.serving.batch.ragged.PackedTrees`."""

    @staticmethod
    def of(
        query_starts: Any,
        kv_lengths: Any,
        block_table: Any,
        trees: PackedTrees,
        device: torch.device,
    ) -> BatchTensors:
        """The tensors of numpy arrays."""
        arrays = (query_starts, kv_lengths, block_table, trees.offsets, trees.words)
        return BatchTensors(*(torch.from_numpy(array).to(device) for array in arrays))


class Scales(NamedTuple):
    """Factors of what is stored in fp8, each fp32 of one element on the device."""

    query: Tensor
    keys: Tensor
    values: Tensor


class PagedCache(NamedTuple):
    """Keys and values in pages, (blocks, page, KV heads, head dimension), of the same strides."""

    keys: Tensor
    values: Tensor
    scales: Scales | None = None
    """Factors of queries, keys and values; with queries in fp8, and only then."""


@dataclass(frozen=True)
class MetaAttention:
    """The kernel for one shape and configuration; a call launches it and the reduction."""

    shape: AttentionShape
    config: KernelConfig
    programs: int
    """Programs of a launch; with schedule ``unit`` the number of units that can run."""
    reduces: bool = True
    """Whether to launch the reduction; False for tables without splits."""

    def __call__(
        self,
        query: Tensor,
        cache: PagedCache,
        out: Tensor,
        batch: BatchTensors,
        buffers: AttentionBuffers,
    ) -> None:
        """Attention of packed queries (tokens, heads, head dimension) into ``out``, of that shape.

        Launches with the same arguments give the same bits. Everything that changes from step to
        step is read from device buffers, so that a CUDA graph can replay the launch. Raises
        :class:`BadInput` if the tensors or the tables do not fit the shape.
        """
        if not len(query):
            return
        check_tensors(self.shape, query, cache, out)
        check_prefixes(self.shape, buffers.tables.has_prefixes)
        if self.config.language == "gluon":
            launch_gluon(self.shape, self.config, self.programs, query, cache, out, batch, buffers)
        else:
            self._launch_tiles(query, cache, out, batch, buffers)
        if self.reduces:
            self._launch_reduction(out, batch, buffers)

    def _launch_tiles(
        self,
        query: Tensor,
        cache: PagedCache,
        out: Tensor,
        batch: BatchTensors,
        buffers: AttentionBuffers,
    ) -> None:
        shape, config, tables = self.shape, self.config, buffers.tables
        scale: Any = shape.score_scale
        value_scale: Any = 1.0
        if cache.scales is not None:
            scale = (scale, cache.scales.query, cache.scales.keys)
            value_scale = cache.scales.values
        # Triton 3.9 warns if the fusion of products and sums is left to its default.
        options: dict[str, Any] = {"num_warps": config.warps, "enable_fp_fusion": True}
        if config.registers:
            options["maxnreg"] = config.registers
        meta_attention[(self.programs,)](
            query, cache.keys, cache.values, out, batch.block_table,
            tables.tasks, tables.program_offsets, tables.counts, buffers.queue,
            round(self.programs * config.front_share),
            batch.query_starts, batch.kv_lengths, batch.tree_offsets, batch.tree_words,
            tables.prefix_rows, buffers.partial, buffers.partial_log_sums,
            scale, value_scale, shape.soft_cap, shape.window,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            cache.keys.stride(0), cache.keys.stride(1), cache.keys.stride(2),
            batch.block_table.stride(0),
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, D=shape.head_dim,
            DIMS=shape.padded_head_dim, PAGE=shape.page_size, TILES=config.compiled_tiles,
            SCHEDULE=SCHEDULES[config.schedule], SOFT_CAP=shape.soft_cap > 0,
            WINDOW=shape.window > 0, TREE=shape.has_trees, PREFIX=shape.has_prefixes,
            DEPENDENT=config.dependent and self.reduces, **options,
        )  # fmt: skip

    def _launch_reduction(
        self, out: Tensor, batch: BatchTensors, buffers: AttentionBuffers
    ) -> None:
        shape, config, tables = self.shape, self.config, buffers.tables
        dependent = {"launch_pdl": True} if config.dependent else {}
        max_rows = max(tile.rows for tile in config.tiles)
        tile = reduction_tile(shape, max_rows)
        grid = (
            min(self.programs, len(tables.reductions)),
            -(-max_rows // tile.rows),
            -(-shape.head_dim // tile.span),
        )
        reduce_splits[grid](
            out, buffers.partial, buffers.partial_log_sums, tables.reductions, tables.counts,
            batch.query_starts, out.stride(0), out.stride(1), HEADS=shape.heads,
            KV_HEADS=shape.kv_heads, D=shape.head_dim, SPAN=tile.span, ROWS=tile.rows,
            PARTS=tile.parts, DEPENDENT=config.dependent, num_warps=4, enable_fp_fusion=True,
            **dependent,
        )  # fmt: skip


def check_tensors(shape: AttentionShape, query: Tensor, cache: PagedCache, out: Tensor) -> None:
    """Raise :class:`BadInput` if tensors do not fit the shape."""
    heads = (shape.heads, shape.head_dim)
    dtypes = {query.dtype, out.dtype}
    if query.dtype == FP8 and cache.keys.dtype == FP8:
        dtypes = {out.dtype}  # The kernel computes in the dtype of the results.
    if query.shape[1:] != heads or out.shape != query.shape or len(dtypes) > 1 or FP8 in dtypes:
        raise BadInput(
            f"query {tuple(query.shape)} {query.dtype} and result {tuple(out.shape)} {out.dtype}; "
            f"allowed are two tensors (tokens, {heads[0]}, {heads[1]}) of one dtype, or a query "
            f"and a cache of {FP8} and a result of more bits"
        )
    if (query.dtype == FP8) != (cache.scales is not None):
        raise BadInput(
            f"a query of {query.dtype} with scales {cache.scales is not None}; allowed is {FP8} "
            "with scales, and any other dtype without"
        )
    paged = (shape.page_size, shape.kv_heads, shape.head_dim)
    keys, values = cache.keys, cache.values
    if keys.shape[1:] != paged or values.shape != keys.shape or values.dtype != keys.dtype:
        raise BadInput(
            f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} "
            f"{values.dtype}; allowed are two tensors (blocks, {paged[0]}, {paged[1]}, {paged[2]}) "
            "of one dtype"
        )
    if keys.stride() != values.stride() or keys.stride(3) != 1 or query.stride(2) != 1:
        raise BadInput(
            f"strides of keys {keys.stride()}, values {values.stride()} and query "
            f"{query.stride()}; keys and values must have the same strides, and heads must be "
            "contiguous"
        )
    if out.stride(2) != 1:
        raise BadInput(f"strides of the result {out.stride()}; heads must be contiguous")
