"""The rates and sizes of one kind of server, each with the source it was read from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nostall.core.errors import BadHardware
from nostall.workload.hardware.efficiency import Curve, Efficiency, flat
from nostall.workload.hardware.operators import OperatorCurve
from nostall.workload.jobs.operators import Operator, OperatorKind
from nostall.workload.jobs.record import Resource


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one GPU and of the links it uses.

    ``flops``: FLOP/s by precision.  ``memory``, ``pcie``, ``nvlink``, ``ethernet``: bytes/s in one
    direction (``memory``: read and write together; ``pcie``: of one of the ``pcie_links`` between a
    server's hosts and GPUs, which the replicas in the server share; ``ethernet``: of a server).  A
    rate of 0 says that the link is not there.  ``memory_size``: bytes of one GPU.
    ``operators``: fitted curves by kind of operator, for jobs that say what theirs are.
    ``sources``: where each number was read.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    memory_size: float
    pcie: float
    nvlink: float
    ethernet: float
    gpus_per_server: int
    pcie_links: int = 1
    efficiency: Efficiency = field(default_factory=flat)
    operators: Mapping[OperatorKind, OperatorCurve] = field(
        default_factory=dict[OperatorKind, OperatorCurve]
    )
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        rates = {r.value: self.rate(r) for r in Resource if r is not Resource.COMPUTE}
        values = {**{f"flops.{k}": v for k, v in self.flops.items()}, **rates}
        for name, value in {**values, "memory_size": self.memory_size}.items():
            needed = name.startswith(("flops", "memory"))
            if not math.isfinite(value) or value < 0 or (needed and value == 0):
                raise BadHardware(
                    f"hardware {self.name!r} has {name} = {value!r}; allowed is a finite rate "
                    f"{'> 0' if needed else '>= 0 (0: not there)'}, correct the description"
                )
        if not self.flops or self.gpus_per_server < 1 or self.pcie_links < 1:
            raise BadHardware(
                f"hardware {self.name!r} has {len(self.flops)} precisions, {self.gpus_per_server} "
                f"GPUs and {self.pcie_links} PCIe links a server; at least one of each is needed"
            )

    def rate(self, resource: Resource, precision: str = "fp32") -> float:
        """Peak of a resource per second; ``precision`` matters for compute only."""
        if resource is Resource.COMPUTE:
            if precision not in self.flops:
                raise BadHardware(
                    f"hardware {self.name!r} has no FLOP/s for {precision!r}; it has "
                    f"{', '.join(self.flops)}; choose one of these or add it to the description"
                )
            return self.flops[precision]
        found: float = getattr(self, resource.value)
        return found

    def seconds(self, resource: Resource, amount: float, precision: str = "fp32") -> float:
        """Time that ``amount`` (FLOP or bytes) takes; a missing link with work to do is refused."""
        if amount <= 0:
            return 0.0
        peak = self.rate(resource, precision)
        if peak == 0:
            raise BadHardware(
                f"hardware {self.name!r} has no {resource.value}, but {amount:.4g} bytes would go "
                "over it; choose another architecture or another hardware"
            )
        return self.curve(resource).seconds(amount, peak)

    def operator_seconds(self, operator: Operator, precision: str = "fp32") -> float:
        """Time of an operator's calls; at the resource's efficiency where its kind has no curve."""
        curve = self.operators.get(operator.kind)
        if curve is not None:
            peak = self.rate(Resource.COMPUTE, precision)
            return curve.seconds(operator, peak, self.memory)
        if operator.kind.computes:
            return self.seconds(Resource.COMPUTE, operator.flops, precision)
        return self.seconds(Resource.MEMORY, operator.size)

    def curve(self, resource: Resource) -> Curve:
        """The efficiency of a resource; the published flat one where none was given."""
        return self.efficiency.get(resource) or flat()[resource]

    def scaled(self, resource: Resource, factor: float) -> Hardware:
        """The same hardware with one rate ``factor`` times as high."""
        if not factor > 0 or not math.isfinite(factor):
            raise BadHardware(f"a rate was scaled by {factor!r}; allowed is a finite factor > 0")
        if resource is Resource.COMPUTE:
            return replace(self, flops={k: v * factor for k, v in self.flops.items()})
        return self.with_rate(resource, self.rate(resource) * factor)

    def with_rate(self, resource: Resource, rate: float) -> Hardware:
        """The same hardware with another rate; for compute, of every precision it has."""
        match resource:
            case Resource.COMPUTE:
                return replace(self, flops=dict.fromkeys(self.flops, rate))
            case Resource.MEMORY:
                return replace(self, memory=rate)
            case Resource.PCIE:
                return replace(self, pcie=rate)
            case Resource.NVLINK:
                return replace(self, nvlink=rate)
            case Resource.ETHERNET:
                return replace(self, ethernet=rate)
