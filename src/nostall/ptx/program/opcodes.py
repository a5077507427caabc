"""Rule table of PTX opcodes: which operands an instruction writes, and its effects.

A row holds for its opcode with all qualifiers that no longer row names: ``bar.warp.sync`` has a row
of its own, ``bar.sync`` has the row ``bar``. Source: PTX ISA 9.0, section 9.7.

Effects of loads and stores, by their qualifiers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from nostall.ptx.program.resources import (
    ALIGNED,
    ALIGNED_BARRIER,
    BARRIER,
    DEVICE_FENCE,
    EVERYTHING,
    EXCHANGE,
    FENCE,
    MEMORY,
    PURE,
    Effect,
    Resource,
    reading,
    writing,
)

Qualifiers = tuple[str, ...]
"""The parts of an opcode after its first one, such as ("global", "v4", "b32")."""

_SPACE_RESOURCES = MappingProxyType(
    {
        "global": frozenset((Resource.GLOBAL,)),
        "shared": frozenset((Resource.SHARED,)),
        "local": frozenset((Resource.LOCAL,)),
        "param": frozenset((Resource.PARAM,)),
        "const": frozenset((Resource.STABLE,)),
    }
)
"""State space -> what its accesses touch; an address without a space may mean all of MEMORY."""


def touched_memory(qualifiers: Qualifiers) -> frozenset[Resource]:
    """The memory that an access with these qualifiers may touch."""
    if "nc" in qualifiers:
        return frozenset((Resource.STABLE,))
    for qualifier in qualifiers:
        space = qualifier.partition("::")[0]
        if space in _SPACE_RESOURCES:
            return _SPACE_RESOURCES[space]
    return MEMORY


_ACCESS_QUALIFIER = re.compile(
    r"weak|volatile|relaxed|acquire|release|mmio|cta|cluster|gpu|sys|nc|sync|aligned|load|store"
    r"|tensormap|(?:global|shared|local|param|const)(?:::\w+)?|L[12](?:::\w+)?|c[agsv]|lu|w[bt]|v[248]"
    r"|[busf]\d+(?:x\d+)?|bf16(?:x2)?|tf32|unified|m\d+n\d+(?:k\d+)?|x[124]|trans|row|col|[abcd]|b\dx\d+_p\d+"
)
"""Qualifiers of loads and stores that this table knows; another one makes them a fence."""


def _unknown_order(qualifiers: Qualifiers) -> Effect:
    known = all(_ACCESS_QUALIFIER.fullmatch(qualifier) for qualifier in qualifiers)
    return PURE if known else DEVICE_FENCE


def load(qualifiers: Qualifiers) -> Effect:
    """The effect of a load."""
    return Effect(reads=touched_memory(qualifiers)) | _unknown_order(qualifiers)


def store(qualifiers: Qualifiers) -> Effect:
    """The effect of a store."""
    return Effect(writes=touched_memory(qualifiers)) | _unknown_order(qualifiers)


def aligned_load(qualifiers: Qualifiers) -> Effect:
    """The effect of a load that all threads of a warp execute together."""
    return load(qualifiers) | ALIGNED


def aligned_store(qualifiers: Qualifiers) -> Effect:
    """The effect of a store that all threads of a warp execute together."""
    return store(qualifiers) | ALIGNED


@dataclass(frozen=True, slots=True)
class Rule:
    """What one family of opcodes does."""

    writes: tuple[int, ...] = (0,)
    """Positions of the operands that are written. Registers of an address are only read."""
    updates: tuple[int, ...] = ()
    """Positions of the operands that are read and written."""
    effect: Effect | Callable[[Qualifiers], Effect] = PURE
    ends_block: bool = False
    """Whether control may go elsewhere: a branch, a return or an exit."""
    touches_all: bool = False
    """Whether all registers that the instruction names count as read and written."""


UNKNOWN = Rule((), effect=EVERYTHING, touches_all=True)
"""The rule of an opcode that the table lacks: a fence that touches each register it names."""

_QUALIFIER_EFFECTS: MappingProxyType[str, Effect] = MappingProxyType(
    {
        "cc": writing(Resource.CARRY),
        "volatile": DEVICE_FENCE,
        "relaxed": DEVICE_FENCE,
        "acquire": DEVICE_FENCE,
        "release": DEVICE_FENCE,
        "acq_rel": DEVICE_FENCE,
        "sc": DEVICE_FENCE,
        "mmio": DEVICE_FENCE,
        "cv": DEVICE_FENCE,
        "wt": DEVICE_FENCE,
    }
)
"""Qualifiers that add an effect to any opcode."""


def _barrier(qualifiers: Qualifiers) -> Effect:
    return ALIGNED_BARRIER if "aligned" in qualifiers else BARRIER


_TEXTURE_LOAD = reading(Resource.GLOBAL)
_WGMMA_WAIT = FENCE | ALIGNED | writing(Resource.WGMMA)
_TCGEN05 = DEVICE_FENCE | ALIGNED
_TCGEN05_WAIT = _TCGEN05 | writing(Resource.TCGEN05)

_ROWS: tuple[tuple[str, Rule], ...] = (
    # Arithmetic, comparison, selection, logic, conversion.
    ("abs add and bfe bfi bfind bmsk brev clz cnot copysign cos cvt cvta div dp2a dp4a", Rule()),
    ("ex2 fma fns getctarank isspacep istypep lg2 lop3 mad mad24 mapa max min mov mul", Rule()),
    ("mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct", Rule()),
    ("sqrt sub szext tanh testp xor createpolicy", Rule()),
    ("clusterlaunchcontrol.query_cancel mbarrier.pending_count", Rule()),
    ("addc subc madc", Rule(effect=reading(Resource.CARRY))),
    ("vabsdiff vadd vmad vmax vmin vset vshl vshr vsub", Rule()),
    ("vabsdiff2 vadd2 vavrg2 vmax2 vmin2 vset2 vsub2", Rule()),
    ("vabsdiff4 vadd4 vavrg4 vmax4 vmin4 vset4 vsub4", Rule()),
    # Memory.
    ("ld ldu", Rule(effect=load)),
    ("st", Rule((), effect=store)),
    ("prefetch prefetchu", Rule((), effect=load)),
    ("tex tld4 txq suq", Rule(effect=_TEXTURE_LOAD)),
    ("suld", Rule(effect=FENCE)),
    ("sust", Rule((), effect=FENCE)),
    ("atom", Rule(effect=DEVICE_FENCE)),
    ("red sured", Rule((), effect=DEVICE_FENCE)),
    ("multimem.ld_reduce", Rule(effect=DEVICE_FENCE)),
    ("multimem.st multimem.red multimem.cp", Rule((), effect=DEVICE_FENCE)),
    ("discard applypriority st.async st.bulk red.async", Rule((), effect=DEVICE_FENCE)),
    ("alloca stacksave", Rule(effect=FENCE)),
    ("stackrestore", Rule((), effect=FENCE)),
    # Asynchronous copies.
    ("cp.async.ca cp.async.cg cp.async.commit_group", Rule((), effect=FENCE)),
    ("cp.async.wait_group cp.async.wait_all", Rule((), effect=FENCE)),
    ("cp.async.bulk cp.async.mbarrier cp.reduce.async", Rule((), effect=DEVICE_FENCE)),
    ("tensormap.replace tensormap.cp_fenceproxy", Rule((), effect=DEVICE_FENCE)),
    # Fences and barriers.
    ("membar fence", Rule((), effect=DEVICE_FENCE)),
    ("bar.sync bar.arrive bar.cta.sync bar.cta.arrive", Rule((), effect=ALIGNED_BARRIER)),
    ("barrier.sync barrier.arrive barrier.cta.sync barrier.cta.arrive", Rule((), effect=_barrier)),
    ("bar.red bar.cta.red", Rule(effect=ALIGNED_BARRIER)),
    ("barrier.red barrier.cta.red", Rule(effect=_barrier)),
    ("barrier.cluster", Rule((), effect=BARRIER | DEVICE_FENCE)),
    ("bar.warp.sync", Rule((), effect=BARRIER)),
    ("mbarrier.init mbarrier.inval", Rule((), effect=DEVICE_FENCE)),
    ("mbarrier.expect_tx mbarrier.complete_tx", Rule((), effect=DEVICE_FENCE)),
    ("mbarrier.arrive mbarrier.arrive_drop", Rule(effect=DEVICE_FENCE)),
    ("mbarrier.test_wait mbarrier.try_wait", Rule(effect=DEVICE_FENCE)),
    ("griddepcontrol clusterlaunchcontrol.try_cancel nanosleep", Rule((), effect=EVERYTHING)),
    # Exchange between the threads of a warp.
    ("shfl vote match redux elect activemask", Rule(effect=EXCHANGE)),
    ("setmaxnreg", Rule((), effect=BARRIER)),
    # Matrices.
    ("mma movmatrix wmma.mma", Rule(effect=ALIGNED)),
    ("ldmatrix wmma.load", Rule(effect=aligned_load)),
    ("stmatrix wmma.store", Rule((), effect=aligned_store)),
    ("wgmma.mma_async", Rule((), (0,), FENCE | ALIGNED)),
    ("wgmma.fence wgmma.commit_group wgmma.wait_group", Rule((), effect=_WGMMA_WAIT)),
    ("tcgen05.alloc tcgen05.dealloc tcgen05.relinquish_alloc_permit", Rule((), effect=_TCGEN05)),
    ("tcgen05.st tcgen05.cp tcgen05.shift tcgen05.mma", Rule((), effect=_TCGEN05)),
    ("tcgen05.ld", Rule((0, 1), effect=_TCGEN05)),
    ("tcgen05.wait tcgen05.fence tcgen05.commit", Rule((), effect=_TCGEN05_WAIT)),
    # Control flow.
    ("bra brx ret exit", Rule((), effect=EVERYTHING, ends_block=True)),
    ("call", Rule((), effect=EVERYTHING, touches_all=True)),
    ("trap brkpt pmevent", Rule((), effect=EVERYTHING)),
)
"""Opcodes, separated by spaces, and their rule."""


def _rows() -> Iterator[tuple[str, Rule]]:
    for opcodes, rule in _ROWS:
        for opcode in opcodes.split():
            yield opcode, rule


RULES: MappingProxyType[str, Rule] = MappingProxyType(dict(_rows()))
_LONGEST = max(opcode.count(".") + 1 for opcode in RULES)


def find_rule(opcode: str) -> Rule | None:
    """The rule of the longest row that ``opcode`` begins with; None if the table has none."""
    # tcgen05.wait::ld: the part after :: is no part of the row.
    parts = [part.partition("::")[0] for part in opcode.split(".")[:_LONGEST]]
    for count in range(len(parts), 0, -1):
        rule = RULES.get(".".join(parts[:count]))
        if rule is not None:
            return rule
    return None


def effect_of(rule: Rule, qualifiers: Qualifiers) -> Effect:
    """The effect of an instruction with this rule and these qualifiers."""
    effect = rule.effect if isinstance(rule.effect, Effect) else rule.effect(qualifiers)
    for qualifier in qualifiers:
        effect |= _QUALIFIER_EFFECTS.get(qualifier, PURE)
    return effect
