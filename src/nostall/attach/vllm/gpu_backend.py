"""Attention back ends CUSTOM and FLASH_ATTN: FlashAttention, with nostall's kernel for some steps.

The classes inherit from vLLM's FlashAttention back end, write the same cache, and leave to it each
step and each layer that nostall does not serve.

A step's tables lie in buffers of its builder. Two rules keep them those of the step that runs:

* Each group of layers builds its own (:attr:`NostallMetadataBuilder.supports_update_block_table`),
  and a layer runs only steps whose tensors are those of its metadata.
* What a captured graph reads is built for each step of the graph's size, whether or not nostall
  serves it (:meth:`NostallMetadataBuilder.build_for_cudagraph_capture`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn

from nostall.attach.attention_kernels import attach_attention_kernels
from nostall.attach.vllm.counts import count_left, count_served, log_once
from nostall.attach.vllm.grouped_tables import (
    GroupedStepTables,
    drafts_of,
    group_shape,
    layer_shape,
    layers_of,
    model_lack,
    window_of,
)
from nostall.attach.vllm.routing import (
    DEFAULT,
    MAX_VERIFY,
    VARIABLE,
    Choice,
    StepKind,
    find_choice,
    plan_of,
    reads_once,
    serves,
    step_kind,
    stored_plan,
)
from nostall.attach.vllm.step_tables import StepDtypes, StepLimits, StepTables
from nostall.core.errors import BadInput, NostallError
from nostall.serving.attention.config import HEAD_DIMS, AttentionPlan, AttentionShape
from nostall.serving.attention.gluon_launch import has_gluon_kernel
from nostall.serving.attention.launch import FP8, BatchTensors, PagedCache, Scales

MAX_SCRATCH_BYTES = 1 << 30
"""Most memory of the scratch of one group of layers."""
AnyTables = StepTables | GroupedStepTables


@dataclass(frozen=True)
class KindTables:
    """What decides the tables of a group of layers."""

    choice: Choice
    shape: AttentionShape
    limits: StepLimits
    device: Any

    def make(self, dtypes: StepDtypes) -> dict[StepKind, AnyTables]:
        """Tables for each kind of step of which nostall serves the largest, with their kernels.

        Raises :class:`BadInput` if there is no such kind, and for too much scratch.
        """
        if dtypes.stored == FP8 and self.choice.only_faster:
            raise BadInput(
                f"a cache of fp8; {VARIABLE}=all serves it, {DEFAULT} only what was measured"
            )
        plans = self._plans(dtypes.stored)
        wanted = {kind: (plan, self.grouped_tokens(kind)) for kind, plan in plans.items()}
        made: dict[tuple[AttentionPlan, int], AnyTables] = {}
        for plan, tokens in sorted(set(wanted.values()), key=lambda key: key[1]):
            tables: AnyTables
            if tokens:
                tables = GroupedStepTables(self.shape, plan, self.limits, self.device, tokens)
            else:
                tables = StepTables(self.shape, plan, self.limits, self.device)
            made[plan, tokens] = tables
        scratch_bytes = sum(tables.scratch_bytes for tables in made.values())
        if scratch_bytes > MAX_SCRATCH_BYTES:
            raise BadInput(f"{scratch_bytes >> 20} MiB of scratch")
        for tables in made.values():
            tables.warm_up(dtypes, -(-self.limits.keys // self.shape.page_size))
        return {kind: made[key] for kind, key in wanted.items()}

    def grouped_tokens(self, kind: StepKind) -> int:
        """Tokens for which tables that find shared prefixes have room; 0: tables without them."""
        if not reads_once(self.choice, kind, self.shape, self.limits.drafts > 0):
            return 0
        return self.limits.cut_tokens if self.choice.is_cut(kind) else self.limits.short_tokens

    def _plans(self, dtype: Any) -> dict[StepKind, AttentionPlan]:
        """The plan of each kind of step of which nostall serves the largest."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        gpu = str(torch.cuda.get_device_name(self.device))
        kinds = [
            kind
            for kind in self.choice.kinds_of(self.limits.drafts > 0)
            if serves(self.choice, kind, self.shape, self.limits.sequences, sms, gpu)
        ]
        if not kinds:
            raise BadInput(
                f"no steps of {self.shape} on {gpu} are among those that {VARIABLE} names"
            )
        has_gluon = dtype != FP8 and has_gluon_kernel(torch.device(self.device))
        plans = {}
        for kind in kinds:
            shape = replace(self.shape, has_prefixes=self.grouped_tokens(kind) > 0)
            short = StepKind.VERIFY if self.choice.is_cut(kind) else kind
            stored = stored_plan(short, shape, str(dtype).removeprefix("torch."), gpu)
            plans[kind] = stored or plan_of(short, shape, has_gluon)
        return plans


