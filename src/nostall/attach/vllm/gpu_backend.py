"""Attention back end CUSTOM: vLLM's FlashAttention, with nostall's kernel for the steps it serves.

The classes inherit from vLLM's FlashAttention back end, write the same cache, and leave to it each
step and each layer that nostall does not serve.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn

from nostall.attach.attention_kernels import attach_attention_kernels
from nostall.attach.vllm.counts import count_left, count_served
from nostall.attach.vllm.routing import (
    VARIABLE,
    StepKind,
    find_choice,
    plan_of,
    serves,
    step_kind,
    stored_plan,
)
from nostall.attach.vllm.step_tables import StepLimits, StepTables
from nostall.core.errors import BadInput, NostallError
from nostall.serving.attention.config import HEAD_DIMS, AttentionShape
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.attention.tall_launch import has_tall_kernel

MAX_SCRATCH_BYTES = 1 << 30
"""Most memory of the scratch of one group of layers."""
STEP = "nostall_step"
"""Attribute of vLLM's metadata: (tables, batch) of a step that nostall serves, else missing."""


class NostallMetadataBuilder(flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, with nostall's tables for the steps that it serves."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._choice = find_choice(os.environ.get(VARIABLE, "measured"))
        attach_attention_kernels()
        try:
            self._tables = self._make_tables(self._choice.kinds, kv_cache_spec, vllm_config)
        except NostallError as error:
            count_left(f"a group of layers: {error}")
            self._tables = {}

    def _make_tables(
        self, kinds: Collection[StepKind], spec: Any, config: Any
    ) -> dict[StepKind, StepTables]:
        """Tables for each kind of step; raises :class:`NostallError` for layers it cannot serve."""
        scheduler = config.scheduler_config
        limits = StepLimits(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.max_model_len,
        )
        shape = AttentionShape(
            self.num_heads_q,
            self.num_heads_kv,
            spec.head_size,
            page_size=spec.block_size,
            window=getattr(spec, "sliding_window", None) or 0,
        )
        if shape.window and config.speculative_config is not None:
            raise BadInput("a sliding window with speculative decoding")
        has_tall = has_tall_kernel(torch.device(self.device))
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        gpu = str(torch.cuda.get_device_name(self.device))
        plans = {
            kind: stored_plan(kind, shape, dtype, gpu) or plan_of(kind, shape, has_tall)
            for kind in kinds
        }
        made: dict[AttentionPlan, StepTables] = {}
        for plan in set(plans.values()):
            made[plan] = tables = StepTables(shape, plan, limits, self.device)
            if tables.scratch_bytes > MAX_SCRATCH_BYTES:
                raise BadInput(f"{tables.scratch_bytes >> 20} MiB of scratch")
            tables.warm_up(config.model_config.dtype, -(-limits.keys // spec.block_size))
        return {kind: made[plan] for kind, plan in plans.items()}

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata of a step; nostall's tables are built on the current stream."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        query_lengths = np.diff(common.query_start_loc_cpu.numpy())
        kind = step_kind(query_lengths)
        tables = self._tables.get(kind)
        if tables is None:
            count_left(f"{kind} steps")
        elif not serves(self._choice, kind, tables.shape, len(query_lengths), tables.sms):
            count_left(f"{kind} steps on which FlashAttention is as fast or faster")
        elif metadata.use_cascade or metadata.causal is not True:
            count_left("steps with a shared prefix or without a causal mask")
        elif common.seq_lens_cpu_upper_bound is None:
            count_left("steps without lengths on the host")
        else:
            kv_lengths = common.seq_lens_cpu_upper_bound.numpy().astype(np.int32, copy=False)
            tables.build(query_lengths, np.maximum(kv_lengths, query_lengths))
            batch = tables.batch(common.query_start_loc, common.seq_lens, common.block_table_tensor)
            setattr(metadata, STEP, (tables, batch))
            count_served(kind)
        return metadata


class NostallAttentionImpl(flash_attn.FlashAttentionImpl):
    """Attention of one layer: nostall's kernel where the step has its tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal = self._find_refusal()
        if self._refusal:
            count_left(f"layers with {self._refusal}")

    def _find_refusal(self) -> str | None:
        """What nostall's kernel lacks for this layer; None if it serves it."""
        lacks = {
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a soft cap": bool(self.logits_soft_cap),
            f"a cache of {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "bfloat16"),
            f"heads of {self.head_size}": self.head_size not in HEAD_DIMS,
            "a scale of their own": abs(self.scale - self.head_size**-0.5) > 1e-6,
            "batch invariance": bool(self.batch_invariant_enabled),
            "context parallelism": getattr(self, "dcp_world_size", 1) > 1,
        }
        return next((reason for reason, holds in lacks.items() if holds), None)

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
        """Attention of the packed tokens of a step, written to ``results["output"]``.

        Further results are scales of a quantised output, which nostall's kernel does not write.
        """
        step = getattr(attn_metadata, STEP, None)
        is_plain = all(value is None for name, value in results.items() if name != "output")
        if step is None or self._refusal or not is_plain:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, **results)
        tables, batch = step
        keys, values = _pages(kv_cache, self.head_size)
        heads, output = (-1, self.num_heads, self.head_size), results["output"]
        tables.attend(query.view(heads), keys, values, output.view(heads), batch)
        return output


def _pages(kv_cache: Any, head_size: int) -> Any:
    """Keys and values as (blocks, page, KV heads, head dimension) views of vLLM's cache."""
    if kv_cache.dim() == 5:  # vLLM 0.25: (blocks, 2, page, heads, dimension)
        return kv_cache.unbind(1)
    return kv_cache.transpose(1, 2).split(head_size, dim=-1)


class NostallAttentionBackend(flash_attn.FlashAttentionBackend):
    """FlashAttention's back end with nostall's builder and layers."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        """The name of vLLM's enumeration."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NostallAttentionImpl]:
        return NostallAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[NostallMetadataBuilder]:
        return NostallMetadataBuilder
