"""Attention back end of vLLM's CPU build that executes nostall's task tables on the host.

It is slow, and serves all layers of causal decoders: it shows without a GPU that the tables and the
plug-in compute the same tokens as vLLM. The cache has vLLM's shape, (blocks, KV heads, page, keys
then values); vLLM's own CPU kernels pack it otherwise, so that both cannot share it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn

from nostall.attach.vllm.counts import count_served
from nostall.attach.vllm.routing import step_kind
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.host import HostBatch, execute
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.host import HostBuilder, needed_capacity
from nostall.serving.tables.settings import TableSettings

TILES = TileSet((16, 64, 128), split=256)
"""Splits are short, so that tests of a few hundred tokens have reductions."""
PROGRAMS = 8
CACHE_DTYPES = ("auto", "float16", "bfloat16")
REMEDY = "NOSTALL_VLLM_CPU=1 serves causal decoder attention only; unset it for this model"


class NostallMetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """vLLM's metadata; steps are counted."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        count_served(step_kind(np.diff(common_attn_metadata.query_start_loc_cpu.numpy())))
        return metadata


class NostallCpuAttentionImpl(cpu_attn.CPUAttentionBackendImpl):
    """Attention of one layer through the task tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lacks = {
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            f"a cache of {self.kv_cache_dtype}": self.kv_cache_dtype not in CACHE_DTYPES,
        }
        for lack, holds in lacks.items():
            if holds:
                raise BadInput(f"a layer has {lack}, and {REMEDY}")

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        **results: Any,
    ) -> Any:
        """Build the tables of the step and execute them, into ``results["output"]``."""
        output = results["output"]
        if attn_metadata is None:  # vLLM warms up
            return output
        if attn_metadata.causal is not True:
            raise BadInput(f"a step is not causal, and {REMEDY}")
        # Made from the metadata itself, which vLLM may have copied for another group of layers.
        batch = HostBatch(
            attn_metadata.query_start_loc.numpy().astype(np.int32),
            attn_metadata.seq_lens.numpy().astype(np.int32),
            attn_metadata.block_table,
        )
        keys, values = _pages(kv_cache, self.head_size)
        shape = AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            page_size=keys.shape[1],
            scale=self.scale,
            window=max(self.sliding_window, 0),
            soft_cap=self.logits_soft_cap,
        )
        settings = TableSettings(shape.heads, shape.kv_heads, PROGRAMS, TILES, window=shape.window)
        lengths = np.diff(batch.query_starts)
        capacity = needed_capacity(lengths, batch.kv_lengths, settings)
        tables = HostBuilder.of(settings, capacity).build(lengths, batch.kv_lengths)
        heads = (-1, self.num_heads, self.head_size)
        execute(shape, tables, batch, query.view(heads), keys, values, output.view(heads))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        """Write keys and values of the step into their slots."""
        keys, values = _pages(kv_cache, self.head_size)
        slots = slot_mapping[slot_mapping >= 0]
        page = keys.shape[1]
        count = len(slots)
        keys[slots // page, slots % page] = key[:count].to(keys.dtype)
        values[slots // page, slots % page] = value[:count].to(values.dtype)


def _pages(kv_cache: Any, head_size: int) -> Any:
    """Keys and values as (blocks, page, KV heads, head dimension) views of vLLM's cache."""
    return kv_cache.transpose(1, 2).split(head_size, dim=-1)


class NostallCpuAttentionBackend(cpu_attn.CPUAttentionBackend):
    """vLLM's CPU back end with nostall's tables."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[NostallCpuAttentionImpl]:
        return NostallCpuAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[NostallMetadataBuilder]:
        return NostallMetadataBuilder