class Part(NamedTuple):
    """The first sequences of a step."""

    sequences: int
    tokens: int
    """Query tokens of these sequences."""
    decodes: int
    """Those of the sequences that have one query token."""


def graph_size(common: Any) -> tuple[int, int]:
    """Sequences and tokens of a step, padded ones included: what tells captured graphs apart."""
    return common.num_reqs, common.num_actual_tokens


def kind_of(common: Any) -> StepKind:
    """The kind of a step."""
    # Most steps of a server are decodes, and the longest query decides that without an array.
    if common.max_query_len == 1 and common.num_actual_tokens:
        return StepKind.DECODE
    return step_kind(query_lengths_of(common))


def tokens_of(common: Any) -> int:
    """Query tokens of a step without padding."""
    return int(common.query_start_loc_cpu[common.num_reqs])


def short_part(common: Any, most_tokens: int) -> Part:
    """The sequences before the first that is longer than a verify, or exceeds ``most_tokens``.

    Padding at the end of a step belongs to it if nothing else is behind it.
    """
    lengths = query_lengths_of(common)
    is_short = (lengths <= MAX_VERIFY) & (np.cumsum(lengths) <= most_tokens)
    count = len(lengths) if is_short.all() else int(is_short.argmin())
    lengths = lengths[:count]
    return Part(count, int(lengths.sum()), int((lengths == 1).sum()))


def rest_of(common: Any, part: Part) -> Any:
    """vLLM's description of the sequences behind a part, as a step of their own.

    One kernel runs on the device for it, and the host waits for nothing.
    """
    rows = slice(part.sequences, common.num_reqs)
    starts = slice(part.sequences, common.num_reqs + 1)
    bounds = common.seq_lens_cpu_upper_bound
    return type(common)(
        query_start_loc=common.query_start_loc[starts] - part.tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[starts] - part.tokens,
        seq_lens=common.seq_lens[rows],
        seq_lens_cpu_upper_bound=None if bounds is None else bounds[rows],
        num_reqs=common.num_reqs - part.sequences,
        num_actual_tokens=common.num_actual_tokens - part.tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[part.tokens :],
    )


def query_lengths_of(common: Any) -> Any:
    """Query lengths of a step's sequences, int32; 0: padding."""
    return np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())


def key_lengths_of(common: Any) -> Any:
    """Key lengths of a step's sequences, int32; upper bounds if the device knows them alone."""
    bounds = common.seq_lens_cpu_upper_bound
    lengths = common.seq_lens.cpu() if bounds is None else bounds
    return lengths[: common.num_reqs].numpy().astype(np.int32, copy=False)


FP8_CACHES = ("fp8", "fp8_e4m3")
CACHE_DTYPES = ("auto", "float16", "bfloat16", *FP8_CACHES)
"""Names of caches whose keys and values the kernel reads. vLLM gives queries in fp8 to layers with
a cache of fp8, and scales of queries, keys and values on the device."""
STEP = "nostall_step"
"""Attribute of vLLM's metadata: the :class:`Step` that nostall serves, else missing."""


class Rest(NamedTuple):
    """The sequences at the end of a step that FlashAttention computes beside nostall's kernel."""

    first: int
    """Their first query token."""
    metadata: Any
    """FlashAttention's, of these sequences alone."""


