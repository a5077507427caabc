"""What kind of work a GPU activity is, told by its name.

Names are all that every trace has.  What is not recognised as communication or as a product or
convolution counts as memory-bound, which is what most of the rest of a training step is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from nostall.workload.traces.recording import Activities


class Kind(IntEnum):
    """Kinds of GPU work, the one that is shown first where several run at a time."""

    COMPUTE = 0
    MEMORY = 1
    COMMUNICATION = 2
    INPUT = 3
    COPY = 4


_LIBRARY = re.compile(r"fbgemm(_gpu)?", re.IGNORECASE)
"""A library of embedding kernels whose name would make each of them a product."""
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
# A library's name alone says nothing of its elementwise and reduction kernels.
_NOT_COMPUTE = re.compile(
    r"elementwise|nchwToNhwc|nhwcToNchw|batch_?norm|bn_fw|bn_bw|layer_?norm|reduce_kernel|splitK?"
    r"reduce|transpose|im2col|col2im|softmax|memset|cast_kernel",
    re.IGNORECASE,
)


def kinds(activities: Activities, names: Sequence[str]) -> np.ndarray:
    """The :class:`Kind` of each activity."""
    by_name = np.array([kind_of_name(name) for name in names], dtype=np.int8)
    to_gpu = np.array(["htod" in name.lower() for name in names], dtype=bool)
    found: np.ndarray = by_name[activities.name]
    copy = activities.kind == 1
    found[copy] = np.where(to_gpu[activities.name[copy]], Kind.INPUT, Kind.COPY)
    found[activities.kind == 2] = Kind.MEMORY
    return found


def kind_of_name(name: str) -> Kind:
    """The :class:`Kind` of a kernel; copies are told by their category, not here."""
    name = _LIBRARY.sub("", name)
    if _COMMUNICATION.search(name):
        return Kind.COMMUNICATION
    if _COMPUTE.search(name) and not _NOT_COMPUTE.search(name):
        return Kind.COMPUTE
    return Kind.MEMORY
