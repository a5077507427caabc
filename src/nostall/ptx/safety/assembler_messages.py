"""Messages of ptxas that refuse a candidate: it serialises wgmma or injects waits.

ptxas reports with C7510 to C7519 that it had to repair the order of asynchronous matrix
instructions.  A candidate that gets such a message where the original gets none leaves the legal
orders, or is slow, so it is refused.  The messages need no ``-v``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

REFUSING = tuple(f"C{number}" for number in range(7510, 7520))
"""Codes that refuse a candidate if the original has fewer of them."""
_MESSAGE = re.compile(
    r"^(?:\S*ptxas\S*|.*?;)\s*(?P<severity>info|warning|error|fatal)\s*:\s*"
    r"\((?P<code>C\d+)\)\s*(?P<text>.*)$",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"\bfunction '(?P<name>[^']*)'")


@dataclass(frozen=True, slots=True)
class AssemblerMessage:
    """One message with a code."""

    code: str
    severity: str
    function: str
    """Function that the message is about; empty if it names none."""
    text: str


def parse_messages(stderr: str) -> tuple[AssemblerMessage, ...]:
    """The messages with a code in the output of ptxas, in order."""
    messages: list[AssemblerMessage] = []
    for match in _MESSAGE.finditer(stderr):
        about = _FUNCTION.search(match["text"])
        name = about["name"] if about else ""
        messages.append(
            AssemblerMessage(match["code"], match["severity"], name, match["text"].strip())
        )
    return tuple(messages)


def count_repairs(stderr: str) -> Counter[str]:
    """Code -> number of its messages, of the codes that refuse a candidate."""
    return Counter(m.code for m in parse_messages(stderr) if m.code in REFUSING)


def added_repairs(original: str, candidate: str) -> Counter[str]:
    """Code -> messages that the candidate has more than the original; empty accepts it.

    Both arguments are outputs of ptxas for the same architecture and options.
    """
    return count_repairs(candidate) - count_repairs(original)
