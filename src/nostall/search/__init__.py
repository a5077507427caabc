"""Strategies over any :class:`~nostall.core.Space`; they know :mod:`nostall.core` only."""

from __future__ import annotations

import inspect
from typing import Any

from nostall.core import BadInput, Search
from nostall.search.anneal import Anneal
from nostall.search.random_walk import RandomSearch
from nostall.search.sip import Sip

__all__ = ["Anneal", "RandomSearch", "Sip", "make", "strategies"]

strategies: dict[str, type[Search]] = {cls.name: cls for cls in (Anneal, Sip, RandomSearch)}
"""Every strategy by its name; add your own to make it known to :func:`make`."""


def make(name: str, **parameters: Any) -> Search:
    """The strategy of that name, its fields set to ``parameters``.

    Raises :class:`~nostall.core.BadInput` for an unknown name, parameter or a value out of range.
    """
    if name not in strategies:
        raise BadInput(
            f"unknown strategy {name!r}; there are {', '.join(sorted(strategies))}; choose one of "
            "them, or add your own to nostall.search.strategies"
        )
    cls = strategies[name]
    known = list(inspect.signature(cls).parameters)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise BadInput(
            f"strategy {name!r} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(known) or 'none'}; leave the others out"
        )
    return cls(**parameters)
