"""Python text under construction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Lines:
    """Lines of code with indentation."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, line: str = "") -> None:
        self._lines.append("    " * self._depth + line if line else "")

    @contextlib.contextmanager
    def block(self, head: str | None = None) -> Iterator[None]:
        """An indented block, under ``head`` where one is given."""
        if head is not None:
            self(head)
        self._depth += 1
        yield
        self._depth -= 1

    def add(self, others: Lines) -> None:
        """Put the lines of ``others`` here."""
        for line in others._lines:
            self(line)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"
