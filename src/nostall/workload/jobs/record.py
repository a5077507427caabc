"""The features of one training job (arXiv:1910.05930): what one replica does in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nostall.core.errors import BadJob
from nostall.workload.jobs.operators import Operator


class Resource(StrEnum):
    """What a step spends its time on."""

    COMPUTE = "compute"
    MEMORY = "memory"
    PCIE = "pcie"
    NVLINK = "nvlink"
    ETHERNET = "ethernet"


class Architecture(StrEnum):
    """How the replicas of a job exchange weights and gradients."""

    SINGLE = "1w1g"
    """One worker, one GPU: nothing is exchanged."""
    MULTI_GPU = "1wng"
    """One worker, several GPUs; the weights live in host memory."""
    PS_WORKER = "ps-worker"
    """Parameter servers and workers on different machines, one GPU a worker."""
    ALLREDUCE_LOCAL = "allreduce-local"
    """Replicated weights on the GPUs of one server."""
    ALLREDUCE_CLUSTER = "allreduce-cluster"
    """Replicated weights on the GPUs of several servers."""
    PEARL = "pearl"
    """Partitioned embeddings, replicated dense weights, on the GPUs of one server."""

    @property
    def colocated(self) -> bool:
        """Whether replicas fill servers, so that they share a server's PCIe for their input."""
        return self not in (Architecture.SINGLE, Architecture.PS_WORKER)

    @property
    def one_server(self) -> bool:
        """Whether all replicas must sit in one server."""
        return self not in (Architecture.PS_WORKER, Architecture.ALLREDUCE_CLUSTER)


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
    """One job; every amount is for one replica (the paper's cNode: one GPU) and one step.

    ``flops``: of compute-bound operators, at ``precision``.  ``memory_bytes``: read and written by
    memory-bound operators.  ``input_bytes``: copied from host to GPU.  ``dense_bytes`` and
    ``embedding_bytes``: size of the replicated weights and of all embedding tables together.
    ``touched_bytes``: the embedding rows that one replica's batch reads.  ``weight_traffic``: the
    paper's S_w, weight and gradient bytes a replica moves over each medium of its architecture;
    where it is None the closed forms of :mod:`nostall.workload.model.traffic` give it.
    ``operators`` say what the FLOP and memory bytes are made of, where that is known; hardware with
    fitted operators then times each of them.  ``gpu_hours`` weights the job in a population (None:
    replicas times step time).  Raises
    :class:`~nostall.core.errors.BadJob` for values that no job can have.
    """

    name: str
    architecture: Architecture
    replicas: int = 1
    batch: float = 1
    flops: float = 0.0
    memory_bytes: float = 0.0
    input_bytes: float = 0.0
    dense_bytes: float = 0.0
    embedding_bytes: float = 0.0
    touched_bytes: float = 0.0
    weight_traffic: float | None = None
    precision: str = "fp32"
    gpu_hours: float | None = None
    operators: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        for name in _AMOUNTS:
            self._refuse_unless(name, lambda v: math.isfinite(v) and v >= 0, "a number >= 0")
        for name in ("weight_traffic", "gpu_hours"):
            if getattr(self, name) is not None:
                self._refuse_unless(name, lambda v: math.isfinite(v) and v >= 0, "a number >= 0")
        self._refuse_unless("batch", lambda v: math.isfinite(v) and v > 0, "a number > 0")
        self._refuse_unless("replicas", lambda v: v >= 1 and v == int(v), "a whole number >= 1")
        if self.architecture is Architecture.SINGLE and self.replicas != 1:
            raise BadJob(
                f"job {self.name!r} is 1w1g with {self.replicas} replicas; 1w1g has one replica, "
                f"name another architecture: {', '.join(a for a in Architecture)}"
            )
        if not self.flops + self.memory_bytes + self.input_bytes > 0:
            raise BadJob(
                f"job {self.name!r} has no flops, memory_bytes or input_bytes; a step must do "
                "something, so give at least one of them"
            )

    def _refuse_unless(self, name: str, good: object, allowed: str) -> None:
        value = getattr(self, name)
        assert callable(good)
        if not good(value):
            raise BadJob(
                f"job {self.name!r} has {name} = {value!r}; allowed is {allowed}, correct the job"
            )
