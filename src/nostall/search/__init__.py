"""Search strategies over any :class:`~nostall.core.Space`; they depend on :mod:`nostall.core`."""

from __future__ import annotations

import inspect
from typing import Any

from nostall.core import BadInput, Search
from nostall.search.anneal import Anneal
from nostall.search.random_walk import RandomSearch
from nostall.search.sip import Sip

__all__ = ["Anneal", "RandomSearch", "Sip", "make", "strategies"]

strategies: dict[str, type[Search]] = {cls.name: cls for cls in (Anneal, Sip, RandomSearch)}
"""Name -> strategy; :func:`make` finds strategies that are added here."""


def make(name: str, **parameters: Any) -> Search:
    """Construct a strategy by its name, with ``parameters`` as the values of its fields.

    Raises :class:`~nostall.core.BadInput` for an unknown name or parameter, or a value out of
    range.
    """
    if name not in strategies:
        raise BadInput(
            f"unknown strategy {name!r}; allowed are {', '.join(sorted(strategies))}; choose one "
            "of them, or add your own to nostall.search.strategies"
        )
    cls = strategies[name]
    known = list(inspect.signature(cls).parameters)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise BadInput(
            f"strategy {name!r} has no parameter {', '.join(unknown)}; its parameters are "
            f"{', '.join(known) or 'none'}; leave the others out"
        )
    return cls(**parameters)
