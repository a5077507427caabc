"""Suggestions of what was probably meant, in error texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_CUTOFF = 0.6
"""Similarity (difflib) of names that are suggested."""


MAX_LISTED = 12
"""Names that a message lists."""
_MAX_NAME = 80
"""Characters of a listed name; mangled names of C++ templates have thousands."""


def listed(names: Iterable[str]) -> str:
    """The first names, separated by commas, and how many more there are; ``(none)`` without any."""
    all_names = list(names)
    shown = [n if len(n) <= _MAX_NAME else f"{n[:_MAX_NAME]}..." for n in all_names[:MAX_LISTED]]
    more = len(all_names) - len(shown)
    return (", ".join(shown) or "(none)") + (f" and {more} more" if more else "")


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` with the allowed name that is most like ``name``, or nothing."""
    by_lower = {text.lower(): text for text in allowed}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=_CUTOFF)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """Message for an unknown name: what it is, the name, those allowed, and the nearest one."""
    names = list(allowed)
    return f"{what} {name!r} is unknown; allowed are {listed(names)}{did_you_mean(name, names)}"


def wrong_separator(header: Sequence[str]) -> str:
    """Advice for the header of a CSV file whose cells commas do not separate; else ``""``."""
    for separator, name in ((";", "';'"), ("\t", "tabs"), ("|", "'|'")):
        if len(header) == 1 and separator in header[0]:
            return (
                f"; the cells are separated by {name}: separate them by commas, and write decimals "
                "with a point"
            )
    return ""
