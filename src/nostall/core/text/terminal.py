"""Text from files, for terminals: no control characters, which could be escape sequences."""

from __future__ import annotations

import re

_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""Characters that a terminal obeys instead of showing: controls, line ends, changes of direction,
and the surrogates that stand for bytes of file names that are not UTF-8."""


def is_printable(text: str) -> bool:
    """Whether ``text`` holds no control characters and no line ends."""
    return _INVISIBLE.search(text) is None


def escape_controls(text: str, keep: str = "") -> str:
    """``text`` with control characters, except those in ``keep``, as escapes such as ``\\x1b``."""
    return _INVISIBLE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
