"""Tolerance for comparing a candidate's floating-point outputs with the original's."""

from __future__ import annotations

import math

from pydantic import model_validator

from nostall.core.errors import BadInput
from nostall.core.launch import StrictModel


class Tolerance(StrictModel):
    """Allowed difference of a floating-point output ``y`` from the original's ``x``.

    ``y`` is accepted if ``|y - x| <= atol + rtol * |x|``, or if both have the same bits.  There is
    no default: without a tolerance, outputs are compared bit by bit.  Integer outputs always are.
    """

    rtol: float
    atol: float = 0.0

    @model_validator(mode="after")
    def _validate_range(self) -> Tolerance:
        if not all(math.isfinite(x) and x >= 0 for x in (self.rtol, self.atol)):
            raise ValueError(f"rtol {self.rtol} and atol {self.atol}; both must be finite, >= 0")
        if self.rtol == self.atol == 0:
            raise ValueError(
                "rtol and atol are both 0; at least one must be above 0, or leave the tolerance out"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Parse the value of ``--tolerance``: ``rtol`` or ``rtol,atol``.

        Raises :class:`BadInput` if ``text`` is neither.
        """
        try:
            numbers = [float(part) for part in text.split(",")]
            if len(numbers) > 2:
                raise ValueError("more than two numbers")
            return cls(rtol=numbers[0], atol=numbers[1] if len(numbers) == 2 else 0.0)
        except ValueError as error:
            raise BadInput(
                f"--tolerance is {text!r}; give rtol or rtol,atol, finite and not negative, such "
                "as 1e-3 or 1e-3,1e-6; leave it out to compare bit by bit"
            ) from error

    def __str__(self) -> str:
        return f"rtol {self.rtol:g}, atol {self.atol:g}"