class Step(NamedTuple):
    """A step that nostall serves."""

    tables: AnyTables
    batch: BatchTensors
    """The tensors of the sequences that nostall serves."""
    whole: BatchTensors
    """The step's tensors, the same objects as in its metadata."""
    rest: Rest | None = None


class NostallMetadataBuilder(flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, with nostall's tables for the steps that it serves."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    """vLLM captures full graphs of steps of equal query lengths only: see ``routing``."""
    supports_update_block_table: bool = False
    """vLLM must not copy a group's metadata for another group, which has pages of its own."""
    _layers: Collection[str] = ()
    """Layers that run the steps; steps that no layer runs are not counted."""
    _captured: Mapping[tuple[int, int], AnyTables] = {}
    """Sequences and tokens of captured steps, padded ones included -> the tables they read."""
    _left_graphs: frozenset[tuple[int, int]] = frozenset()
    """Sequences and tokens of captured steps that FlashAttention computes."""
    _serves_all: bool = False
    """Whether all layers of the group run the steps that nostall serves."""
    _served_sizes: Mapping[tuple[StepKind, int], bool] = {}
    """Kind of step and number of sequences -> whether nostall serves it, as far as it was asked."""
    _most_sequences: float = inf
    """The scheduler's limit, for which the tables have room."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM would refresh a draft's metadata inside of a captured graph, without a build.
        self.supports_draft_decode_metadata_update = False
        self._choice = find_choice(os.environ.get(VARIABLE, DEFAULT))
        self._tables: dict[StepKind, AnyTables] = {}
        try:
            self._tables = self._make_tables(kv_cache_spec, vllm_config)
        except NostallError as error:
            count_left(f"a group of layers: {error}")
        except Exception as error:  # No memory for the scratch, or no kernel: FlashAttention has.
            count_left(f"a group of layers: {type(error).__name__}: {error}")

    def _make_tables(self, spec: Any, config: Any) -> dict[StepKind, AnyTables]:
        """Tables for each kind of step; raises :class:`NostallError` if nostall serves none."""
        if type(self) is not NostallMetadataBuilder:
            raise BadInput(f"its steps are changed by vLLM's {type(self).__name__}")
        lack = model_lack(config, spec)
        if lack is not None:
            raise BadInput(lack)
        layers = layers_of(config, self.layer_names, NostallAttentionImpl)
        shape = group_shape(layers, spec.block_size)
        if shape.window and config.speculative_config is not None:
            raise BadInput("a sliding window with speculative decoding")
        scheduler = config.scheduler_config
        limits = StepLimits(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.max_model_len,
            drafts_of(config),
        )
        self._most_sequences = limits.sequences
        attach_attention_kernels()
        tables = KindTables(self._choice, shape, limits, self.device)
        is_fp8 = all(each.kv_cache_dtype in FP8_CACHES for each in layers.values())
        dtype = config.model_config.dtype
        made = tables.make(StepDtypes(dtype, FP8 if is_fp8 else dtype))
        self._layers = [name for name, layer in layers.items() if layer.take(shape)]
        known = {name.rpartition(".")[0] for name in layers}
        self._serves_all = known == set(self.layer_names) and len(self._layers) == len(layers)
        grouped = {each for each in made.values() if isinstance(each, GroupedStepTables)}
        for each in grouped:
            each.watch(len(self._layers))
        if grouped and not config.cache_config.enable_prefix_caching:
            log_once("prefix caching is off, so that no sequences share a prefix")
        return made

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata of a step; nostall's tables are built on the current stream."""
        common = common_attn_metadata
        kind, size = kind_of(common), graph_size(common)
        part = self._part_of(kind, common)
        reason = self._reason_to_leave(kind, part, common_prefix_len, common, fast_build)
        tables = self._tables[kind] if reason is None else None
        # Without layers of FlashAttention its schedule, a fast build has none, is read by nobody.
        is_ours = tables is not None and self._serves_all and size not in self._left_graphs
        is_fast = fast_build or (is_ours and self.aot_sliding_window is not None)
        metadata = super().build(common_prefix_len, common, is_fast)
        captured = self._captured.get(size)
        if captured is not None and captured is not tables:
            _build(captured, common, common.num_reqs)
        if tables is None:
            count_left(str(reason))
            return metadata
        rest = None
        if part.sequences < common.num_reqs:
            # Both schedules would lie in one buffer of FlashAttention's builder.
            behind = super().build(common_prefix_len, rest_of(common, part), not is_fast)
            rest = Rest(part.tokens, behind)
        whole = tables.batch(common.query_start_loc, common.seq_lens, common.block_table_tensor)
        batch = _build(tables, common, part.sequences)
        setattr(metadata, STEP, Step(tables, batch, whole, rest))
        if self._layers:
            count_served(kind if rest is None else f"{kind}, in part")
        return metadata

    def _part_of(self, kind: StepKind, common: Any) -> Part:
        """The sequences of a step that nostall serves, if it serves any."""
        tables = self._tables.get(kind)
        if isinstance(tables, GroupedStepTables):
            if self._choice.is_cut(kind):
                return short_part(common, tables.tokens)
            return Part(common.num_reqs, tokens_of(common), common.num_reqs)
        return Part(common.num_reqs, common.num_actual_tokens, common.num_reqs)

    def _reason_to_leave(
        self, kind: StepKind, part: Part, common_prefix_len: int, common: Any, fast_build: bool
    ) -> str | None:
        """Why FlashAttention computes a step; None if nostall does."""
        if not self._tables:
            return "steps of groups of layers that nostall does not serve"
        tables = self._tables.get(kind)
        if tables is None:
            return f"{kind} steps"
        if common.num_reqs > self._most_sequences:
            return "steps of more sequences than the scheduler's limit"
        if isinstance(tables, GroupedStepTables) and part.tokens > tables.tokens:
            return f"{kind} steps of more tokens than speculation makes"
        if not self._serves(kind, tables, part.decodes):
            return f"{kind} steps on which FlashAttention is as fast or faster"
        if part.sequences < common.num_reqs and not self._serves_all:
            return f"{kind} steps of groups of which nostall does not serve all layers"
        if fast_build:
            return "steps of drafts"
        if common_prefix_len > 0 or common.causal is not True:
            return "steps with a shared prefix or without a causal mask"
        return None

    def _serves(self, kind: StepKind, tables: AnyTables, sequences: int) -> bool:
        """Whether nostall serves steps of so many sequences, as ``serves`` counts them."""
        key = kind, sequences
        found = self._served_sizes.get(key)
        if found is None:
            found = serves(self._choice, kind, tables.shape, sequences, tables.sms)
            self._served_sizes = {**self._served_sizes, key: found}
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """vLLM's metadata of a step that a graph captures.

        Each later step of this size may replay the graph, so :meth:`build` builds the tables that
        the graph reads for all of them, or lets FlashAttention make its schedule.
        """
        size = graph_size(common_attn_metadata)
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        step: Step | None = getattr(metadata, STEP, None)
        if step is None:
            self._left_graphs = self._left_graphs | {size}
        else:
            self._captured = {**self._captured, size: step.tables}
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        """A copy of a group's metadata for the pages of another one, left to FlashAttention."""
        copied = super().update_block_table(metadata, blk_table, slot_mapping)
        vars(copied).pop(STEP, None)
        return copied


def _build(tables: AnyTables, common: Any, count: int) -> BatchTensors:
    """Build the tables of the first sequences of a step; the tensors of these sequences."""
    tensors = common.query_start_loc, common.seq_lens, common.block_table_tensor
    if count < common.num_reqs:
        tensors = tensors[0][: count + 1], tensors[1][:count], tensors[2][:count]
    batch = tables.batch(*tensors)
    if isinstance(tables, GroupedStepTables):
        tables.build(batch)
    else:
        query_lengths = query_lengths_of(common)
        tables.build(query_lengths, np.maximum(key_lengths_of(common), query_lengths))
    return batch


class NostallAttentionImpl(flash_attn.FlashAttentionImpl):
    """Attention of one layer: nostall's kernel where the step has its tables."""

    _shape: AttentionShape | None = None
    """What the tables of its steps must compute; None: no builder has tables for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal = self._find_refusal()
        lack = self.find_lack()
        if lack:
            count_left(f"layers with {lack}")

    def find_lack(self) -> str | None:
        """What nostall's kernel lacks for this layer; None if it can serve it."""
        lacks = {
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a soft cap": bool(self.logits_soft_cap),
            f"a cache of {self.kv_cache_dtype}": self.kv_cache_dtype not in CACHE_DTYPES,
            f"heads of {self.head_size}": self.head_size not in HEAD_DIMS,
            "a scale of their own": abs(self.scale - self.head_size**-0.5) > 1e-6,
            "batch invariance": bool(self.batch_invariant_enabled),
            "context parallelism": any(
                getattr(self, f"{name}_world_size", 1) > 1 for name in ("dcp", "pcp")
            ),
            "a window that is not causal": window_of(self)[1] > 0,
        }
        return next((reason for reason, holds in lacks.items() if holds), None)

    def take(self, shape: AttentionShape) -> bool:
        """Let the layer run steps of tables of this shape, if it computes just that."""
        if self.find_lack() is None:
            if layer_shape(self, shape.page_size) == shape:
                self._shape = shape
            else:
                count_left("layers whose heads or window are not those of their group's tables")
        self._refusal = self._find_refusal()
        return self._refusal is None

    def _find_refusal(self) -> str | None:
        """Why FlashAttention computes all steps of this layer; None if nostall may."""
        lack = self.find_lack()
        if lack is None and self._shape is None:
            return "no tables of their heads, window and pages"
        return lack

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
        step: Step | None = getattr(attn_metadata, STEP, None)
        is_plain = all(value is None for name, value in results.items() if name != "output")
        if step is None or self._refusal or not is_plain:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, **results)
        cache = self._cache_of(layer, kv_cache)
        reason = self._mismatch(step, attn_metadata, query, cache)
        if reason is not None:
            count_left(reason)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, **results)
        heads, output = (-1, self.num_heads, self.head_size), results["output"]
        step.tables.attend(query.view(heads), cache, output.view(heads), step.batch)
        if step.rest is not None:
            behind = [x if x is None else x[step.rest.first :] for x in (query, key, value)]
            into = output[step.rest.first :]
            super().forward(layer, *behind, kv_cache, step.rest.metadata, output=into)
        return output

    def _cache_of(self, layer: Any, kv_cache: Any) -> PagedCache:
        """The layer's pages, with its scales if they are in fp8."""
        scales = None
        if self.kv_cache_dtype in FP8_CACHES:
            kv_cache = kv_cache.view(FP8)
            scales = Scales(layer._q_scale, layer._k_scale, layer._v_scale)
        keys, values = _pages(kv_cache, self.head_size)
        return PagedCache(keys, values, scales)

    def _mismatch(self, step: Step, metadata: Any, query: Any, cache: PagedCache) -> str | None:
        """Why a step is not one of this layer, its metadata and its cache; None if it is."""
        shape, batch, keys = step.tables.shape, step.whole, cache.keys
        if shape != self._shape:
            return "layers that get tables of other heads, windows or pages"
        if (
            batch.block_table is not metadata.block_table
            or batch.kv_lengths is not metadata.seq_lens
            or batch.query_starts is not metadata.query_start_loc
        ):
            return "layers that get metadata whose tensors were replaced"
        if keys.shape[1:] != (shape.page_size, shape.kv_heads, shape.head_dim):
            return "layers that get a cache of other pages"
        if any(scale.numel() != 1 for scale in cache.scales or ()):
            return "layers with a scale for each head"
        return "layers that get a cache of another dtype" if keys.dtype != query.dtype else None


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


class NostallFlashAttentionBackend(NostallAttentionBackend):
    """The back end in the place of vLLM's FLASH_ATTN, whose name it keeps."""

    @staticmethod
    def get_name() -> str:
        """The name of vLLM's enumeration."""
        return "FLASH_ATTN"
