"""Parser for what-if questions: ``ethernet=100Gb/s``, ``memory=x2``, ``to=pearl``, ``nodes=4``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import MAX_RATE, MIN_RATE, Hardware
from nostall.workload.hardware.file import parse_quantity
from nostall.workload.jobs.record import Architecture, Resource

_FACTOR = re.compile(r"[x×]\s*([0-9]*\.?[0-9]+)")
_NODES = re.compile(r"(\d{1,7})(?:\s*,\s*gradients\s*=\s*(.+))?")
MAX_NODES = 1_000_000
MIN_FACTOR, MAX_FACTOR = 1e-9, 1e9
_TARGETS = [a.value for a in Architecture if a is not Architecture.SINGLE]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One question: another rate of a resource, another architecture, or more nodes."""

    text: str
    """The question as the user wrote it."""
    resource: Resource | None = None
    """The resource with another rate; None for a question about an architecture."""
    factor: float | None = None
    """Factor of the rate."""
    rate: float | None = None
    """The new rate (FLOP/s or bytes/s), if the question has no factor."""
    target: Architecture | None = None
    nodes: int | None = None
    """Number of nodes over which a measured step is distributed."""
    gradient_bytes: float | None = None
    """Bytes that the nodes exchange; None: those that were measured."""

    def factor_on(self, hardware: Hardware) -> float:
        """The factor by which the question changes the rate of its resource on ``hardware``."""
        assert self.resource is not None
        if self.factor is not None:
            return self.factor
        assert self.rate is not None
        current = hardware.rate(self.resource)
        if current == 0:
            raise BadInput(
                f"--what-if {self.text}: {hardware.name} has no {self.resource} to compare with; "
                "give other hardware"
            )
        return self.rate / current

    def apply(self, hardware: Hardware) -> Hardware:
        """A copy of ``hardware`` with the rate of the question."""
        assert self.resource is not None
        if self.factor is not None:
            return hardware.scaled(self.resource, self.factor)
        assert self.rate is not None
        return hardware.with_rate(self.resource, self.rate)


def parse_what_if(text: str) -> WhatIf:
    """Parse one question.

    Raises :class:`~nostall.core.errors.BadInput` with the allowed forms if it is not valid.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    name = key.lower()
    if equals and name == "to":
        target = value.lower().replace("_", "-").replace("/", "-")
        if target in _TARGETS:
            return WhatIf(text, target=Architecture(target))
        raise BadInput(
            f"--what-if {text}: {value!r} is not an architecture; write 'to=' and one of "
            f"{', '.join(_TARGETS)}"
        )
    if equals and name == "nodes":
        return _parse_nodes(text, value)
    if equals and name in {r.value for r in Resource}:
        resource = Resource(name)
        if factor := _FACTOR.fullmatch(value):
            if MIN_FACTOR <= float(factor[1]) <= MAX_FACTOR:
                return WhatIf(text, resource, factor=float(factor[1]))
        else:
            unit = "FLOP/s" if resource is Resource.COMPUTE else "B/s"
            rate = parse_quantity(value, unit)
            if MIN_RATE <= rate <= MAX_RATE:
                return WhatIf(text, resource, rate=rate)
    raise BadInput(
        f"--what-if {text!r} is not a valid question; write a rate such as ethernet=100Gb/s, a "
        f"factor from {MIN_FACTOR:g} to {MAX_FACTOR:g} such as memory=x2 (of "
        f"{', '.join(Resource)}), to=ARCHITECTURE, or nodes=N"
    )


def _parse_nodes(text: str, value: str) -> WhatIf:
    match = _NODES.fullmatch(value)
    nodes = int(match[1]) if match else 0
    if match is None or not 2 <= nodes <= MAX_NODES:
        raise BadInput(
            f"--what-if {text}: {value!r} is not a number of nodes; write nodes=N with N from 2 to "
            f"{MAX_NODES:,}, or nodes=N,gradients=438MB"
        )
    size = parse_quantity(match[2], "B") if match[2] else None
    return WhatIf(text, nodes=nodes, gradient_bytes=size)
