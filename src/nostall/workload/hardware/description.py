"""Description of one server type: peak rates, memory size and efficiencies, with their sources.

Time model of an operator: a fixed cost per call, plus its FLOP and its bytes at fitted rates.

A flat share of a peak rate fits neither a small kernel nor a batch norm that reads its input twice.
Three numbers per kind of operator are fitted to measured calls:

    seconds = calls x overhead + compute x FLOP / peak FLOP/s + memory x bytes / peak bytes/s

The efficiency therefore rises with the size.  The model is a sum, not the maximum of a roofline:
what-if questions need a time that is linear in both inverse rates, and near the ridge point compute
and memory access do not overlap completely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nostall.core.errors import BadHardware, BadInput
from nostall.workload.jobs.record import Operator, OperatorKind, Resource

PUBLISHED_SHARE = 0.7
"""Efficiency on every resource that readers of arXiv:1910.05930 report (unverified)."""

MIN_SHARE = 1e-9
MAX_OVERHEAD = 1e6
"""Seconds."""


@dataclass(frozen=True, slots=True)
class EfficiencyCurve:
    """Time model of a resource: seconds = ``overhead`` + amount / (``share`` x peak rate).

    The efficiency of an amount ``a`` is share x a / (a + overhead x share x peak): it rises with
    the amount and is half of ``share`` at overhead x share x peak.  It is flat without overhead.
    """

    share: float
    """Share of the peak rate that large amounts reach, :data:`MIN_SHARE` to 1."""
    overhead: float = 0.0
    """Seconds that any amount costs, at most :data:`MAX_OVERHEAD`."""

    def __post_init__(self) -> None:
        if not MIN_SHARE <= self.share <= 1 or not 0 <= self.overhead <= MAX_OVERHEAD:
            raise BadInput(
                f"an efficiency curve has share {self.share!r} and overhead {self.overhead!r} s; "
                f"allowed are {MIN_SHARE:g} <= share <= 1 and 0 <= overhead <= {MAX_OVERHEAD:g}; "
                "correct the efficiency"
            )

    def seconds(self, amount: float, peak: float) -> float:
        """Modelled time of ``amount`` at ``peak`` per second; 0 for an amount of 0."""
        return self.overhead + amount / (self.share * peak) if amount > 0 else 0.0


Efficiency = Mapping[Resource, EfficiencyCurve]


def flat_efficiency(share: float = PUBLISHED_SHARE) -> Efficiency:
    """The same share of the peak for every resource and every amount."""
    return {resource: EfficiencyCurve(share) for resource in Resource}


MAX_FACTOR = 1e9
"""Limit of the three numbers of a time model."""


@dataclass(frozen=True, slots=True)
class OperatorTimeModel:
    """Fitted time model of one kind of operator.

    A factor of 1 means the peak rate; a factor of 0 means that the amount does not matter.
    """

    overhead: float
    """Seconds per call."""
    compute: float
    """Factor of the time of the FLOP at the peak rate."""
    memory: float
    """Factor of the time of the bytes at the peak rate; below 1 if caches serve some of them."""

    def __post_init__(self) -> None:
        values = (self.overhead, self.compute, self.memory)
        if not all(0 <= v <= MAX_FACTOR for v in values) or not any(values):
            raise BadInput(
                f"an operator has overhead {self.overhead!r} s, compute {self.compute!r} and "
                f"memory {self.memory!r}; allowed are numbers from 0 to {MAX_FACTOR:g}, not all 0; "
                "correct them"
            )

    def seconds(self, operator: Operator, peak_flops: float, peak_memory: float) -> float:
        """Modelled time of all calls of ``operator``; the peaks are in FLOP/s and bytes/s."""
        fixed = self.overhead * operator.calls
        work = self.compute * operator.flops / peak_flops
        return fixed + work + self.memory * operator.bytes_moved / peak_memory


MIN_RATE, MAX_RATE = 1.0, 1e30
"""Limits of rates and sizes that exist; with others, modelled times are not finite or 0."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one GPU and of the links that it uses.

    Link rates are bytes/s in one direction; a rate of 0 means that the link does not exist.
    """

    name: str
    flops: Mapping[str, float]
    """FLOP/s by precision (``fp32``, ``bf16``)."""
    memory: float
    """Bytes/s of GPU memory, reads and writes together."""
    memory_size: float
    """Bytes of memory of one GPU."""
    pcie: float
    """Bytes/s of one of the ``pcie_links`` of a server."""
    nvlink: float
    """Bytes/s of one GPU."""
    ethernet: float
    """Bytes/s of one server."""
    gpus_per_server: int
    pcie_links: int = 1
    """PCIe links between the host and the GPUs of a server; the replicas in it share them."""
    contention: float = 0.0
    """Share of their speed that operators lose while a collective runs."""
    collective_wait: float = 0.0
    """Seconds that a collective beside operators waits for multiprocessors."""
    efficiency: Efficiency = field(default_factory=flat_efficiency)
    """Efficiency of each resource; a missing resource has the flat one."""
    operators: Mapping[OperatorKind, OperatorTimeModel] = field(
        default_factory=dict[OperatorKind, OperatorTimeModel]
    )
    """Fitted time models by kind of operator, for jobs that list their operators."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where each number comes from, by field name."""

    def __post_init__(self) -> None:
        rates = {r.value: self.rate(r) for r in Resource if r is not Resource.COMPUTE}
        values = {**{f"flops.{k}": v for k, v in self.flops.items()}, **rates}
        for name, value in {**values, "memory_size": self.memory_size}.items():
            is_required = name.startswith(("flops", "memory"))
            if not (MIN_RATE <= value <= MAX_RATE or (value == 0 and not is_required)):
                absent = "" if is_required else ", or 0 if the link does not exist"
                raise BadHardware(
                    f"hardware {self.name!r} has {name} = {value!r}; allowed is a number from "
                    f"{MIN_RATE:g} to {MAX_RATE:g}{absent}; correct the description"
                )
        if not self.flops or self.gpus_per_server < 1 or self.pcie_links < 1:
            raise BadHardware(
                f"hardware {self.name!r} has {len(self.flops)} precisions, {self.gpus_per_server} "
                f"GPUs and {self.pcie_links} PCIe links per server; at least one of each is needed"
            )

    def rate(self, resource: Resource, precision: str = "fp32") -> float:
        """Peak rate of a resource, FLOP/s or bytes/s; only compute depends on ``precision``."""
        if resource is Resource.COMPUTE:
            if precision not in self.flops:
                raise BadHardware(
                    f"hardware {self.name!r} has no FLOP/s for {precision!r}; it has "
                    f"{', '.join(self.flops)}; use one of these or add it to the description"
                )
            return self.flops[precision]
        rate: float = getattr(self, resource.value)
        return rate

    def seconds(self, resource: Resource, amount: float, precision: str = "fp32") -> float:
        """Modelled time of ``amount`` (FLOP or bytes) on a resource.

        Raises :class:`~nostall.core.errors.BadHardware` if the link does not exist and ``amount``
        is not 0.
        """
        if amount <= 0:
            return 0.0
        peak = self.rate(resource, precision)
        if peak == 0:
            raise BadHardware(
                f"hardware {self.name!r} has no {resource.value}, but {amount:.4g} bytes would use "
                "it; choose another architecture or other hardware"
            )
        return self.curve(resource).seconds(amount, peak)

    def operator_seconds(self, operator: Operator, precision: str = "fp32") -> float:
        """Modelled time of all calls of an operator.

        An operator kind without a fitted time model has the efficiency of its resource.
        """
        time_model = self.operators.get(operator.kind)
        if time_model is not None:
            peak = self.rate(Resource.COMPUTE, precision)
            return time_model.seconds(operator, peak, self.memory)
        if operator.kind.is_compute_bound:
            return self.seconds(Resource.COMPUTE, operator.flops, precision)
        return self.seconds(Resource.MEMORY, operator.bytes_moved)

    def curve(self, resource: Resource) -> EfficiencyCurve:
        """Efficiency of a resource; the published flat one if the description has none."""
        return self.efficiency.get(resource) or flat_efficiency()[resource]

    def scaled(self, resource: Resource, factor: float) -> Hardware:
        """A copy with the rate of one resource multiplied by ``factor``."""
        if not factor > 0 or not math.isfinite(factor):
            raise BadHardware(
                f"cannot multiply the rate of {resource.value} by {factor!r}; allowed is a finite "
                "factor > 0"
            )
        if resource is Resource.COMPUTE:
            return replace(self, flops={k: v * factor for k, v in self.flops.items()})
        return self.with_rate(resource, self.rate(resource) * factor)

    def with_rate(self, resource: Resource, rate: float) -> Hardware:
        """A copy with another rate of one resource; for compute, the rate of every precision."""
        if resource is Resource.COMPUTE:
            return replace(self, flops=dict.fromkeys(self.flops, rate))
        changes: dict[str, Any] = {resource.value: rate}
        return replace(self, **changes)
