"""How long does the host build vLLM's metadata of a decode step, with and without shared prompts?

    python -m benchmarks run serving.host_time --out host_time_h200.json

Builders of vLLM are called with the tensors of a step of Llama-3-8B's shape; no model runs, and the
GPU is idle before each call. ``FLASH_ATTN`` is vLLM's own builder. ``CUSTOM`` is nostall's with the
default choice, ``CUSTOM all`` with the choice ``all``, which also serves small steps, and ``CUSTOM
all, Triton`` the same with Triton's own launcher. The builders take turns. The tables that each
launcher leaves on the GPU are compared bit by bit; the exit code is 1 if they differ, or if the
direct launches were refused. Needs vLLM of a version that the plug-in serves.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.serving.engine.forced_tokens_child import driver

HEADS, KV_HEADS, DIMS, PAGE, LAYERS = 32, 8, 128, 16, 32
LONGEST, SEQUENCES, TOKENS = 16_384, 256, 8192
"""Limits of vLLM's scheduler."""
SHARED, OWN = 2048, 200
"""Keys that the samples of a prompt share, and further keys of each sequence."""
BURST = 10
"""Calls between two waits for the GPU."""


@dataclass(frozen=True)
class Case:
    """A decode step."""

    sequences: int
    samples: int
    """Sequences of each prompt."""

    @property
    def name(self) -> str:
        return f"{self.sequences // self.samples} x {self.samples}"


CASES = (Case(1, 1), Case(32, 1), Case(32, 8), Case(256, 1), Case(256, 8), Case(256, 256))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--samples", type=int, default=400, help="calls of each builder and case")
    parser.add_argument("--device", default="cuda")


def main(options: argparse.Namespace) -> int:
    """Measure all cases; returns 1 if launchers built other tables, or there is but one of them."""
    import torch

    import vllm

    device = torch.device(options.device)
    makers = builders(device)
    rows = [measure(case, makers, options.samples, device) for case in CASES]
    has_gpu = device.type == "cuda"
    save(
        options.out,
        kind="measured",
        unit="microseconds of the host for a step",
        gpu=torch.cuda.get_device_name(device) if has_gpu else None,
        driver=driver() if has_gpu else None,
        torch=torch.__version__,
        vllm=vllm.__version__,
        results=rows,
    )
    for row in rows:
        cells = [f"{n} {t['p50_us']:.0f} ({t['p95_us']:.0f})" for n, t in row["builders"].items()]
        print(f"{row['name']:9} {'; '.join(cells)}; equal tables {row['equal_tables']}")
    return int(not all(row["equal_tables"] and row["is_direct"] for row in rows))


def builders(device: Any) -> dict[str, Any]:
    """The builders by name, each with layers of its own."""
    from vllm.v1.attention.backends import flash_attn

    from nostall.attach.vllm import gpu_backend

    found = {"FLASH_ATTN": flash_attn.FlashAttentionMetadataBuilder(*arguments(None, device))}
    for name, choice in (("CUSTOM", "auto"), ("CUSTOM all", "all"), ("CUSTOM all, Triton", "all")):
        os.environ[gpu_backend.VARIABLE] = choice
        maker = gpu_backend.NostallAttentionImpl
        found[name] = gpu_backend.NostallMetadataBuilder(*arguments(maker, device))
    decodes(found["CUSTOM all, Triton"])._direct = None
    return found


def decodes(builder: Any) -> Any:
    """The tables of a builder's decode steps."""
    from nostall.attach.vllm.routing import StepKind

    return builder._tables[StepKind.DECODE]


def arguments(maker: Any, device: Any) -> tuple[Any, ...]:
    """What vLLM gives a builder, as far as it is read."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIMS, dtype=torch.bfloat16
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    make = maker or (lambda *_: None)
    layer = (HEADS, DIMS, DIMS**-0.5, KV_HEADS, None, None, "auto")
    layers = {name: SimpleNamespace(impl=make(*layer)) for name in names}
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=LONGEST,
        is_mm_prefix_lm=False,
        rswa_window=None,
        hf_config=SimpleNamespace(model_type="llama"),
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: DIMS,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
            max_cudagraph_capture_size=512,
            static_forward_context=layers,
        ),
    )
    return spec, names, config, device


def step_of(case: Case, device: Any) -> Any:
    """vLLM's description of a step."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    count = case.sequences
    table = torch.arange(1, 1 + SEQUENCES * (LONGEST // PAGE), dtype=torch.int32, device=device)
    table = table.view(SEQUENCES, -1)
    for first in range(0, count, case.samples):
        shared = table[first, : SHARED // PAGE].clone()
        table[first : first + case.samples, : SHARED // PAGE] = shared
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.arange(count, dtype=torch.int32) % OWN + SHARED + 1
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=int(lengths.max()),
        block_table_tensor=table[:count],
        slot_mapping=torch.zeros(count, dtype=torch.int64, device=device),
    )


def measure(case: Case, makers: dict[str, Any], samples: int, device: Any) -> dict[str, Any]:
    """Samples of each builder on a case, and whether both launchers leave the same tables."""
    import torch

    step = step_of(case, device)
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(-1, max(1, samples // BURST)):
        for name, builder in makers.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for _ in range(BURST):
                start = time.perf_counter_ns()
                builder.build(0, step)
                if turn >= 0:  # The first turn warms caches.
                    times[name].append((time.perf_counter_ns() - start) / 1e3)
    direct, triton = decodes(makers["CUSTOM all"]), decodes(makers["CUSTOM all, Triton"])
    pairs = zip(written(direct, step), written(triton, step), strict=True)
    return {
        "name": case.name,
        "sequences": case.sequences,
        "samples_of_a_prompt": case.samples,
        "is_direct": direct._direct is not None,
        "equal_tables": all(torch.equal(a, b) for a, b in pairs),
        "builders": {name: summary(values) for name, values in times.items()},
    }


def written(tables: Any, step: Any) -> list[Any]:
    """What a build of a step writes, over the same content."""
    found = tables._builder.written
    for tensor in found:
        tensor.fill_(7)
    tables.build(tables.batch(step.query_start_loc, step.seq_lens, step.block_table_tensor))
    return [tensor.clone() for tensor in found]


def summary(values: list[float]) -> dict[str, Any]:
    """Median, 95th percentile and all samples."""
    p50, p95 = np.percentile(values, [50, 95])
    return {
        "p50_us": round(float(p50), 2),
        "p95_us": round(float(p95), 2),
        "samples_us": [round(value, 2) for value in values],
    }
