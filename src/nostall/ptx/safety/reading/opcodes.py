"""Opcode rules of the validator: destinations and effects (PTX ISA 9.4, chapter 9).

The first row of :data:`ROWS` that fits an opcode decides.  An opcode without a row is unknown: it
reads and writes all registers that it names, and everything else.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from nostall.ptx.safety.reading import pseudo_registers as state


class Effect(Enum):
    """What an instruction does beside writing its destinations."""

    PURE = auto()
    LOAD = auto()
    """Weak load: may be exchanged with other weak loads."""
    STORE = auto()
    ORDERED = auto()
    """Member of the one sequence of effects; nothing that touches memory crosses it."""
    DEPENDENCY = auto()
    """Ordered; other grids may have written constant memory before it (griddepcontrol)."""
    EXCHANGE = auto()
    """Exchange between the threads of a warp without ``.aligned``."""
    ALIGNED = auto()
    """Operation of a whole warp, with ``.aligned``: crosses no barrier that makes it converge."""
    ALIGNED_LOAD = auto()
    ALIGNED_STORE = auto()
    ALIGNED_ORDERED = auto()
    ASYNCHRONOUS = auto()
    """Aligned and ordered: begins or ends the use of asynchronous operands."""
    BARRIER = auto()
    ALIGNED_BARRIER = auto()
    """Barrier of a block that needs a converged warp: operations of a whole warp may cross it."""
    TERMINATOR = auto()
    UNKNOWN = auto()
    """Everything, calls included."""
    COMPOUND = auto()
    """A block in braces; see :mod:`.compound`."""


_MEMORY = (*state.WRITABLE, state.EFFECTS)
_ALL = tuple(range(state.COUNT))
FOOTPRINTS: dict[Effect, tuple[tuple[int, ...], tuple[int, ...]]] = {
    Effect.PURE: ((), ()),
    Effect.LOAD: ((), ()),
    Effect.STORE: ((), ()),
    Effect.ORDERED: (_MEMORY, _MEMORY),
    Effect.DEPENDENCY: ((*_MEMORY, state.READ_ONLY), (*_MEMORY, state.READ_ONLY)),
    Effect.EXCHANGE: ((state.EXCHANGES,), (state.EXCHANGES,)),
    Effect.ALIGNED: ((state.BARRIERS,), ()),
    Effect.ALIGNED_LOAD: ((state.BARRIERS,), ()),
    Effect.ALIGNED_STORE: ((state.BARRIERS,), ()),
    Effect.ALIGNED_ORDERED: ((*_MEMORY, state.BARRIERS), _MEMORY),
    Effect.ASYNCHRONOUS: (
        (*_MEMORY, state.BARRIERS, state.ASYNCHRONOUS),
        (*_MEMORY, state.ASYNCHRONOUS),
    ),
    Effect.BARRIER: (
        (*_MEMORY, state.EXCHANGES, state.BARRIERS),
        (*_MEMORY, state.EXCHANGES, state.BARRIERS),
    ),
    Effect.ALIGNED_BARRIER: (
        (*_MEMORY, state.EXCHANGES, state.BARRIERS),
        (*_MEMORY, state.EXCHANGES),
    ),
    Effect.TERMINATOR: ((), ()),
    Effect.UNKNOWN: (_ALL, _ALL),
    Effect.COMPOUND: ((), ()),
}
"""Effect -> pseudo registers that it reads and writes, without the space of a load or store."""
LOADS = frozenset({Effect.LOAD, Effect.ALIGNED_LOAD})
STORES = frozenset({Effect.STORE, Effect.ALIGNED_STORE})


class Rule(NamedTuple):
    """What the operands of an opcode are, and what it does."""

    writes: int
    """Number of leading operands that are destinations."""
    effect: Effect
    in_flight: str = ""
    """Operands in use after the instruction: "vectors", "values" (all but addresses) or none."""
    updates: bool = False
    """Whether destinations are read as well."""
    may_omit: bool = False
    """Whether the destination can be missing: then the first operand is an address."""
    signals: bool = False
    """Whether other threads may wait for it.

    ``shfl.sync`` and its like wait for the threads of their mask, so one that itself waits for this
    instruction, on another path, never comes to an exchange that moves above it.
    """


UNKNOWN = Rule(0, Effect.UNKNOWN)
_SIGNAL = Rule(0, Effect.ORDERED, signals=True)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Row(NamedTuple):
    """A rule and the opcodes it is for."""

    roots: frozenset[str]
    rule: Rule
    requires: frozenset[str] = frozenset()
    """Modifiers that must be there."""
    allows: frozenset[str] | None = None
    """All other modifiers that may be there, besides types and sizes; None: any."""
    forbids: frozenset[str] = frozenset()


_TYPE = re.compile(r"(?:[busf]\d+|bf\d+|tf32|e\dm\d|pred)(?:x\d+)?|v[248]|m\d+n\d+(?:k\d+)?|x[124]")
_WEAK = _words(
    "weak global shared shared::cta shared::cluster local param param::entry param::func const nc "
    "ca cg cs lu wb unified L1::evict_normal L1::evict_unchanged L1::evict_first "
    "L1::evict_last L1::no_allocate L2::evict_normal L2::evict_first L2::evict_last "
    "L2::cache_hint L2::64B L2::128B L2::256B"
)
"""Modifiers of a weak load or store."""
_STRONG = _words("volatile relaxed acquire release mmio cv wt cta cluster gpu sys")
_NOT_PURE = _words("sync async aligned volatile relaxed acquire release mmio")
_ALIGNED = _words("sync aligned")
_MATRIX = _ALIGNED | _words("trans shared shared::cta b6x16_p32 b4x16_p64")

_PURE = _words(
    "abs add addc and bfe bfi bfind bmsk brev clz cnot copysign cos createpolicy cvt cvta div dp2a "
    "dp4a ex2 fma fns getctarank isspacep istypep lg2 lop3 mad mad24 madc mapa max min mov mul "
    "mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct sqrt sub subc "
    "suq szext tanh testp txq xor vadd vsub vabsdiff vmin vmax vshl vshr vmad vset "
    "vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4"
)

ROWS: tuple[Row, ...] = (
    Row(_PURE, Rule(1, Effect.PURE), forbids=_NOT_PURE),
    Row(_words("bra brx ret exit"), Rule(0, Effect.TERMINATOR)),
    # Weak accesses, then strong and asynchronous ones.
    Row(_words("ld ldu"), Rule(1, Effect.LOAD), allows=_WEAK),
    Row(_words("ld"), Rule(1, Effect.ORDERED), allows=_WEAK | _STRONG),
    Row(_words("st"), Rule(0, Effect.STORE), allows=_WEAK),
    Row(_words("st"), _SIGNAL, allows=_WEAK | _STRONG),
    Row(_words("st"), _SIGNAL, requires=_words("async")),
    Row(_words("st"), _SIGNAL, requires=_words("bulk")),
    Row(_words("tex tld4 suld"), Rule(1, Effect.LOAD)),
    Row(_words("prefetch prefetchu"), Rule(0, Effect.LOAD)),
    Row(_words("atom"), Rule(1, Effect.ORDERED, signals=True)),
    Row(_words("red sust sured"), _SIGNAL),
    Row(_words("multimem"), Rule(1, Effect.ORDERED), requires=_words("ld_reduce")),
    Row(_words("multimem"), _SIGNAL, requires=_words("st")),
    Row(_words("multimem"), _SIGNAL, requires=_words("red")),
    Row(_words("cp"), _SIGNAL, requires=_words("bulk")),
    Row(_words("cp"), _SIGNAL, requires=_words("mbarrier")),
    Row(
        _words("cp fence membar nanosleep discard applypriority pmevent trap "
               "brkpt tensormap stackrestore"),
        Rule(0, Effect.ORDERED),
    ),
    Row(_words("alloca stacksave"), Rule(1, Effect.ORDERED)),
    Row(_words("mbarrier"), Rule(1, Effect.PURE), requires=_words("pending_count")),
    Row(_words("mbarrier"), Rule(1, Effect.ORDERED, may_omit=True, signals=True)),
    Row(_words("clusterlaunchcontrol"), Rule(1, Effect.PURE), requires=_words("query_cancel")),
    Row(
        _words("clusterlaunchcontrol"), Rule(1, Effect.ORDERED, may_omit=True, signals=True)
    ),
    Row(_words("griddepcontrol"), Rule(0, Effect.DEPENDENCY, signals=True)),
    # Operations of a warp.
    Row(_words("shfl vote match redux elect activemask"), Rule(1, Effect.EXCHANGE)),
    Row(_words("mma movmatrix"), Rule(1, Effect.ALIGNED), requires=_ALIGNED),
    Row(_words("wmma"), Rule(1, Effect.ALIGNED), requires=_ALIGNED | {"mma"}),
    Row(_words("wmma"), Rule(1, Effect.ALIGNED_LOAD), requires=_ALIGNED | {"load"}),
    Row(_words("wmma"), Rule(0, Effect.ALIGNED_STORE), requires=_ALIGNED | {"store"}),
    Row(_words("ldmatrix"), Rule(1, Effect.ALIGNED_LOAD), requires=_ALIGNED, allows=_MATRIX),
    Row(_words("stmatrix"), Rule(0, Effect.ALIGNED_STORE), requires=_ALIGNED, allows=_MATRIX),
    Row(_words("setmaxnreg"), Rule(0, Effect.ALIGNED_ORDERED)),
    Row(
        _words("bar"),
        Rule(1, Effect.ALIGNED_BARRIER),
        requires=_words("red"),
        forbids=_words("warp"),
    ),
    Row(_words("bar"), Rule(0, Effect.ALIGNED_BARRIER), forbids=_words("warp")),
    Row(
        _words("barrier"),
        Rule(1, Effect.ALIGNED_BARRIER),
        requires=_words("red aligned"),
        forbids=_words("cluster"),
    ),
    Row(
        _words("barrier"),
        Rule(0, Effect.ALIGNED_BARRIER),
        requires=_words("aligned"),
        forbids=_words("cluster"),
    ),
    Row(_words("bar barrier"), Rule(1, Effect.BARRIER), requires=_words("red")),
    Row(_words("bar barrier"), Rule(0, Effect.BARRIER)),
    # Asynchronous matrix operations.
    # Of sparse products the metadata, a single register, counts as in use, too.
    Row(
        _words("wgmma"),
        Rule(1, Effect.ALIGNED_ORDERED, in_flight="values", updates=True),
        requires=_words("mma_async sp"),
    ),
    Row(
        _words("wgmma"),
        Rule(1, Effect.ALIGNED_ORDERED, in_flight="vectors", updates=True),
        requires=_words("mma_async"),
    ),
    *(
        Row(_words("wgmma"), Rule(0, Effect.ASYNCHRONOUS), requires=_words(kind))
        for kind in ("fence", "commit_group", "wait_group")
    ),
    Row(
        _words("tcgen05"),
        Rule(1, Effect.ALIGNED_ORDERED, in_flight="values"),
        requires=_words("ld"),
        forbids=_words("red"),
    ),
    Row(
        _words("tcgen05"),
        Rule(0, Effect.ALIGNED_ORDERED, in_flight="values"),
        requires=_words("st"),
    ),
    *(
        Row(_words("tcgen05"), Rule(0, Effect.ASYNCHRONOUS), requires=_words(kind))
        for kind in (
            "wait::ld", "wait::st", "fence::before_thread_sync", "fence::after_thread_sync",
        )
    ),
    Row(
        _words("tcgen05"),
        Rule(0, Effect.ASYNCHRONOUS, signals=True),
        requires=_words("commit"),
    ),
    *(
        Row(_words("tcgen05"), Rule(0, Effect.ALIGNED_ORDERED), requires=_words(kind))
        for kind in ("alloc", "dealloc", "relinquish_alloc_permit", "cp", "mma", "shift")
    ),
)  # fmt: skip


@lru_cache(maxsize=4096)
def find_rule(opcode: str) -> Rule:
    """The rule for an opcode with its modifiers, such as ``ld.global.v4.b32``."""
    root, *rest = opcode.split(".")
    modifiers = frozenset(rest)
    for row in ROWS:
        if root not in row.roots or not row.requires <= modifiers or row.forbids & modifiers:
            continue
        if row.allows is not None and not all(
            m in row.allows or _TYPE.fullmatch(m) for m in modifiers
        ):
            continue
        return row.rule
    return UNKNOWN


def touched_memory(opcode: str, is_constant_parameter: bool) -> tuple[int, ...]:
    """Pseudo registers of the memory that a load or store with this opcode may touch.

    ``is_constant_parameter``: whether the address is a parameter of a kernel, which nothing writes.
    """
    root, *rest = opcode.split(".")
    modifiers = frozenset(rest)
    if root in ("tex", "tld4", "suld"):
        return (state.GLOBAL,)
    if {"const", "nc"} & modifiers:
        return (state.READ_ONLY,)
    if {"param", "param::entry", "param::func"} & modifiers:
        return () if is_constant_parameter else (state.PARAMETERS,)
    if "global" in modifiers or root == "ldu":
        return (state.GLOBAL,) if "global" in modifiers else state.WRITABLE
    if {"shared", "shared::cta", "shared::cluster"} & modifiers:
        return (state.SHARED,)
    return (state.LOCAL,) if "local" in modifiers else state.WRITABLE
