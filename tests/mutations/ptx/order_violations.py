"""Order violations: an instruction stands at a place where it computes or protects otherwise.

Where the violation is no broken register dependence, the moved line crosses none of these, so that
only the rule in question can refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.mutations.ptx.lines import (
    Change,
    Line,
    Test,
    Text,
    exchange,
    move_down,
    move_up,
    replace,
)

Edit = tuple[Change, Change]
"""Changes that make the original, usually none, and the candidate from a text of the corpus."""
Finder = Callable[[Text], Iterator[Edit]]

NOTHING = Change()
_VECTOR = re.compile(r"\{([^{}]*)\}")


def _only(changes: Iterator[Change]) -> Iterator[Edit]:
    return ((NOTHING, change) for change in changes)


def _has(*parts: str) -> Test:
    return lambda line: any(f".{part}" in f".{line.opcode}." for part in parts)


def _root(*roots: str) -> Test:
    return lambda line: line.root in roots


def _weak(root: str, space: str) -> Test:
    strong = ("volatile", "relaxed", "acquire", "release", "nc", "async", "bulk")
    return lambda line: (
        line.root == root
        and space in line.opcode.split(".")
        and not any(part in strong for part in line.opcode.split("."))
    )


def _in_flight(text: Text, *opcodes: str) -> frozenset[str]:
    """Registers in the vectors of asynchronous matrix instructions."""
    found: set[str] = set()
    for line in text.lines:
        if line.opcode.startswith(opcodes):
            for vector in _VECTOR.findall(line.operands):
                found.update(part.strip() for part in vector.split(","))
    return frozenset(found)


def _accumulator_above_wait(text: Text) -> Iterator[Change]:
    registers = _in_flight(text, "wgmma.mma_async")
    is_access: Test = lambda line: bool(line.named & registers) and line.root != "wgmma"  # noqa: E731
    for wait, access in text.pairs(_has("wait_group"), is_access, 80):
        if text.lines[wait].root == "wgmma" and text.is_free(access, wait):
            yield move_up(access, wait)


def _tensor_memory_above_wait(text: Text) -> Iterator[Change]:
    registers = _in_flight(text, "tcgen05.ld")
    is_access: Test = lambda line: bool(line.named & registers) and line.root != "tcgen05"  # noqa: E731
    for wait, access in text.pairs(_has("wait::ld"), is_access, 80):
        if text.is_free(access, wait):
            yield move_up(access, wait)


def _fragment_below_fence(text: Text) -> Iterator[Change]:
    fragments: set[str] = set()
    for line in text.lines:
        if line.opcode.startswith("wgmma.mma_async"):
            vectors = _VECTOR.findall(line.operands)
            fragments.update(part.strip() for v in vectors[1:] for part in v.split(","))
    is_write: Test = lambda line: bool(line.written & fragments)  # noqa: E731
    for write, fence in text.pairs(is_write, _has("fence"), 80):
        if text.lines[fence].root == "wgmma" and text.is_free(write, fence):
            yield move_down(write, fence)


def _carry(text: Text) -> Iterator[Change]:
    sets_carry, uses_carry = _has("cc"), _root("addc", "subc", "madc")
    for i, j in text.pairs(sets_carry, uses_carry, 1):
        yield exchange(text, i, j)
    for i, j in text.pairs(sets_carry, sets_carry, 4):
        if text.lines[i].text != text.lines[j].text:
            yield exchange(text, i, j)


def _stack_pointer(text: Text) -> Iterator[Change]:
    writes: Test = lambda line: bool(line.written & {"%SP", "%SPL"})  # noqa: E731
    reads: Test = lambda line: bool(line.read & {"%SP", "%SPL"})  # noqa: E731
    for i, j in text.pairs(writes, reads):
        if text.lines[i].written & text.lines[j].read:
            yield move_up(j, i)


def _guard(text: Text) -> Iterator[Change]:
    for i, j in text.pairs(lambda line: bool(line.written), lambda line: bool(line.guard)):
        if text.lines[j].guard.lstrip("!") in text.lines[i].written:
            yield move_up(j, i)


def _read_after_write(text: Text) -> Iterator[Change]:
    for i, j in text.pairs(lambda line: bool(line.written), lambda line: bool(line.read), 12):
        if text.lines[i].written & text.lines[j].read:
            yield move_up(j, i)


def _vector_write(text: Text) -> Iterator[Change]:
    is_vector: Test = lambda line: line.operands.startswith("{") and bool(line.written)  # noqa: E731
    for i, j in text.pairs(is_vector, lambda line: bool(line.read)):
        if text.lines[i].written & text.lines[j].read:
            yield move_up(j, i)


def _write_after_read(text: Text) -> Iterator[Change]:
    for i, j in text.pairs(lambda line: bool(line.read), lambda line: bool(line.written), 400):
        if text.lines[i].read & text.lines[j].written:
            yield move_up(j, i)


def _write_after_write(text: Text) -> Iterator[Change]:
    is_write: Test = lambda line: bool(line.written)  # noqa: E731
    for i, j in text.pairs(is_write, is_write, 400):
        if text.lines[i].written & text.lines[j].written:
            yield move_down(i, j)


def _exchanged(test: Test, reach: int = 40) -> Finder:
    """Two instructions change places."""

    def find(text: Text) -> Iterator[Edit]:
        for i, j in text.pairs(test, test, reach):
            is_different = text.lines[i].text.strip() != text.lines[j].text.strip()
            if is_different and text.is_free(i, j) and text.is_free(j, i):
                yield NOTHING, exchange(text, i, j)

    return find


def _stores(text: Text) -> Iterator[Edit]:
    for space in ("global", "shared", "local"):
        yield from _exchanged(_weak("st", space))(text)


def _memory(first: str, second: str) -> Finder:
    """A load and a store of one space change their order."""

    def find(text: Text) -> Iterator[Edit]:
        for space in ("global", "shared", "local"):
            for i, j in text.pairs(_weak(first, space), _weak(second, space), 200):
                if text.is_free(j, i):
                    yield NOTHING, move_up(j, i)
                if text.is_free(i, j):
                    yield NOTHING, move_down(i, j)

    return find


def _across(test: Test, border: Test, reach: int = 400) -> Finder:
    """An instruction moves above one before it, or below one after it."""

    def find(text: Text) -> Iterator[Edit]:
        for i, j in text.pairs(border, test, reach):
            if text.is_free(j, i):
                yield NOTHING, move_up(j, i)
        for i, j in text.pairs(test, border, reach):
            if text.is_free(i, j):
                yield NOTHING, move_down(i, j)

    return find


def _across_new(test: Test, inserted: str) -> Finder:
    """The original has a new instruction beside one; in the candidate it is on its other side."""

    def find(text: Text) -> Iterator[Edit]:
        for region in text.regions:
            for at in region:
                if test(text.lines[at]):
                    line = text.lines[at].text
                    sides = (replace(at, f"{inserted}\n{line}"), replace(at, f"{line}\n{inserted}"))
                    yield sides
                    yield sides[::-1]

    return find


def _is_matrix_product(line: Line) -> bool:
    return line.root in ("mma", "wmma", "ldmatrix", "movmatrix")


def _is_exchange(line: Line) -> bool:
    return line.root in ("shfl", "vote", "match", "redux", "elect", "activemask")


def _is_weak_access(line: Line) -> bool:
    return any(_weak(root, space)(line) for root in ("ld", "st") for space in ("global", "shared"))


def _is_load(line: Line) -> bool:
    return line.root == "ld" and "global" in line.opcode.split(".")


def _call_parameter(text: Text) -> Iterator[Change]:
    for at, line in enumerate(text.lines):
        if line.text.strip().startswith("st.param"):
            for after in range(at + 1, min(at + 30, len(text.lines))):
                if re.match(r"\s*call\b", text.lines[after].text):
                    end = after
                    while ";" not in text.lines[end].text:
                        end += 1
                    yield move_down(at, end)
                    break
                if "}" in text.lines[after].text:
                    break


def _label(text: Text) -> Iterator[Change]:
    for at, line in enumerate(text.lines):
        if line.depth == 1 and text.is_target(line.label):
            below = next(k for k in range(at + 1, len(text.lines)) if text.lines[k].opcode)
            above = next((k for k in range(at - 1, 0, -1) if text.lines[k].opcode), None)
            if text.lines[below].depth == 1:
                yield move_down(at, below)
            if above is not None and text.lines[above].depth == 1:
                yield move_up(at, above)


def _other_block(text: Text) -> Iterator[Change]:
    firsts = [region[0] for region in text.regions]
    for region, following in zip(text.regions, firsts[1:], strict=False):
        if text.lines[region[-1]].depth == text.lines[following].depth == 1:
            between = text.lines[region[-1] : following]
            if any(line.root == "bra" or text.is_target(line.label) for line in between):
                yield move_down(region[-1], following)


def _pragma(text: Text) -> Iterator[Change]:
    for at, line in enumerate(text.lines):
        if "used_bytes_mask" in line.text:
            yield move_up(at + 1, at)


def _dependent_launch(place: Callable[[Text, int, int], tuple[int, str] | None]) -> Finder:
    """The candidate of a kernel without griddepcontrol gets a wait at a wrong place.

    ``place`` gets the first and the last instruction of a kernel, and returns the position of a
    line and the text before it.
    """

    def find(text: Text) -> Iterator[Edit]:
        if "griddepcontrol" in str(text):
            return
        ends = [at for at, line in enumerate(text.lines) if line.text == "}"]
        for start, line in enumerate(text.lines):
            if re.search(r"\.entry\s", line.text):
                end = next(at for at in ends if at > start)
                code = [at for at in range(start, end) if text.lines[at].opcode]
                found = place(text, code[0], code[-1])
                if found is not None:
                    at, inserted = found
                    yield NOTHING, replace(at, f"{inserted}\n{text.lines[at].text}")

    return find


def _after_access(text: Text, first: int, last: int) -> tuple[int, str] | None:
    for at in range(first, last):
        line = text.lines[at]
        is_parameter = "param" in line.opcode.split(".")
        if line.root in ("ld", "st", "cp", "atom", "red", "bar") and not is_parameter:
            after = next(k for k in range(at + 1, last + 1) if text.lines[k].opcode)
            return after, "\tgriddepcontrol.wait;"
    return None


def _last_block(text: Text, _: int, last: int) -> tuple[int, str] | None:
    borders = [at for at in range(last) if text.is_target(text.lines[at].label)]
    return (last, "\tgriddepcontrol.wait;") if borders else None


def _only_trigger(_: Text, first: int, __: int) -> tuple[int, str] | None:
    return first, "\tgriddepcontrol.launch_dependents;"


def _guarded_wait(text: Text, first: int, last: int) -> tuple[int, str] | None:
    writes = [at for at in range(first, last) if text.lines[at].root == "setp"]
    if not writes:
        return None
    predicate = sorted(text.lines[writes[0]].written)[0]
    return first, f"\t@{predicate} griddepcontrol.wait;"


def _two_waits(_: Text, first: int, __: int) -> tuple[int, str] | None:
    return first, "\tgriddepcontrol.wait;\n\tgriddepcontrol.wait;"


ORDERS: dict[str, Finder] = {
    "accumulator above its wait": lambda t: _only(_accumulator_above_wait(t)),
    "tensor memory result above its wait": lambda t: _only(_tensor_memory_above_wait(t)),
    "fragment written below its fence": lambda t: _only(_fragment_below_fence(t)),
    "carry chain crossed": lambda t: _only(_carry(t)),
    "stack pointer used above its definition": lambda t: _only(_stack_pointer(t)),
    "guard above its definition": lambda t: _only(_guard(t)),
    "operand above its definition": lambda t: _only(_read_after_write(t)),
    "part of a vector above its definition": lambda t: _only(_vector_write(t)),
    "operand overwritten early": lambda t: _only(_write_after_read(t)),
    "definitions exchanged": lambda t: _only(_write_after_write(t)),
    "stores exchanged": _stores,
    "load above a store": _memory("st", "ld"),
    "store above a load": _memory("ld", "st"),
    "volatile accesses exchanged": _exchanged(_has("volatile")),
    "atomics exchanged": _exchanged(_root("atom", "red")),
    "asynchronous copy across its commit": _across(
        _has("async.cg", "async.ca"), _has("commit_group")
    ),
    "mbarrier operations exchanged": _exchanged(_root("mbarrier")),
    "bulk copy across an mbarrier operation": _across(_has("bulk"), _root("mbarrier")),
    "load across griddepcontrol.wait": _across_new(_is_load, "\tgriddepcontrol.wait;"),
    "store across a dependent launch": _across_new(
        _weak("st", "global"), "\tgriddepcontrol.launch_dependents;"
    ),
    "inserted wait after an access": _dependent_launch(_after_access),
    "inserted wait in the last block": _dependent_launch(_last_block),
    "inserted trigger without a wait": _dependent_launch(_only_trigger),
    "inserted wait with a guard": _dependent_launch(_guarded_wait),
    "inserted wait twice": _dependent_launch(_two_waits),
    "matrix product across a warp barrier": _across_new(
        _is_matrix_product, "\tbar.warp.sync \t-1;"
    ),
    "matrix product across a barrier": _across_new(_is_matrix_product, "\tbarrier.sync \t0;"),
    "matrix load across a barrier": _across_new(_root("ldmatrix"), "\tbar.sync \t0;"),
    "shuffle across a warp barrier": _across_new(_is_exchange, "\tbar.warp.sync \t-1;"),
    "shuffles exchanged": _exchanged(_is_exchange, 8),
    "access across a barrier": _across(_is_weak_access, _root("bar", "barrier")),
    "access across a fence": _across_new(_is_weak_access, "\tfence.acq_rel.gpu;"),
    "access across an atomic": _across(_is_weak_access, _root("atom", "red")),
    "access across an unknown instruction": _across_new(_is_weak_access, "\tnew.thing.sync;"),
    "clock reads exchanged": _exchanged(lambda line: "%clock" in line.text),
    "call parameter stored after the call": lambda t: _only(_call_parameter(t)),
    "label moved": lambda t: _only(_label(t)),
    "instruction moved to the next block": lambda t: _only(_other_block(t)),
    "load moved away from its pragma": lambda t: _only(_pragma(t)),
}
"""Kind of violation -> the finder of places for it."""
