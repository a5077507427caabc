"""Cache of the values of evaluated states, so that a modelled state is evaluated only once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

_PREFIX = "memo:"
"""Prefix of the cached values in a checkpoint's memory."""


class Memo:
    """The last ``limit`` values by digest of the state's key; with ``limit`` 0 an empty cache.

    Checkpoints contain the cache. Without it a resumed search would evaluate cached states again,
    and so differ from an uninterrupted one. For the same reason a new value enters the cache only
    when the search has taken the point that it belongs to: :meth:`note` holds the value back until
    :meth:`commit` is called with a later evaluation.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[str, float] = OrderedDict()
        self._pending: tuple[int, str, float] | None = None

    def digest(self, key: bytes) -> str:
        """The cache key of a state: a hash of 96 bits, so that long keys take no memory."""
        return hashlib.blake2b(key, digest_size=12).hexdigest() if self.limit else ""

    def get(self, digest: str) -> float | None:
        return self._values.get(digest)

    def note(self, index: int, digest: str, value: float) -> None:
        """Hold back the value of evaluation number ``index`` until it is committed."""
        if self.limit:
            self._pending = (index, digest, value)

    def commit(self, evaluations: int) -> None:
        """Cache the pending value if it is one of the first ``evaluations``; else drop it."""
        if self._pending is None:
            return
        index, digest, value = self._pending
        if index < evaluations:
            self._values[digest] = value
            while len(self._values) > self.limit:
                self._values.popitem(last=False)
        self._pending = None

    def dump(self, evaluations: int) -> dict[str, float]:
        """Commit, and return the values as entries of a checkpoint's memory, oldest first."""
        self.commit(evaluations)
        return {_PREFIX + digest: value for digest, value in self._values.items()}

    def load(self, memory: Mapping[str, float]) -> dict[str, float]:
        """Take the values out of a checkpoint's memory; returns the other entries."""
        for name, value in memory.items():
            if name.startswith(_PREFIX) and self.limit:
                self._values[name.removeprefix(_PREFIX)] = value
        return {name: value for name, value in memory.items() if not name.startswith(_PREFIX)}
