"""How the checkers say that a contract is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nostall.core import ContractBroken

T = TypeVar("T")


def claim(held: bool, what: str, got: object, allowed: str, todo: str) -> None:
    """Raise :class:`ContractBroken` unless ``held``; never an assert, which ``-O`` removes."""
    if not held:
        raise broken(what, got, allowed, todo)


def broken(what: str, got: object, allowed: str, todo: str) -> ContractBroken:
    """What went wrong, the value met, what is allowed, what to do next."""
    return ContractBroken(f"{what}: got {brief(got)}; allowed is {allowed}; {todo}")


def brief(value: object) -> str:
    """A value short enough for one line."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def attempt(call: Callable[[], T], what: str, allowed: str, todo: str) -> T:
    """The call's result; an exception breaks the contract."""
    try:
        return call()
    except Exception as error:
        raise broken(what, error, allowed, todo) from error
