"""Parser for what-if questions: ``ethernet=100Gb/s``, ``memory=x2``, ``to=pearl``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.quantity import parse_quantity
from nostall.workload.jobs.record import Architecture, Resource

_FACTOR = re.compile(r"[x×]\s*([0-9]*\.?[0-9]+)")
_TARGETS = [a.value for a in Architecture if a is not Architecture.SINGLE]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One question: another rate of a resource, or another architecture."""

    text: str
    """The question as the user wrote it."""
    resource: Resource | None = None
    """The resource with another rate; None for a question about an architecture."""
    factor: float | None = None
    """Factor of the rate."""
    rate: float | None = None
    """The new rate (FLOP/s or bytes/s), if the question has no factor."""
    target: Architecture | None = None

    def factor_on(self, hardware: Hardware, precision: str = "fp32") -> float:
        """The factor by which the question changes the rate of its resource on ``hardware``."""
        assert self.resource is not None
        if self.factor is not None:
            return self.factor
        assert self.rate is not None
        current = hardware.rate(self.resource, precision)
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
    if equals and name in {r.value for r in Resource}:
        resource = Resource(name)
        if factor := _FACTOR.fullmatch(value):
            if float(factor[1]) > 0:
                return WhatIf(text, resource, factor=float(factor[1]))
        else:
            unit = "FLOP/s" if resource is Resource.COMPUTE else "B/s"
            rate = parse_quantity(value, unit)
            if rate > 0:
                return WhatIf(text, resource, rate=rate)
    raise BadInput(
        f"--what-if {text!r} is not a valid question; write a rate such as ethernet=100Gb/s, a "
        f"factor > 0 such as memory=x2 (of {', '.join(Resource)}), or to=ARCHITECTURE"
    )
