"""Groups of attention layers of the GPU back end on CPU tensors, with vLLM's own classes around.

What needs a GPU is replaced: kernels by the host's execution of the task tables, FlashAttention by
plain attention over vLLM's metadata. Both read what their step's metadata and tables say, so
results are wrong wherever tables are not those of the step.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.serving.host_tables import prefixes_in_pages
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from nostall.attach.vllm import counts, gpu_backend
from nostall.attach.vllm.grouped_tables import GroupedStepTables
from nostall.attach.vllm.step_tables import StepTables
from nostall.serving.attention.host import HostBatch, execute
from nostall.serving.attention.launch import FP8, PagedCache, Scales
from nostall.serving.tables.columns import PREFIX_ROWS
from nostall.serving.tables.device import Totals
from nostall.serving.tables.host import HostBuilder

PAGE = 16
HEADS, KV_HEADS, DIMS = 4, 2, 64
BLOCKS = 400
LONGEST = 160
SEQUENCES = 12
SCALED = SimpleNamespace(
    _q_scale=torch.tensor(0.5), _k_scale=torch.tensor(1.25), _v_scale=torch.tensor(3.0)
)
"""vLLM's layer, of which a cache of fp8 needs the scales."""


class HostTables(StepTables):
    """Tables whose launch executes on the host what their buffers held last."""

    made: list[HostTables]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.builds = 0
        HostTables.made.append(self)

    def warm_up(self, dtype: Any, table_width: int) -> None:
        """Nothing is compiled."""

    def build(self, query_lengths: Any, kv_lengths: Any) -> None:
        self.last = self._builder.build(query_lengths, kv_lengths)
        self.builds += 1

    def attend(self, query: Any, cache: Any, out: Any, batch: Any) -> None:
        lengths = batch.kv_lengths.numpy().astype(np.int32)
        host = HostBatch(batch.query_starts.numpy(), lengths, batch.block_table)
        execute(self.shape, self.last, host, *exact(query, cache), out)


class HostGroupedTables(GroupedStepTables):
    """Tables of decodes that share prefixes, which the host builds from the block table."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.builds = self.shared = 0
        tiles = replace(self._settings.tiles, least_prefix=64, least_saved_ns=0)
        settings = replace(self._settings, tiles=tiles)
        self.host = HostBuilder.of(settings, self.capacity)
        HostTables.made.append(self)

    def warm_up(self, dtype: Any, table_width: int) -> None:
        """Nothing is compiled."""
        offsets = torch.full((self.capacity.sequences,), -1, dtype=torch.int32)
        self._no_trees = offsets, torch.zeros(1, dtype=torch.int64)

    @property
    def totals(self) -> Totals:
        return Totals(self.builds, self.shared, 0, 0)

    def watch(self, layers: int) -> None:
        counts.watch_prefixes(lambda: self.totals, layers)

    def build(self, batch: Any) -> None:
        starts, lengths, table = (tensor.numpy().astype(np.int32) for tensor in batch[:3])
        queries = np.diff(starts)
        prefixes = prefixes_in_pages(table, queries, lengths, PAGE)
        self.last = self.host.build(queries, np.maximum(lengths, queries), prefixes)
        self.builds += 1
        self.shared += int(self.last.counts[PREFIX_ROWS] > 0)

    def attend(self, query: Any, cache: Any, out: Any, batch: Any) -> None:
        lengths = batch.kv_lengths.numpy().astype(np.int32)
        host = HostBatch(batch.query_starts.numpy(), lengths, batch.block_table)
        shape = replace(self.shape, has_prefixes=True)
        execute(shape, self.last, host, *exact(query, cache), out)


def exact(query: Any, cache: PagedCache) -> list[Any]:
    """Query, keys and values in fp32, with the scales of fp8."""
    scales = cache.scales or (1.0, 1.0, 1.0)
    stored = query, cache.keys, cache.values
    return [x.float() * scale for x, scale in zip(stored, scales, strict=True)]


def attention(impl: Any, layer: Any, query: Any, cache: Any, metadata: Any, out: Any) -> None:
    """Plain attention of a layer over the pages that its metadata names."""
    keys, values = gpu_backend._pages(cache, impl.head_size)
    if cache.dtype == torch.uint8:
        pages = PagedCache(
            keys.view(FP8), values.view(FP8), Scales(layer._q_scale, layer._k_scale, layer._v_scale)
        )
        query, keys, values = exact(query, pages)
    group = impl.num_heads // impl.num_kv_heads
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        if not count:
            continue
        positions = torch.arange(length)
        blocks = metadata.block_table[sequence, positions // PAGE].long()
        k, v = (
            part[blocks, positions % PAGE].repeat_interleave(group, 1) for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows], k) * impl.scale
        own = torch.arange(length - count, length)[:, None]
        hidden = positions > own
        if impl.sliding_window[0] >= 0:
            hidden |= positions < own - impl.sliding_window[0]
        scores.masked_fill_(hidden, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def fake_forward(
    self: Any,
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    cache: Any,
    metadata: Any,
    **results: Any,
) -> Any:
    """FlashAttention's forward."""
    shape = (-1, self.num_heads, self.head_size)
    attention(self, layer, query.view(shape), cache, metadata, results["output"].view(shape))
    return results["output"]


