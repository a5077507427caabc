"""A change of number formats: products of float32 matrices with inputs rounded to TF32."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from nostall.attach.program.shadow import CLASSES, Call, Finding


def matmul_precision() -> str | None:
    """What ``torch.set_float32_matmul_precision`` has set.

    None where it is not told, because the program uses PyTorch's later settings of each library.
    """
    with contextlib.suppress(Exception):
        return str(sys.modules["torch"].get_float32_matmul_precision())
    return None


class MatmulPrecision:
    """``torch.set_float32_matmul_precision("high")``; its results are not those of the original."""

    def __init__(self, value: str) -> None:
        self.value = value
        self._before: str | None = None

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        if matmul_precision() is None:
            return "the program sets the precision of products by library"
        return ""

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        if reason := self.missing():
            return Finding(CLASSES[3], reason)
        return Finding(CLASSES[3], detail="results are not compared: the inputs are rounded")

    def is_settled(self) -> bool:
        return True

    def on(self) -> None:
        if self._before is None:
            self._before = matmul_precision()
        sys.modules["torch"].set_float32_matmul_precision(self.value)

    def off(self) -> None:
        if self._before is not None:
            sys.modules["torch"].set_float32_matmul_precision(self._before)
            self._before = None
