"""Short labels for files and other named things that stay different and can be printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_CPP_NOISE = re.compile(r"^void |\(anonymous namespace\)::|(?<=<|,| )(?:at|c10)::(?:native::)?")
"""Parts of C++ names that do not tell kernels apart."""
_CPP_PARAMETERS = re.compile(r">\s?\([^<]*\)$")
_CONTEXT = 4
"""Characters before the first difference in a label that shows the middle of a name."""


def printable(text: str) -> str:
    """The text with escapes for bytes that are not UTF-8 and for control characters."""
    escaped = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped)


def file_labels(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many of its folders as tell it from the other files."""
    resolved = [path.absolute() for path in paths]
    labels = []
    for path in resolved:
        others = {other for other in resolved if other != path}
        count = 1
        while count < len(path.parts) and any(
            other.parts[-count:] == path.parts[-count:] for other in others
        ):
            count += 1
        labels.append(printable("/".join(path.parts[-count:])))
    return labels


def shorten_all(names: Sequence[str], length: int) -> list[str]:
    """Each name in at most ``length`` characters; different names stay different.

    The middle of a long name is cut out, because files of one job differ at the start or at the
    end.  Names that would become equal show the characters where they differ instead.
    """
    short = {name: _without_middle(name, length) for name in names}
    for label in set(short.values()):
        alike = [name for name in short if short[name] == label]
        if len(alike) > 1:
            short.update(_around_difference(alike, length))
    used: dict[str, str] = {}
    for name, label in short.items():
        number = 2
        while used.setdefault(label, name) != name:
            label = f"{short[name][: length - len(str(number)) - 1]}#{number}"
            number += 1
        short[name] = label
    return [short[name] for name in names]


def kernel_labels(names: Sequence[str], length: int) -> list[str]:
    """Names of kernels in at most ``length`` characters; different kernels stay different.

    What all C++ kernels of a library have in common is left out first. Kernels of one template show
    its arguments from the first one that differs.
    """
    short = [_CPP_NOISE.sub("", _CPP_PARAMETERS.sub(">", name)) for name in names]
    if len(set(short)) < len(set(names)):
        short = list(names)
    labels = dict(zip(short, shorten_all(short, length), strict=True))
    templates: dict[str, list[str]] = {}
    for name in labels:
        if "<" in name and len(name) > length:
            templates.setdefault(name.partition("<")[0], []).append(name)
    for template, alike in templates.items():
        if len(alike) > 1:
            head = template[: length // 4]
            shown = _around_difference(alike, length - len(head))
            new = {name: head + label for name, label in shown.items()}
            if len(set(new.values()) | (set(labels.values()) - {labels[n] for n in new})) == len(
                labels
            ):
                labels.update(new)
    return [labels[name] for name in short]


def _without_middle(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    tail = (length - 1) // 2
    return f"{name[: length - 1 - tail]}…{name[-tail:]}"


def _around_difference(names: Sequence[str], length: int) -> dict[str, str]:
    first = next(
        (i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1),
        min(map(len, names)),
    )
    start = max(0, first - _CONTEXT)
    shown = {}
    for name in names:
        rest = name[start:]
        head = "…" if start else ""
        room = length - len(head)
        shown[name] = head + (rest if len(rest) <= room else f"{rest[: room - 1]}…")
    return shown
