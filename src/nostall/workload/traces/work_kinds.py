"""Classification of GPU activities into kinds of work, by the names of kernels and copies.

The name is the only information that every trace has.  A kernel whose name is neither that of a
collective nor that of a matrix product, convolution or attention counts as memory-bound, as most
other kernels of a training step are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from nostall.workload.traces.recording import Activities, ActivityType


class WorkKind(IntEnum):
    """Kinds of GPU work; if several run at a time, the lowest number counts."""

    COMPUTE = 0
    """Matrix products, convolutions and attention."""
    MEMORY = 1
    """All other kernels, and memsets."""
    COMMUNICATION = 2
    """Collectives."""
    INPUT = 3
    """Copies from the host to the GPU."""
    COPY = 4
    """All other copies."""


_IGNORED_LIBRARY = re.compile(r"fbgemm(_gpu)?", re.IGNORECASE)
"""A library of embedding kernels; its name contains "gemm"."""
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
    r"deep_?ep",
    re.IGNORECASE,
)
_COMPUTE = re.compile(
    r"gemm|gemv|conv(?!ert)|winograd|wgrad|dgrad|cutlass|xmma|[hsi]884|16816|s1688|nvjet|cublas|"
    r"flash|fmha|attention|_mma|\bmma|Cijk_|matmul|triton_\w*mm|grouped_mm|dot_kernel",
    re.IGNORECASE,
)
# Elementwise and reduction kernels of a library can contain its name, for example "cublas".
_NOT_COMPUTE = re.compile(
    r"elementwise|nchwToNhwc|nhwcToNchw|batch_?norm|bn_fw|bn_bw|layer_?norm|reduce_kernel|splitK?"
    r"reduce|transpose|im2col|col2im|softmax|memset|cast_kernel",
    re.IGNORECASE,
)


def work_kinds(activities: Activities, names: Sequence[str]) -> np.ndarray:
    """The :class:`WorkKind` of each activity, int8, shape [activities]."""
    by_name = np.array([kernel_work_kind(name) for name in names], dtype=np.int8)
    is_host_to_device = np.array(["htod" in name.lower() for name in names], dtype=bool)
    kinds: np.ndarray = by_name[activities.name]
    copies = activities.type == ActivityType.MEMCPY
    to_gpu = is_host_to_device[activities.name[copies]]
    kinds[copies] = np.where(to_gpu, WorkKind.INPUT, WorkKind.COPY)
    kinds[activities.type == ActivityType.MEMSET] = WorkKind.MEMORY
    return kinds


def kernel_work_kind(name: str) -> WorkKind:
    """The :class:`WorkKind` of a kernel; copies are classified by their activity type instead."""
    name = _IGNORED_LIBRARY.sub("", name)
    if _COMMUNICATION.search(name):
        return WorkKind.COMMUNICATION
    if _COMPUTE.search(name) and not _NOT_COMPUTE.search(name):
        return WorkKind.COMPUTE
    return WorkKind.MEMORY
