"""Content violations: changed, lost or added statements, and changed declarations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from tests.mutations.ptx.lines import Change, Line, Text, exchange, replace
from tests.mutations.ptx.order_violations import NOTHING, Edit, Finder


def _per_instruction(change: Callable[[Text, int, Line], Iterator[str | None]]) -> Finder:
    """Each instruction outside inner braces becomes the texts of ``change``; None removes it."""

    def find(text: Text) -> Iterator[Edit]:
        for at, line in enumerate(text.lines):
            if line.opcode and line.depth >= 1:
                for new in change(text, at, line):
                    if new != line.text:
                        yield NOTHING, Change(removed=(at,)) if new is None else replace(at, new)

    return find


def _substituted(pattern: str, new: str | Callable[[re.Match[str]], str], only: str = "") -> Finder:
    """A match of ``pattern`` in an instruction becomes ``new``; ``only``: pattern of its opcode."""

    def change(_: Text, __: int, line: Line) -> Iterator[str]:
        if re.match(only, line.opcode):
            for match in re.finditer(pattern, line.text):
                changed = new(match) if callable(new) else match.expand(new)
                yield line.text[: match.start()] + changed + line.text[match.end() :]

    return _per_instruction(change)


def _other_register(match: re.Match[str]) -> str:
    return match[1] + str(int(match[2]) - 1 if int(match[2]) > 1 else int(match[2]) + 1)


def _other_destination(_: Text, __: int, line: Line) -> Iterator[str]:
    for register in sorted(line.written):
        match = re.fullmatch(r"(%[a-z]+)(\d+)", register)
        if match:
            other = _other_register(match)
            yield re.sub(rf"{re.escape(register)}\b", other, line.text, count=1)


def _duplicated(_: Text, __: int, line: Line) -> Iterator[str]:
    if not line.label:
        yield f"{line.text}\n{line.text}"


def _other_target(text: Text, _: int, line: Line) -> Iterator[str]:
    labels = text.target_labels if line.root == "bra" else ()
    for label in labels:
        if label in line.operands.split():
            others = [
                x for x in labels if x != label and x.rpartition("_")[0] == label.rpartition("_")[0]
            ]
            yield from (line.text.replace(label, other) for other in others[:3])


def _per_line(pattern: str, new: str | None, where: Callable[[Line], bool]) -> Finder:
    """A matching line becomes ``new``, or is removed if that is None."""

    def find(text: Text) -> Iterator[Edit]:
        for at, line in enumerate(text.lines):
            if where(line) and re.search(pattern, line.text):
                changed = None if new is None else re.sub(pattern, new, line.text, count=1)
                if changed != line.text:
                    yield (
                        NOTHING,
                        Change(removed=(at,)) if changed is None else replace(at, changed),
                    )

    return find


def _anywhere(_: Line) -> bool:
    return True


def _in_function(line: Line) -> bool:
    return line.depth >= 1


def _second_function(text: Text) -> Iterator[Edit]:
    """A constant changes, or an instruction is lost, in a function that is not the first one."""
    starts = [
        at
        for at, line in enumerate(text.lines)
        if line.depth == 0 and re.search(r"\.(entry|func)\b", line.text)
    ]
    for at, line in enumerate(text.lines):
        if len(starts) > 1 and at > starts[1] and line.depth >= 1 and line.written:
            yield NOTHING, Change(removed=(at,))
            changed = re.sub(r", (\d+);", lambda m: f", {int(m[1]) + 1};", line.text)
            if changed != line.text:
                yield NOTHING, replace(at, changed)


def _exchanged_lines(pattern: str) -> Finder:
    """Two matching lines that follow each other change places."""

    def find(text: Text) -> Iterator[Edit]:
        found = [at for at, line in enumerate(text.lines) if re.search(pattern, line.text)]
        for i, j in pairwise(found):
            if j == i + 1 and text.lines[i].text.rstrip(",") != text.lines[j].text.rstrip(","):
                ends = [
                    line.text[len(line.text.rstrip(",")) :]
                    for line in (text.lines[i], text.lines[j])
                ]
                first = text.lines[j].text.rstrip(",") + ends[0]
                second = text.lines[i].text.rstrip(",") + ends[1]
                yield NOTHING, Change(replaced=((i, first), (j, second)))

    return find


def _call_arguments(text: Text) -> Iterator[Edit]:
    for at, line in enumerate(text.lines):
        changed = re.sub(r"\bparam0\b(.*)\bparam1\b", r"param1\1param0", line.text)
        if changed != line.text and "call" not in line.text.split("//")[0][:6].strip() + "call":
            continue
        if changed != line.text:
            yield NOTHING, replace(at, changed)


def _kernel_name(text: Text) -> str:
    match = re.search(r"\.entry\s+([\w$]+)", str(text))
    return match[1] if match else ""


def _name_in_use(text: Text) -> Iterator[Edit]:
    """A kernel gets a name that the module uses already."""
    name = _kernel_name(text)
    used = sorted({line.label for line in text.lines if line.label} | {"global_smem", "vprintf"})
    for at, line in enumerate(text.lines):
        if re.search(r"\.entry\s", line.text):
            for other in used:
                if re.search(rf"(?<![\w$]){re.escape(other)}(?![\w$])", str(text)):
                    yield NOTHING, replace(at, line.text.replace(name, other))


def _dangling_name(text: Text) -> Iterator[Edit]:
    """The original names the kernel in a table; the renamed candidate keeps the old name there."""
    name = _kernel_name(text)
    for at, line in enumerate(text.lines):
        if re.search(r"\.entry\s", line.text):
            renamed = re.sub(rf"\b{name}\b", "renamed_kernel", line.text)
            end = len(text.lines) - 1
            table = (
                f"{text.lines[end].text}\n.global .align 8 .u64 table_of_kernels[1] = {{{name}}};"
            )
            if f"{name}(" in line.text:
                yield replace(end, table), Change(replaced=((at, renamed), (end, table)))


def _register_budget(text: Text) -> Iterator[Edit]:
    """A register budget changes in a module with setmaxnreg."""
    has_dynamic = any(line.root == "setmaxnreg" for line in text.lines)
    has_budget = any(line.text.startswith(".maxnreg") for line in text.lines)  # the last one holds
    for at, line in enumerate(text.lines):
        if has_dynamic and not has_budget and re.match(r"\.(reqntid|maxntid)\b", line.text):
            yield NOTHING, replace(at, f"{line.text}\n.maxnreg 96")
        if has_dynamic and re.match(r"\.maxnreg\b", line.text):
            yield NOTHING, Change(removed=(at,))


def _damaged(text: Text) -> Iterator[Edit]:
    """A statement without its semicolon, or a function without its end."""
    for at, line in enumerate(text.lines):
        if line.opcode and line.depth == 1:
            yield NOTHING, replace(at, line.text.replace(";", "", 1))
        if line.text == "}":
            yield NOTHING, Change(removed=(at,))


def _function_order(text: Text) -> Iterator[Edit]:
    """Two function prototypes or module variables change places."""
    found = [
        at
        for at, line in enumerate(text.lines)
        if line.depth == 0 and re.match(r"\.(global|shared|const)\b.*;", line.text)
    ]
    for i, j in pairwise(found):
        yield NOTHING, exchange(text, i, j)


_FLOAT = r"(add|sub|mul)\.f32"
CONTENTS: dict[str, Finder] = {
    "instruction lost": _per_instruction(lambda _, __, ___: iter((None,))),
    "instruction duplicated": _per_instruction(_duplicated),
    "constant changed": _substituted(r"(?<=[ -])(\d+);", lambda m: f"{int(m[1]) + 1};"),
    "float constant changed": _substituted(r"\b0f([0-9A-F]{7})0\b", r"0f\g<1>1"),
    "address offset changed": _substituted(r"\+(\d+)\]", lambda m: f"+{int(m[1]) + 4}]"),
    "source register changed": _substituted(r"(?<=, )(%[a-z]+)(\d+)\b", _other_register),
    "destination register changed": _per_instruction(_other_destination),
    "rounding modifier added": _substituted(rf"\b{_FLOAT}\b", r"\1.rn.f32"),
    "rounding modifier removed": _substituted(r"\.rn\.", "."),
    "rounding modifier changed": _substituted(r"\.rn\.", ".rz."),
    "approximation changed": _substituted(r"\.(approx|full)\.", ".rn."),
    "flush to zero added": _substituted(r"(?<=\bmul)\.f32", ".ftz.f32"),
    "type changed": _substituted(r"\.s32\b", ".u32", only=r"setp|shr|div|rem|min|max|cvt|mul|mad"),
    "comparison changed": _substituted(r"\bsetp\.(lt|gt|ne|eq)\b", "setp.le"),
    "guard negated": _substituted(r"@(%p\d+)", r"@!\1"),
    "guard lost": _substituted(r"@!?%p\d+\s+", ""),
    "branch target changed": _per_instruction(_other_target),
    "state space lost": _substituted(r"\b(ld|st)\.(global|shared)\b", r"\1"),
    "load made non-coherent": _substituted(r"\bld\.global\b(?!\.nc)", "ld.global.nc"),
    "volatile lost": _substituted(r"\.volatile\b", ""),
    "cache operator changed": _substituted(r"\.(cg|ca|cs|wt|cv)\b", ".lu"),
    "cache operator added": _substituted(r"\b(ld\.global)\b(?=\.[buf])", r"\1.cg"),
    "hint on an access of any space": _substituted(
        r"\b(ld|st)\.(?=[buf]\d)", r"\1.L2::evict_first."
    ),
    "waits for fewer groups": _substituted(r"(wait_group\S*\s+)(\d+)", r"\g<1>9"),
    "mask of an exchange changed": _substituted(r", -1;", ", 65535;", only="shfl|vote|redux|match"),
    "scope of an atomic changed": _substituted(
        r"\.(gpu|sys)\b", ".cta", only="atom|red|ld|st|fence"
    ),
    "atomic operation changed": _substituted(r"\.add\b", ".max", only="atom|red"),
    "matrix shape changed": _substituted(r"\.row\.col\b", ".col.row"),
    "register declaration lost": _per_line(r"\.reg\s", None, _in_function),
    "register declaration shorter": _per_line(r"<(\d+)>;", r"<2>;", _in_function),
    "local variable lost": _per_line(r"\.local\s", None, _in_function),
    "size of a variable changed": _per_line(
        r"(\.(?:local|shared|global).*\[)(\d+)\]", r"\g<1>64]", _anywhere
    ),
    "alignment changed": _per_line(r"\.align (\d+)", ".align 32", _anywhere),
    "shared memory lost": _per_line(r"\.shared\s.*;", None, lambda line: not line.opcode),
    "changed in a second function": _second_function,
    "kernel parameters exchanged": _exchanged_lines(r"^\s*\.param\s[^\[\]]*,?$"),
    "parameter type changed": _per_line(
        r"\.param \.u64", ".param .u32", lambda line: line.depth == 0
    ),
    "call arguments exchanged": _call_arguments,
    "stored call parameters exchanged": _exchanged_lines(r"^\s*st\.param\b"),
    "block size changed": _per_line(r"\.(reqntid|maxntid) (\d+)", r".\1 256", _anywhere),
    "target changed": _per_line(r"\.target sm_(\d+)a?", ".target sm_75", _anywhere),
    "linkage changed": _per_line(r"\.visible \.entry", ".entry", _anywhere),
    "module variables exchanged": _function_order,
    "kernel named as something else": _name_in_use,
    "old kernel name left": _dangling_name,
    "register budget beside setmaxnreg": _register_budget,
    "damaged text": _damaged,
}
"""Kind of violation -> the finder of places for it."""
