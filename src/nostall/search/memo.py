"""Values of states that were evaluated already, so that none is paid for twice."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

_MARK = "memo:"


class Memo:
    """The last ``limit`` values by digest of the state's key; a ``limit`` of 0 remembers nothing.

    Checkpoints carry it: without it a resumed search would pay again for what its predecessor
    knew, and so part from the uninterrupted one.  For the same reason a new value only counts
    once the search has taken the point that it belongs to: :meth:`note` holds it back until
    :meth:`catch_up` hears of a later evaluation.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[str, float] = OrderedDict()
        self._noted: tuple[int, str, float] | None = None

    def digest(self, key: bytes) -> str:
        """What a state is remembered by: 96 bits, so that long keys cost no memory."""
        return hashlib.blake2b(key, digest_size=12).hexdigest() if self.limit else ""

    def get(self, digest: str) -> float | None:
        return self._values.get(digest)

    def note(self, index: int, digest: str, value: float) -> None:
        """Evaluation number ``index`` gave ``value``."""
        if self.limit:
            self._noted = (index, digest, value)

    def catch_up(self, evaluations: int) -> None:
        """Take in the noted value if its evaluation is among the first ``evaluations``."""
        if self._noted is None:
            return
        index, digest, value = self._noted
        if index < evaluations:
            self._values[digest] = value
            while len(self._values) > self.limit:
                self._values.popitem(last=False)
        self._noted = None

    def saved(self, evaluations: int) -> dict[str, float]:
        """The values as part of a checkpoint's memory, oldest first."""
        self.catch_up(evaluations)
        return {_MARK + digest: value for digest, value in self._values.items()}

    def restore(self, memory: Mapping[str, float]) -> dict[str, float]:
        """Take the values out of a checkpoint's memory; returns the rest."""
        for name, value in memory.items():
            if name.startswith(_MARK) and self.limit:
                self._values[name.removeprefix(_MARK)] = value
        return {name: value for name, value in memory.items() if not name.startswith(_MARK)}
