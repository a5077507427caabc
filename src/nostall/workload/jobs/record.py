"""The job record of arXiv:1910.05930, its operators, and the names of number formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from nostall.core.errors import BadJob


class OperatorKind(StrEnum):
    """Classes of operators that reach similar shares of a GPU's peak rates at equal sizes."""

    PRODUCT = "product"
    """Matrix products."""
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    NORMALISATION = "normalisation"
    """Layer norm, batch norm, softmax: a reduction and an elementwise pass that uses its result."""
    REDUCTION = "reduction"
    EMBEDDING = "embedding"

    @property
    def is_compute_bound(self) -> bool:
        """Whether its time counts as T_c of arXiv:1910.05930, not as memory access."""
        return self in (OperatorKind.PRODUCT, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION)


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one operator that have the same FLOP and bytes."""

    kind: OperatorKind
    name: str
    """PyTorch's name, for example ``aten.mm.default``."""
    calls: int
    flops: float
    """FLOP of all calls together; 0 if PyTorch's FLOP counter has no formula."""
    bytes_moved: float
    """Bytes that all calls together read and write."""


class Resource(StrEnum):
    """Hardware resources that limit the speed of a step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    PCIE = "pcie"
    NVLINK = "nvlink"
    ETHERNET = "ethernet"


class Architecture(StrEnum):
    """Method by which the replicas of a job exchange weights and gradients (arXiv:1910.05930)."""

    SINGLE = "1w1g"
    """One worker with one GPU: no exchange."""
    MULTI_GPU = "1wng"
    """One worker with several GPUs; the weights are in host memory."""
    PS_WORKER = "ps-worker"
    """Parameter servers and workers on different machines, one GPU per worker."""
    ALLREDUCE_LOCAL = "allreduce-local"
    """Replicated weights on the GPUs of one server."""
    ALLREDUCE_CLUSTER = "allreduce-cluster"
    """Replicated weights on the GPUs of several servers."""
    PEARL = "pearl"
    """Partitioned embeddings and replicated dense weights on the GPUs of one server."""

    @property
    def is_colocated(self) -> bool:
        """Whether the replicas of a server share its PCIe links for their input."""
        return self not in (Architecture.SINGLE, Architecture.PS_WORKER)

    @property
    def is_single_server(self) -> bool:
        """Whether all replicas must run in one server."""
        return self not in (Architecture.PS_WORKER, Architecture.ALLREDUCE_CLUSTER)


MAX_AMOUNT = 1e30
"""Limit of amounts; sums and products of larger ones are not finite."""
MAX_REPLICAS = 10_000_000
"""Limit of replicas, ten times as many as the largest clusters have GPUs."""
MIN_WORK = 1.0
"""FLOP and bytes that a step has at least; less than one is no work."""

_AMOUNTS = (
    "flops",
    "memory_bytes",
    "input_bytes",
    "dense_bytes",
    "embedding_bytes",
    "touched_bytes",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One training job; amounts are for one replica (the paper's cNode: one GPU) and one step.

    Raises :class:`~nostall.core.errors.BadJob` for values that no job can have.
    """

    name: str
    architecture: Architecture
    replicas: int = 1
    batch: float = 1
    """Samples per replica and step."""
    flops: float = 0.0
    """FLOP of compute-bound operators, at ``precision``."""
    memory_bytes: float = 0.0
    """Bytes that memory-bound operators read and write."""
    input_bytes: float = 0.0
    """Bytes copied from the host to the GPU."""
    dense_bytes: float = 0.0
    """Bytes of the dense weights."""
    embedding_bytes: float = 0.0
    """Bytes of all embedding tables together."""
    touched_bytes: float = 0.0
    """Bytes of the embedding rows that the batch of one replica reads."""
    weight_traffic: float | None = None
    """The paper's S_w: weight and gradient bytes that a replica moves over each medium of its
    architecture.  None: the closed forms of :mod:`nostall.workload.model.breakdown` give it."""
    precision: str = "fp32"
    gpu_hours: float | None = None
    """Weight of the job in a population.  None: replicas times step time."""
    operators: tuple[Operator, ...] = ()
    """The operators that ``flops`` and ``memory_bytes`` add up, if known.  Hardware with fitted
    operator times models each of them."""

    def __post_init__(self) -> None:
        for name in _AMOUNTS:
            self._check(name, _is_amount, _AMOUNT)
        for name in ("weight_traffic", "gpu_hours"):
            if getattr(self, name) is not None:
                self._check(name, _is_amount, _AMOUNT)
        self._check("batch", lambda v: _is_amount(v) and v > 0, f"a number > 0, <= {MAX_AMOUNT:g}")
        self._check("replicas", _is_count, f"an integer from 1 to {MAX_REPLICAS:,}")
        if self.architecture is Architecture.SINGLE and self.replicas != 1:
            raise BadJob(
                f"job {self.name!r} is 1w1g with {self.replicas} replicas; 1w1g has one replica; "
                f"use another architecture: {', '.join(a for a in Architecture)}"
            )
        if self.flops + self.memory_bytes + self.input_bytes < MIN_WORK:
            raise BadJob(
                f"job {self.name!r} does no work: flops, memory_bytes and input_bytes are all 0 "
                "or less than 1 together; set at least one of them"
            )

    def _check(self, name: str, is_valid: Callable[[float], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not is_valid(value):
            raise BadJob(
                f"job {self.name!r} has {name} = {value!r}; allowed is {allowed}; correct the job"
            )


def _is_amount(value: float) -> bool:
    return 0 <= value <= MAX_AMOUNT


def _is_count(value: float) -> bool:
    return 1 <= value <= MAX_REPLICAS and value == int(value)


_AMOUNT = f"a number from 0 to {MAX_AMOUNT:g}"


_SPELLINGS = {
    "fp64": ("f64", "float64", "double", "fp64tensor"),
    "fp32": ("f32", "float32", "float", "single"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16", "bfloat"),
    "fp16": ("f16", "float16", "half"),
    "fp8": (
        *("f8", "float8", "e4m3", "e5m2", "fp8e4m3", "fp8e5m2", "f8e4m3", "f8e5m2", "f8e4m3fn"),
        *("fp8e4m3fn", "float8e4m3", "float8e5m2", "float8e4m3fn", "mxfp8"),
    ),
    "fp4": ("f4", "float4", "e2m1", "f4e2m1", "float4e2m1", "mxfp4", "nvfp4"),
    "int8": ("i8", "s8", "char"),
}
_CANONICAL = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others)}
_IGNORED = re.compile(r"^(?:torch|c10|jnp|np)(?:\.|::)|[\s_-]")


def canonical_precision(name: str) -> str:
    """The name of a precision in hardware files; an unknown one in lower case.

    ``bfloat16``, ``torch.bfloat16`` and ``BF16`` are ``bf16``.
    """
    lower = name.strip().lower()
    return _CANONICAL.get(_IGNORED.sub("", lower), lower)
