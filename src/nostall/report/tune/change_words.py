"""Words for the steps of a search, whose records have the names of the search's operators."""

from __future__ import annotations

import re

_SIZES = {1: "a small", 3: "a medium", 8: "a large"}
_WORDS = (
    (r"reorder sigma=(\S+) hot", "{size} change of the order, in the blocks that take the time"),
    (r"reorder sigma=(\S+)( \w+)?", "{size} change of the order"),
    (r"(?:random order|immigrant) sigma=(\S+)", "a new order, not made from an earlier one"),
    (r"recombine.*", "blocks of two earlier candidates together"),
    (r"portfolio.*|given.*", "a setting that is tried for every kernel"),
    (r"moves lever x(\d+)", "{number} changed: ptxas version, options, registers or cache hints"),
)
"""Pattern of an operator's name -> what it does."""


def change_words(name: str) -> str:
    """What a step of the search changed; the operator's name if it is not known."""
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, name):
            value = found[1] if found.re.groups else ""
            size = _SIZES.get(int(float(value)), "a") if re.fullmatch(r"[\d.]+", value) else "a"
            number = f"{value} setting{'s' if value != '1' else ''}"
            return words.format(size=size, number=number)
    return name


def setting_words(text: str) -> str:
    """A setting of a candidate; records name only the number of cache hints."""
    return re.sub(r"^(\d+) hints$", r"other cache hints at \1 loads or stores", text)
