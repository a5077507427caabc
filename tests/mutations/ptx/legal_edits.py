"""Edits of PTX that compute the same by construction, so the validator must accept them all.

Registers and opcodes of two neighbouring lines decide whether they may change places.  The list of
arithmetic opcodes and the rules are this module's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.mutations.ptx.lines import Line, Text, words

Edit = Callable[[Text, random.Random], str | None]
"""Makes a legal candidate from a text; None if it has no place for the edit."""

_ARITHMETIC = words(
    "abs add and bfe bfi brev clz cvt cvta div ex2 fma lg2 lop3 mad max min mov mul neg not or "
    "popc prmt rcp rem rsqrt selp setp shf shl shr sin cos sqrt sub xor tanh dp4a sad"
)
_SPACES = ("global", "shared", "local")
_STRONG = ("volatile", "relaxed", "acquire", "release", "nc", "async", "bulk", "cv", "wt")
_CHANGING = ("%clock", "%globaltimer", "%smid", "%warpid")


def _is_arithmetic(line: Line) -> bool:
    return (
        line.root in _ARITHMETIC
        and "cc" not in line.opcode.split(".")
        and not any(name in line.text for name in _CHANGING)
    )


def _access(line: Line) -> tuple[str, str]:
    """(load or store, space) of a weak access with an explicit space; else empty texts."""
    modifiers = line.opcode.split(".")
    spaces = [s for s in _SPACES if s in modifiers]
    if line.root in ("ld", "st") and len(spaces) == 1 and not set(modifiers) & set(_STRONG):
        return line.root, spaces[0]
    return "", ""


def _may_exchange(first: Line, second: Line) -> bool:
    """Whether two neighbouring instructions compute the same in the other order."""
    if first.written & second.named or second.written & first.read:
        return False
    (kind, space), (other_kind, other_space) = _access(first), _access(second)
    if kind and other_kind:
        return space != other_space or kind == other_kind == "ld"
    return bool((kind or _is_arithmetic(first)) and (other_kind or _is_arithmetic(second)))


def exchange_neighbours(text: Text, rng: random.Random, count: int) -> str | None:
    """Exchange independent neighbours up to ``count`` times; other lines keep their places."""
    lines = list(text.lines)
    regions = [list(region) for region in text.regions]
    uses_wgmma = any(line.root in ("wgmma", "tcgen05") for line in text.lines)
    if uses_wgmma or not regions:
        # Accesses of asynchronous operands look like others; pairs without a wait between are safe.
        regions = [
            r for r in regions if not any(lines[at].root in ("wgmma", "tcgen05") for at in r)
        ]
    if not regions:
        return None
    made = 0
    for _ in range(20 * count):
        if made == count:
            break
        region = rng.choice(regions)
        at = rng.randrange(len(region) - 1)
        i, j = region[at], region[at + 1]
        between = text.lines[i + 1 : j]
        is_plain = not any("{" in b.text.split("//")[0] or ".reg" in b.text for b in between)
        has_pragma = any(".pragma" in line.text for line in text.lines[i - 1 : j])
        if is_plain and not has_pragma and _may_exchange(lines[i], lines[j]):
            lines[i], lines[j] = lines[j], lines[i]
            made += 1
    return "\n".join(line.text for line in lines) if made else None


def _few(text: Text, rng: random.Random) -> str | None:
    return exchange_neighbours(text, rng, 1 + rng.randrange(4))


def _many(text: Text, rng: random.Random) -> str | None:
    return exchange_neighbours(text, rng, 300)


def _renamed(text: Text, rng: random.Random) -> str:
    """All kernels get new names."""
    result = str(text)
    for number, name in enumerate(re.findall(r"\.entry\s+([\w$]+)", result)):
        new = rng.choice(("cutlass_kernel", "k", "renamed$kernel")) + f"_{number}"
        outside_strings = re.compile(rf'("[^"]*")|(?<![\w$%]){re.escape(name)}(?![\w$])')
        result = outside_strings.sub(lambda m, new=new: m[1] or new, result)
    return result


def _hinted(text: Text, rng: random.Random) -> str | None:
    """Weak global loads and stores get cache hints."""
    lines = [line.text for line in text.lines]
    places = [at for at, line in enumerate(text.lines) if _access(line)[1] == "global"]
    for at in rng.sample(places, min(len(places), 5)):
        root = text.lines[at].root
        hints = ["L1::evict_first", "L1::no_allocate", "L1::evict_last"]
        hints += ["L2::128B", "L1::evict_last.L2::256B"] if root == "ld" else []
        lines[at] = re.sub(
            rf"\b{root}\.global(?!\S*L[12]::)", f"{root}.global.{rng.choice(hints)}", lines[at]
        )
    return "\n".join(lines) if places else None


def _register_budget(text: Text, rng: random.Random) -> str | None:
    """A register budget is added, changed or removed."""
    result = str(text)
    if "setmaxnreg" in result:
        return None
    if ".maxnreg" in result and rng.random() < 0.5:
        return re.sub(r"\.maxnreg \d+\s*", "", result)
    budget = f".maxnreg {rng.randrange(32, 255)}"
    return re.sub(r"(\.(?:reqntid|maxntid) [\d, ]+)", rf"\1\n{budget} .minnctapersm 1", result)


def _dependent_launch(text: Text, rng: random.Random) -> str | None:
    """A wait for the kernels before is the first instruction of each kernel."""
    if "griddepcontrol" in str(text):
        return None
    lines = [line.text for line in text.lines]
    is_entry = False
    for at, line in enumerate(text.lines):
        is_entry = is_entry if line.depth else ".entry" in line.text or is_entry
        if is_entry and line.opcode:
            trigger = rng.choice(("", "\n\tgriddepcontrol.launch_dependents;"))
            lines[at] = f"\tgriddepcontrol.wait;{trigger}\n{lines[at]}"
            is_entry = False
    return "\n".join(lines)


def _spaced(text: Text, rng: random.Random) -> str:
    """Comments and white space change."""
    lines: list[str] = []
    for line in text.lines:
        code = line.text.split("//")[0] if '"' not in line.text else line.text
        if line.opcode:
            code = re.sub(r",\s*", rng.choice((",", ", ", " ,  ")), code)
        lines.append(code + rng.choice(("", " // comment; }", "\t/* { */", "\n")))
    return "\n".join(lines)


def _all(text: Text, rng: random.Random) -> str | None:
    """Several edits, one after another."""
    result = str(text)
    for edit in (_many, _hinted, _register_budget, _dependent_launch, _renamed, _spaced):
        result = edit(Text.parse(text.name, result), rng) or result
    return result


def _none(text: Text, _: random.Random) -> str:
    return str(text)


LEGAL_EDITS: dict[str, Edit] = {
    "no change": _none,
    "few neighbours exchanged": _few,
    "many neighbours exchanged": _many,
    "kernels renamed": _renamed,
    "cache hints": _hinted,
    "register budget": _register_budget,
    "dependent launch": _dependent_launch,
    "white space and comments": _spaced,
    "all of these": _all,
}
"""Kind of legal edit -> the function that makes it."""
