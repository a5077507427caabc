"""How far outputs may be from the original's, for users who ask for that."""

from __future__ import annotations

import math

from pydantic import model_validator

from nostall.core.errors import BadInput
from nostall.core.launch import Strict


class Tolerance(Strict):
    """A floating-point output ``y`` is taken for the original's ``x`` when
    ``|y - x| <= atol + rtol * |x|``, or when both have the same bits.

    There is no default: without a tolerance outputs are compared bit by bit, and integer outputs
    are with one.
    """

    rtol: float
    atol: float = 0.0

    @model_validator(mode="after")
    def _finite(self) -> Tolerance:
        if not all(math.isfinite(x) and x >= 0 for x in (self.rtol, self.atol)):
            raise ValueError(f"rtol {self.rtol} and atol {self.atol}; both must be finite, >= 0")
        if self.rtol == self.atol == 0:
            raise ValueError("rtol and atol are both 0; leave the tolerance out instead")
        return self

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """``rtol`` or ``rtol,atol``, as on the command line."""
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
