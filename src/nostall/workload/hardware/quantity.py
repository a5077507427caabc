"""Numbers with units, as people write them in a hardware file: '25 Gb/s', '11 TFLOP/s', '16 GB'."""

from __future__ import annotations

import re

from nostall.core.errors import BadInput

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_FORM = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([KMGT]i|[kKMGTP])?(FLOP/s|FLOPS|B/s|b/s|bit/s|"
    r"bps|B|s)\s*"
)
_DIMENSION = {
    "FLOP/s": ("FLOP/s", 1.0),
    "FLOPS": ("FLOP/s", 1.0),
    "B/s": ("B/s", 1.0),
    "b/s": ("B/s", 0.125),
    "bit/s": ("B/s", 0.125),
    "bps": ("B/s", 0.125),
    "B": ("B", 1.0),
    "s": ("s", 1.0),
}
_EXAMPLES = {"FLOP/s": "11 TFLOP/s", "B/s": "25 Gb/s or 10 GB/s", "B": "16 GB", "s": "0.001 s"}


def quantity(text: str, dimension: str) -> float:
    """The value in ``dimension`` ('FLOP/s', 'B/s', 'B' or 's'); Gb are bits, GB are bytes.

    Raises :class:`~nostall.core.errors.BadInput` for text without a unit, because a bare number
    leaves bits and bytes, giga and gibi open.
    """
    found = _FORM.fullmatch(text)
    if found:
        number, prefix, unit = found.groups()
        kind, factor = _DIMENSION[unit]
        if kind == dimension:
            return float(number) * {**_PREFIX, **_BINARY}[prefix or ""] * factor
    raise BadInput(
        f"{text!r} is not an amount in {dimension}; write a number and a unit such as "
        f"{_EXAMPLES[dimension]}"
    )
