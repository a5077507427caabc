"""Parser for numbers with units: '25 Gb/s', '11 TFLOP/s', '16 GB'."""

from __future__ import annotations

import re

from nostall.core.errors import BadInput

_DECIMAL_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([KMGT]i|[kKMGTP])?(FLOP/s|FLOPS|B/s|b/s|bit/s|"
    r"bps|B|s)\s*"
)
_UNITS = {
    "FLOP/s": ("FLOP/s", 1.0),
    "FLOPS": ("FLOP/s", 1.0),
    "B/s": ("B/s", 1.0),
    "b/s": ("B/s", 0.125),
    "bit/s": ("B/s", 0.125),
    "bps": ("B/s", 0.125),
    "B": ("B", 1.0),
    "s": ("s", 1.0),
}
"""Base unit of each unit, and the factor that converts to it."""
_EXAMPLES = {"FLOP/s": "11 TFLOP/s", "B/s": "25 Gb/s or 10 GB/s", "B": "16 GB", "s": "0.001 s"}


def parse_quantity(text: str, base_unit: str) -> float:
    """The value of ``text`` in ``base_unit`` ('FLOP/s', 'B/s', 'B' or 's').

    Gb are bits and GB are bytes.  Raises :class:`~nostall.core.errors.BadInput` for text without a
    unit, because a bare number does not say whether it is bits or bytes, giga or gibi.
    """
    match = _QUANTITY.fullmatch(text)
    if match:
        number, prefix, unit = match.groups()
        parsed_base, factor = _UNITS[unit]
        if parsed_base == base_unit:
            return float(number) * {**_DECIMAL_PREFIXES, **_BINARY_PREFIXES}[prefix or ""] * factor
    raise BadInput(
        f"{text!r} is not an amount in {base_unit}; write a number and a unit, such as "
        f"{_EXAMPLES[base_unit]}"
    )
