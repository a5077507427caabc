"""Assertions of the conformance checks; a violation raises ``ContractBroken``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nostall.core import ContractBroken

T = TypeVar("T")


def require(holds: bool, problem: str, got: object, allowed: str, advice: str) -> None:
    """Raise :class:`ContractBroken` unless ``holds``.

    The checks use this instead of ``assert``, which Python removes with ``-O``.
    """
    if not holds:
        raise contract_error(problem, got, allowed, advice)


def contract_error(problem: str, got: object, allowed: str, advice: str) -> ContractBroken:
    """The error for a violation: the problem, the value got, what is allowed, what to do."""
    return ContractBroken(f"{problem}: got {shorten(got)}; allowed is {allowed}; {advice}")


def shorten(value: object) -> str:
    """The ``repr`` of a value, cut to 120 characters."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def attempt(call: Callable[[], T], problem: str, allowed: str, advice: str) -> T:
    """The result of ``call``; an exception in it is a violation."""
    try:
        return call()
    except Exception as error:  # whatever the user's code raises breaks its contract
        raise contract_error(problem, error, allowed, advice) from error
