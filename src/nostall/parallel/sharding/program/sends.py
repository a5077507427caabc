"""Sends that may be under way, with the tensors that they need."""

from __future__ import annotations

from typing import Any

import torch


class Sends:
    """Keeps the tensors of a rank's messages until they are sent."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Any]] = []

    def add(self, work: Any, tensors: Any) -> None:
        """Keep the tensors of a send, and free those of sends that have completed.

        A failed send raises its error.
        """
        self._under_way.append((work, tensors))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a capture sends nothing, and may not ask what is done
        under_way = []
        for one in self._under_way:
            if one[0].is_completed():
                one[0].wait()
            else:
                under_way.append(one)
        self._under_way = under_way

    def finish(self) -> None:
        """Wait for all sends; a GPU waits before its next kernel."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def forget(self) -> None:
        """Drop sends of a capture that failed."""
        self._under_way.clear()
