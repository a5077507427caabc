"""Other attention kernels on the same inputs: FlashAttention-3, vLLM's Triton kernel, SDPA.

The files of FlashAttention-3 and of vLLM's kernel are not part of this project. The option
``--peers FOLDER`` names a folder with ``fa3_sm90.so.xz`` (vLLM 0.25.1, built for torch 2.11) and
``unified/`` (``triton_unified_attention.py`` and ``triton_attention_helpers.py`` of vLLM 0.25.1).
"""

from __future__ import annotations

import enum
import importlib.util
import lzma
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.attention.flashinfer import flashinfer
from benchmarks.serving.attention.inputs import HAS_GPU, max_keys, max_query
from nostall.attach.process_folder import process_folder
from nostall.core.errors import MissingPart
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.winners.on_gpu import GpuBatch

Call = Callable[[PagedCache], Tensor]
"""Computes the batch with one of the caches."""


def flash_attention_3(inputs: GpuBatch, folder: Path) -> Call:
    """FlashAttention-3 on the paged cache; its schedule is computed once, as vLLM does a step."""
    torch.ops.load_library(str(_unpacked(folder / "fa3_sm90.so.xz")))
    fa3 = torch.ops._vllm_fa3_C
    shape, batch, out = inputs.shape, inputs.tensors, torch.empty_like(inputs.query)
    page = inputs.ragged.page_size
    schedule = fa3.get_scheduler_metadata(
        len(inputs.ragged), max_query(inputs), max_keys(inputs), shape.heads, shape.kv_heads,
        shape.head_dim, shape.head_dim, inputs.query.dtype, batch.kv_lengths, batch.query_starts,
        None, None, None, None, page, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip

    def call(cache: PagedCache) -> Tensor:
        fa3.fwd(
            inputs.query, cache.keys, cache.values, None, None, None, out, batch.query_starts,
            None, None, None, batch.kv_lengths, max_query(inputs), max_keys(inputs),
            batch.block_table, None, None, None, None, None, None, None, None, shape.score_scale,
            True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out

    return call


def _unpacked(archive: Path) -> Path:
    """The shared library of an .xz file, unpacked into a private folder of this process."""
    if not archive.exists():
        raise MissingPart(f"{archive.name} is not in the folder of --peers; FA3 is left out")
    target = process_folder() / archive.name.removesuffix(".xz")
    if not target.exists():
        target.write_bytes(lzma.decompress(archive.read_bytes()))
    return target


def vllm_triton(inputs: GpuBatch, folder: Path) -> Call:
    """vLLM's Triton kernel for mixed batches (causal batches only)."""
    kernel = _load_unified(folder / "unified")
    shape, batch, out = inputs.shape, inputs.tensors, torch.empty_like(inputs.query)
    segments, rows = 16, max(512, len(inputs.query))

    def scratch(*tail: int) -> Tensor:
        return torch.empty((rows, shape.heads, segments, *tail), device=out.device)

    split = {
        "seq_threshold_3D": 128 // shape.kv_heads,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": scratch(shape.head_dim),
        "softmax_segm_max": scratch(),
        "softmax_segm_expsum": scratch(),
    }

    def call(cache: PagedCache) -> Tensor:
        kernel(
            q=inputs.query, k=cache.keys, v=cache.values, out=out,
            cu_seqlens_q=batch.query_starts, max_seqlen_q=max_query(inputs),
            seqused_k=batch.kv_lengths, max_seqlen_k=max_keys(inputs),
            softmax_scale=shape.score_scale, causal=True, window_size=(-1, -1),
            block_table=batch.block_table, softcap=0.0, q_descale=None, k_descale=None,
            v_descale=None, **split,
        )  # fmt: skip
        return out

    return call


class _QuantMode(enum.IntEnum):
    """Stands for vLLM's enumeration of cache formats; the kernel compares values by name."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4

    @property
    def is_per_token_head(self) -> bool:
        return self.value >= 2


def _load_unified(folder: Path) -> Callable[..., None]:
    """Import vLLM's kernel with small modules in the place of those of vLLM that it imports."""
    import triton

    names = ("triton_attention_helpers", "triton_unified_attention")
    if not (folder / f"{names[1]}.py").exists():
        raise MissingPart("unified/ is not in the folder of --peers; vLLM's kernel is left out")
    methods = ("debug", "info", "warning", "info_once", "warning_once")
    silent = types.SimpleNamespace(**{name: lambda *_, **__: None for name in methods})
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda _: False,
        is_xpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: True,
    )  # fmt: skip
    envs = _module("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_TRITON_USE_TD=False)
    _module("vllm", envs=envs)
    for package in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        _module(package)
    _module("vllm.logger", init_logger=lambda _: silent)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", triton=triton, tl=triton.language, HAS_TRITON=True)
    _module("vllm.v1.kv_cache_interface", KVQuantMode=_QuantMode)
    module: Any = None
    for name in names:
        full = f"vllm.v1.attention.ops.{name}"
        spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    kernel: Callable[..., None] = module.unified_attention
    return kernel


def _module(name: str, **content: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    return module


def sdpa(inputs: GpuBatch, folder: Path) -> Call:
    """PyTorch's attention, one call for all sequences of equal lengths, on dense keys and values.

    The copy from the pages to dense tensors is not timed. Its result is packed for the check only.
    """
    from torch.nn.attention.bias import causal_lower_right

    ragged, shape = inputs.ragged, inputs.shape
    lengths = list(zip(ragged.query_lengths.tolist(), ragged.kv_lengths.tolist(), strict=True))
    groups = sorted(set(lengths))
    if len(groups) > 4 or any(mask is not None for mask in ragged.tree_masks):
        raise MissingPart("SDPA needs equal lengths and no trees; the batch is left out")
    starts = ragged.query_starts
    device = inputs.query.device
    dense: dict[int, list[tuple[Any, ...]]] = {}
    for number, cache in enumerate(inputs.caches[:2]):
        for query_length, keys in groups:
            members = [i for i, pair in enumerate(lengths) if pair == (query_length, keys)]
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
            pages = inputs.tensors.block_table[members, : -(-keys // ragged.page_size)].long()
            key, value = (
                t[pages].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous()
                for t in (cache.keys, cache.values)
            )
            index = torch.from_numpy(rows).to(device)
            query = inputs.query[index].view(len(members), query_length, *inputs.query.shape[1:])
            bias = None if query_length == 1 else causal_lower_right(query_length, keys)
            dense.setdefault(number, []).append(
                (query.transpose(1, 2).contiguous(), key, value, bias, index)
            )
    out = torch.empty_like(inputs.query)

    def call(cache: PagedCache) -> Tensor:
        number = next(i for i, c in enumerate(inputs.caches) if c is cache) % 2
        results = [
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, enable_gqa=shape.group > 1
            )
            for query, key, value, bias, _ in dense[number]
        ]
        if not (HAS_GPU and torch.cuda.is_current_stream_capturing()):
            for result, (*_, index) in zip(results, dense[number], strict=True):
                out[index] = result.transpose(1, 2).reshape(len(index), *out.shape[1:])
        return out

    return call


PEERS: dict[str, Callable[[GpuBatch, Path], Call]] = {
    "FA3": flash_attention_3,
    "vLLM Triton": vllm_triton,
    "SDPA": sdpa,
    "FlashInfer": flashinfer,
}
