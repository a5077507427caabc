"""Names of GPU kernels as profilers record them, classified by hand by what the kernels compute.

``kernel_names.txt`` has names that PyTorch, Inductor, Triton, cuBLAS, cuDNN, CUTLASS, NCCL, RCCL,
MSCCL++, Tensile, Composable Kernel, MIOpen, oneDNN, TransformerEngine, FlashAttention, FlashInfer,
xFormers, vLLM, SGLang, TensorRT-LLM, DeepGEMM, DeepEP, bitsandbytes, Liger and FBGEMM print.  The
benchmark ``workload.kernel_kinds`` looks up every kernel of the public traces in this list.
"""

from __future__ import annotations

from pathlib import Path

from nostall.workload.traces.work_kinds import WorkKind

GENERATED = {
    WorkKind.COMPUTE: (
        *("cijk_a", "cutlass_", "igemm_", "nvjet_", "ampere_", "volta_", "turing_", "bmm_", "fmha"),
        *("cudnn_infer_", "cudnn_train_", "cudnn_volta_", "cudnn_ampere_", "cudnn_turing_", "sm"),
    ),
    WorkKind.MEMORY: (
        *("triton_poi_fused", "triton_red_fused", "triton_per_fused", "split_embedding_"),
    ),
}
"""Starts of identifiers that generators of kernels write, with tile sizes or operators behind."""

COPIES_TO_THE_GPU = (
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy HtoD (Pinned -> Device)",
    "Memcpy HtoD (Host -> Device)",
    "CopyHostToDevice",
    "hipMemcpyHostToDevice",
    "Memcpy M2D",
    "Memcpy H2D",
    "hipMemcpyHtoDAsync",
    "memcpy_host_to_device",
)
OTHER_COPIES = (
    "Memcpy DtoH (Device -> Pageable)",
    "Memcpy DtoD (Device -> Device)",
    "Memcpy PtoP (Device -> Device)",
    "CopyDeviceToHost",
    "CopyDeviceToDevice",
    "Memcpy D2M",
    "hipMemcpyDtoHAsync",
)


def kernels_by_kind() -> dict[WorkKind, list[str]]:
    """Kernel names by kind of work."""
    names: dict[WorkKind, list[str]] = {}
    section: list[str] = []
    for line in Path(__file__).with_name("kernel_names.txt").read_text().splitlines():
        if line.startswith("# "):
            section = names.setdefault(WorkKind[line[2:].partition(":")[0]], [])
        elif line:
            section.append(line)
    return names
