"""A builder for indented Python source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Lines:
    """Source lines; calling the object appends a line at the current indentation."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, line: str = "") -> None:
        self._lines.append("    " * self._depth + line if line else "")

    @contextlib.contextmanager
    def block(self, head: str | None = None) -> Iterator[None]:
        """Indent the lines of the context; ``head``, if given, is the line above the block."""
        if head is not None:
            self(head)
        self._depth += 1
        yield
        self._depth -= 1

    def add(self, lines: Lines) -> None:
        """Append ``lines`` at the current indentation."""
        for line in lines._lines:
            self(line)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"