def patch(monkeypatch: pytest.MonkeyPatch, steps: str = "all") -> None:
    """Replace what needs a GPU."""
    HostTables.made = []
    counts.reset()
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setenv("NOSTALL_VLLM_ATTENTION", steps)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(gpu_backend, "StepTables", HostTables)
    monkeypatch.setattr(gpu_backend, "GroupedStepTables", HostGroupedTables)
    monkeypatch.setattr(gpu_backend, "has_gluon_kernel", lambda device: False)
    monkeypatch.setattr(gpu_backend, "attach_attention_kernels", lambda: None)
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", fake_forward)


def layer(window: int | None = None, **changes: Any) -> Any:
    """A layer's implementation, made by vLLM's own constructor."""
    options: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": DIMS,
        "scale": DIMS**-0.5,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": window,
        "kv_cache_dtype": "auto",
    }
    cache = changes.pop("kv_cache_dtype", "auto")
    impl = gpu_backend.NostallAttentionImpl(**{**options, **changes})
    impl.kv_cache_dtype = cache  # vLLM's constructor refuses fp8 without a GPU.
    return impl


def config(layers: dict[str, Any], **changes: Any) -> Any:
    """The parts of vLLM's configuration that the builders read."""
    context = {name: SimpleNamespace(impl=impl) for name, impl in layers.items()}
    model = SimpleNamespace(
        dtype=torch.float32,
        max_model_len=LONGEST,
        is_mm_prefix_lm=False,
        rswa_window=None,
        hf_config=SimpleNamespace(model_type="llama"),
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: DIMS,
    )
    found = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=256),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
            max_cudagraph_capture_size=64,
            static_forward_context=context,
        ),
    )
    vars(found).update(changes)
    return found


class Group:
    """A group of layers with a cache and pages of its own."""

    def __init__(
        self,
        spec: Any,
        layers: dict[str, Any],
        seed: int = 0,
        backend: Any = gpu_backend.NostallAttentionBackend,
        **changes: Any,
    ) -> None:
        self.spec, self.layers = spec, layers
        draw = torch.Generator().manual_seed(seed)
        self.builder = backend.get_builder_cls()(
            spec, list(layers), config(layers, **changes), torch.device("cpu")
        )
        shape = (BLOCKS, 2, PAGE, KV_HEADS, DIMS)
        if cache_dimensions() == 4:
            shape = (BLOCKS, KV_HEADS, PAGE, 2 * DIMS)
        self.cache = torch.randn(shape, generator=draw)
        if spec.dtype == torch.uint8:
            self.cache = self.cache.to(FP8).view(torch.uint8)
        pages = SEQUENCES * LONGEST // PAGE
        self.table = torch.randperm(BLOCKS, generator=draw)[:pages].view(SEQUENCES, -1).int()

    def run(self, metadata: Any, seed: int = 7) -> list[tuple[str, Any, Any]]:
        """Name, result and right result of each layer."""
        tokens = metadata.num_actual_tokens
        found = []
        for name, impl in self.layers.items():
            draw = torch.Generator().manual_seed(seed)
            query = torch.randn(tokens, impl.num_heads, impl.head_size, generator=draw)
            result, right = torch.zeros_like(query), torch.zeros_like(query)
            if self.cache.dtype == torch.uint8:
                query = query.to(FP8)
            impl.forward(SCALED, query, None, None, self.cache, metadata, output=result)
            attention(impl, SCALED, query, self.cache, metadata, right)
            found.append((name, result, right))
        return found

    def check(self, metadata: Any) -> None:
        """Fail unless all layers compute what they must."""
        for name, result, right in self.run(metadata):
            torch.testing.assert_close(result, right, msg=lambda text, name=name: f"{name}: {text}")


def cache_dimensions() -> int:
    """Dimensions of vLLM's cache: keys and values are a dimension of it, or lie side by side."""
    backend = flash_attn.FlashAttentionBackend
    if not hasattr(backend, "get_kv_cache_shape"):
        return 4
    return len(backend.get_kv_cache_shape(8, PAGE, KV_HEADS, DIMS))


def common(query: list[int], keys: list[int], table: Any, **changes: Any) -> Any:
    """vLLM's description of a step; sequences of length 0 are padding."""
    starts = torch.tensor([0, *np.cumsum(query)], dtype=torch.int32)
    lengths = torch.tensor(keys, dtype=torch.int32)
    options: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lengths,
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": len(query),
        "num_actual_tokens": sum(query),
        "max_query_len": max(query),
        "max_seq_len": max(keys),
        "block_table_tensor": table[: len(query)],
        "slot_mapping": torch.zeros(sum(query), dtype=torch.int64),
    }
    return CommonAttentionMetadata(**{**options, **changes})
