"""What-if questions as people write them: ``ethernet=100Gb/s``, ``memory=x2``, ``to=pearl``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.quantity import quantity
from nostall.workload.jobs.record import Architecture, Resource

_FACTOR = re.compile(r"[x×]\s*([0-9]*\.?[0-9]+)")
_TARGETS = [a.value for a in Architecture if a is not Architecture.SINGLE]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One question: a rate changed by ``factor`` or to ``rate``, or another architecture."""

    text: str
    resource: Resource | None = None
    factor: float | None = None
    rate: float | None = None
    target: Architecture | None = None

    def of(self, hardware: Hardware, precision: str = "fp32") -> float:
        """The factor by which the question changes its resource on this hardware."""
        assert self.resource is not None
        if self.factor is not None:
            return self.factor
        assert self.rate is not None
        here = hardware.rate(self.resource, precision)
        if here == 0:
            raise BadInput(
                f"--what-if {self.text}: {hardware.name} has no {self.resource}, so there is "
                "nothing to compare with; give another hardware"
            )
        return self.rate / here

    def changed(self, hardware: Hardware) -> Hardware:
        """The hardware of the question."""
        assert self.resource is not None
        if self.factor is not None:
            return hardware.scaled(self.resource, self.factor)
        assert self.rate is not None
        return hardware.with_rate(self.resource, self.rate)


def parse_what_if(text: str) -> WhatIf:
    """Read one question.

    Raises :class:`~nostall.core.errors.BadInput` saying what can be asked.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    name = key.lower()
    if equals and name == "to":
        wanted = value.lower().replace("_", "-").replace("/", "-")
        if wanted in _TARGETS:
            return WhatIf(text, target=Architecture(wanted))
        raise BadInput(f"--what-if {text}: allowed after 'to=' are {', '.join(_TARGETS)}")
    if equals and name in {r.value for r in Resource}:
        resource = Resource(name)
        if factor := _FACTOR.fullmatch(value):
            if float(factor[1]) > 0:
                return WhatIf(text, resource, factor=float(factor[1]))
        else:
            unit = "FLOP/s" if resource is Resource.COMPUTE else "B/s"
            rate = quantity(value, unit)
            if rate > 0:
                return WhatIf(text, resource, rate=rate)
    raise BadInput(
        f"--what-if {text!r} is no question; write a rate such as ethernet=100Gb/s, a factor above "
        f"0 such as memory=x2 (of {', '.join(Resource)}), or to=ARCHITECTURE"
    )
