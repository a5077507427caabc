"""Changes of numbers, which are tried only with ``--allow-numerics``."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.optimizing.diagnosis import Facts, Level

TF32 = "TF32"
CHANGES_NUMBERS = "changes numbers"
"""The class of such a change."""
_LINE = 'torch.set_float32_matmul_precision("high")'


def with_numerics(levels: Sequence[Level], facts: Facts) -> list[Level]:
    """``levels`` with those that change numbers to be tried after the others that are tried."""
    if not facts.raw["cuda"] or facts.raw["matmul_precision"] != "highest":
        return list(levels)
    level = Level(
        TF32, "matrix products", None, None, "no bound: shares of products are not measured",
        expected="not measured", result_class=CHANGES_NUMBERS, minutes=0.5, line=_LINE,
        change={"name": TF32, "kind": "matmul_precision", "value": "high"},
    )  # fmt: skip
    tried = [found for found in levels if found.change]
    return [*tried, level, *(f for f in levels if not f.change and f.name != TF32)]
