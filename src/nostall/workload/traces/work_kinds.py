"""Classification of GPU activities into kinds of work, by the names of kernels and copies.

The name is the only information that every trace has.  Rules look at the identifier of a kernel
(:func:`~nostall.workload.traces.work_kinds.parse_kernel_name`); the first rule that matches
counts.  A kernel that no rule knows counts as memory-bound, as most other kernels of a training
step are.

Identifier of a GPU kernel, without namespaces, template arguments and parameters.

A library's namespace and the types of template arguments do not tell what a kernel computes: the
identifier of its function does.  Some libraries launch all kernels through one function template,
for example ``cutlass::Kernel``; the identifier of such a kernel is that of its first template
argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nostall.workload.traces.recording import Activities, ActivityType

_WRAPPERS = frozenset({"kernel", "kernel2", "kernel_entry", "kentry", "device_kernel"})
"""Functions that launch the kernel that their first template argument names."""
_ADAPTORS = re.compile(r"enable_|gemm_?kernel_?wrapper|universal_?adapter")
"""Types around the first template argument of a wrapper."""
_PREFIXES = ("void ", "typeinfo name for ")
_SUFFIX = re.compile(r"(?:\.kd|\s*\[clone [^\]]*\])+$")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\(anonymous class\)::|_GLOBAL__N_\w*?::")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_MANGLED_START = re.compile(r"_Z(?:TS|TI)?(?:L)?(N[KV]*)?(?=\d)")
_MANGLED_LENGTH = re.compile(r"(?<!\d)(?<!L[a-z])\d+(?=[A-Za-z_])")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_MAX_DEPTH = 4
_MAX_LENGTH = 1 << 14
"""Characters of a name that are parsed; longer names are template arguments."""


@dataclass(frozen=True, slots=True)
class KernelName:
    """Parts of the name of a kernel, in lower case with underscores between words."""

    function: str
    scope: tuple[str, ...] = ()
    """Namespaces and classes around the function."""


def parse_kernel_name(name: str) -> KernelName:
    """Find the identifier of a kernel in its demangled or mangled name."""
    text = name.strip()[:_MAX_LENGTH]
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    text = _ANONYMOUS.sub("", _SUFFIX.sub("", text))
    if match := _MANGLED_START.match(text):
        return _parse_mangled(text, match)
    return _parse_demangled(text, 0)


def _parse_demangled(text: str, depth: int) -> KernelName:
    path, arguments = _split_template(text)
    *scope, function = [_snake_case(part) for part in path.split("::")] or [""]
    if function in _WRAPPERS or (depth and _ADAPTORS.match(function)):
        argument = _first_type(arguments) if depth < _MAX_DEPTH else ""
        if argument and scope[-1:] != ["gemvx"]:
            inner = _parse_demangled(argument, depth + 1)
            return KernelName(inner.function, (*scope, *inner.scope))
        if scope:
            return KernelName(scope[-1], tuple(scope[:-1]))
    return KernelName(function, tuple(scope))


def _split_template(text: str) -> tuple[str, str]:
    """(qualified name, text of its last template arguments), without parameters and return type."""
    path: list[str] = []
    depth = begin = 0
    arguments = ""
    for position, char in enumerate(text):
        if char in "<({[":
            depth += 1
            begin = position + 1 if depth == 1 and char == "<" else begin
            if depth == 1 and char == "(" and path:  # parameters
                return "".join(path), arguments
        elif char in ">)}]":
            depth = max(0, depth - 1)
            if depth == 0 and char == ">":
                arguments = text[begin:position]
        elif depth == 0:
            if char == " ":  # the text before it is a return type
                path, arguments = [], ""
            else:
                path.append(char)
    if depth and begin:  # the name is cut off
        arguments = text[begin:]
    return "".join(path), arguments


def _first_type(arguments: str) -> str:
    """The first template argument that is a type, not a number."""
    depth = 0
    begin = 0
    for position, char in enumerate((*arguments, ",")):
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth <= 0:
            argument = arguments[begin:position].strip()
            if _IDENTIFIER.match(argument) and argument not in ("true", "false"):
                return argument
            begin = position + 1
    return ""


def _parse_mangled(text: str, start: re.Match[str]) -> KernelName:
    """Parse the length-prefixed identifiers of an Itanium name (``_ZN2ck6kernelI…``)."""
    position = start.end()
    parts: list[str] = []
    while (part := _mangled_identifier(text, position)) is not None:
        identifier, position = part
        if not identifier.startswith("_GLOBAL__N"):
            parts.append(_snake_case(identifier))
        if start[1] is None:
            break
    *scope, function = parts or [_snake_case(text)]
    if function in _WRAPPERS and text[position : position + 1] == "I":
        for match in _MANGLED_LENGTH.finditer(text[position:]):
            inner = _mangled_identifier(text, position + match.start())
            if inner and not _ADAPTORS.match(_snake_case(inner[0])) and len(inner[0]) > 2:
                return KernelName(_snake_case(inner[0]), tuple(scope))
    return KernelName(function, tuple(scope))


def _mangled_identifier(text: str, position: int) -> tuple[str, int] | None:
    """(identifier, position after it) of a length and as many characters."""
    digits = re.compile(r"\d{1,4}").match(text, position)
    if digits is None:
        return None
    end = digits.end() + int(digits[0])
    return text[digits.end() : end], end


def _snake_case(identifier: str) -> str:
    return _CAMEL.sub("_", identifier).lower()


class WorkKind(IntEnum):
    """Kinds of GPU work; if several run at a time, the lowest number counts."""

    COMPUTE = 0
    """Matrix products, convolutions and attention."""
    MEMORY = 1
    """All other kernels, and memsets."""
    COMMUNICATION = 2
    """Collectives, sends and receives between GPUs."""
    INPUT = 3
    """Copies from the host to the GPU."""
    COPY = 4
    """All other copies."""


class Rule(NamedTuple):
    """Kind of all kernels whose identifier, or one of whose scopes, has a pattern."""

    what: str
    kind: WorkKind
    function: str
    scope: str = ""
    """Pattern of a namespace that is needed, too; empty: any namespace."""


# ``_`` separates words, and digits may follow a word without one.
_START, _END = r"(?:^|_)", r"(?=_|\d|$)"
_WORDS = _START + r"(?:{})" + _END
_LAST_WORD = _START + r"(?:{})(?:_?(?:kernel|impl|helper|fwd|bwd|forward|backward|v?\d+))*$"

RULES = (
    Rule("Inductor template: a product, convolution or attention with its epilogue",
         WorkKind.COMPUTE, r"^triton_tem_"),
    Rule("Inductor kernel, named after all operators whose elementwise parts it has",
         WorkKind.MEMORY, r"^triton_(?:(?:[a-z]{2,6}_)?fused|(?:poi|red|per|for|spl|mix)_)|"
         r"^triton__\d"),
    Rule("NCCL, RCCL, MSCCL and oneCCL", WorkKind.COMMUNICATION,
         r"^(?:nccl|rccl|msccl|oneccl)x?_?(?:dev_?)?kernel|^(?:nccl|rccl|msccl|oneccl)_"),
    Rule("collective of any library", WorkKind.COMMUNICATION,
         r"all_?reduce|all_?gather|reduce_?scatter(?!_add)|all_?to_?all|cross_device_reduce|"
         r"(?:one|two)_?shot_reduce|quick_?reduce"),
    Rule("userbuffers of TransformerEngine", WorkKind.COMMUNICATION, r"^k?userbuffers"),
    Rule("sends, receives and barriers between GPUs", WorkKind.COMMUNICATION,
         r"^(?:nv|roc|i)shmem|send_?recv|" + _WORDS.format(
             r"multimem|(?:put|wait)_signal|symm_mem|p2p_(?:send|recv|copy)|pushsend|pullrecv")),
    Rule("kernels of a communication library that do not communicate", WorkKind.MEMORY,
         r"get_dispatch_layout|layout|permute|sort|topk|convert|quant|cast",
         r"^(?:mscclpp|deep_ep|pplx)"),
    Rule("expert-parallel dispatch and combine, executors of mscclpp", WorkKind.COMMUNICATION,
         r"", r"^(?:mscclpp|deep_ep|pplx)"),
    Rule("reduction after a split product, of Tensile", WorkKind.MEMORY,
         r"^cijk_(?!a|.*gemm)|post_?gsu"),
    Rule("what comes before or after a product", WorkKind.MEMORY, _LAST_WORD.format(
        r"(?:split_?k_?)?reduce|reduction|combine|merge|states|preprocess|postprocess|finali[sz]e|"
        r"prepare|convert|offsets?|metadata|re?pack|unpack|ptrs|pointers|indices|arguments|sizes")),
    Rule("what comes before or after a convolution or attention", WorkKind.MEMORY,
         r"^(?!.*(?:gemm|matmul))(?:.*_)?" + _LAST_WORD[len(_START):].format(
             r"scatter|gather|cast|copy|fill|memset|mask|unpermute|permute|reorder|pad|transpose|"
             r"quant(?:ize)?|dequant(?:ize)?|gat(?:e|ing)|topk|sort(?:ing)?|count|histogram|"
             r"routing|rope|rotary|softmax|dropout|bias")),
    Rule("named after what it prepares or reduces", WorkKind.MEMORY,
         r"^(?:_*)(?:reduce|prepare|merge|combine|finali[sz]e|convert|cast|build|get|create|"
         r"compute_\w*offsets|(?:batched_)?transpose|permute|unpermute|pack|repack|quant(?:ize)?|"
         r"dequant(?:ize)?|scale|copy|fill|gather|scatter|store|write|append|reshape|concat|sort|"
         r"generate)_"),
    Rule("passes of FlashAttention and FlashInfer over its results", WorkKind.MEMORY,
         r"dot_do_o|do_o_dot|do_o_preprocess|convert_d[qkv]|clear_d[qkv]|"
         r"(?:pre|post)process(?:_?convert)?|fwd_combine|merge_states|state_?merge"),
    Rule("tensors rearranged for a convolution", WorkKind.MEMORY,
         r"im\d?d?_?\d?_?d?_?2?_?col|col_?2?_?im|n[cd]?hwc?_to_n|nchw2|nhwc2|to_n[cd]?hwc|"
         r"winograd_\w*?(?:data|filter|output|delta|tiles?_kernel)|tensor_transform|"
         r"_offsets_kernel"),
    Rule("bookkeeping of mixtures of experts", WorkKind.MEMORY,
         r"moe\w*(?:sort|align|topk|gat(?:e|ing)_|routing|sum|permute|histogram|quant|finali)|"
         r"matmul_scatter|dequant_mm"),
    Rule("attention", WorkKind.COMPUTE,
         r"fmha|flash_?(?:attn|attention|fwd|bwd|decod|mla|infer)|flash_?\d_|cute_?dsl_fa|"
         r"(?:prefill|decode)\w*kv_?cache|sage_?(?:fwd|attn)|mla_?(?:fwd|dec|prefill|pfl|attn)|"
         r"(?:fwd|decode|splitkv)_mla|" + _WORDS.format(
             r"\w*attention|attn|mha|sdpa|delta_rule\w*|fa[234]|"
             r"chunk_(?:fwd|bwd|scan|state)\w*")
         + r"|^_*(?:fwd|bwd)_(?:grouped_)?kernel(?:_fuse|_stage1|_split_?k|(?:_d[qkv])+)?$"),
    Rule("matrix product", WorkKind.COMPUTE,
         r"(?<!fb)gemm|gemv|mat_?mul|mul_mat|mat_?vec|^nvjet|tensorop|xmma|wmma|wgmma|mfma|^cijk_a|"
         r"wv_?split_?k|flatmm|ck_moe_stage|fused_moe|moe_fused|moe_stage\d|" + _WORDS.format(
             r"(?:int\d|fp\d|w\da\d+|scaled|grouped|[bqsdhi]|add|badd|k?sp)?_?b?mm|mma|matmuls?|"
             r"addmv|marlin|machete|spmm|syrk|trmm|symm|linear_fwd|linear_bwd|[hsi]\d*884\w*|"
             r"s?1688\w*|s?16816\w*")),
    Rule("convolution", WorkKind.COMPUTE,
         r"convol|[a-z\d]cudnn|fprop|dgrad|wgrad|winograd|\w*conv\dx\d|" + _WORDS.format(
             r"(?:de|asm|gen|naive|direct|dw|depthwise|implicit)?conv(?:\dd|nd)?|\ddconv")),
    Rule("CUTLASS kernel of any other name", WorkKind.COMPUTE, r"^cutlass"),
)  # fmt: skip
"""Rules in the order in which they are tried."""

_COMPILED = tuple(
    (re.compile(rule.function), re.compile(rule.scope) if rule.scope else None) for rule in RULES
)
_LIBRARY_PREFIX = re.compile(r"^(?:fbgemm(?:_gpu)?|flashinfer|cutlass_dsl|cudnn_generated)_")
"""Names of libraries at the start of an identifier that do not tell the kind of a kernel."""
_HOST_TO_DEVICE = re.compile(
    r"(?:H|Host)(?:[Tt]o|2)D|(?:\b|_)h(?:ost)?_?(?:to|2)_?d|\bM2D|"
    r"(?:Host|Pageable|Pinned)\s*->\s*Device"
)


def work_kinds(activities: Activities, names: Sequence[str]) -> np.ndarray:
    """The :class:`WorkKind` of each activity, int8, shape [activities]."""
    by_name = np.array([kernel_work_kind(name) for name in names], dtype=np.int8)
    to_device = np.array([is_host_to_device(name) for name in names], dtype=bool)
    kinds: np.ndarray = by_name[activities.name]
    copies = activities.type == ActivityType.MEMCPY
    kinds[copies] = np.where(to_device[activities.name[copies]], WorkKind.INPUT, WorkKind.COPY)
    kinds[activities.type == ActivityType.MEMSET] = WorkKind.MEMORY
    return kinds


@lru_cache(maxsize=1 << 16)
def kernel_work_kind(name: str) -> WorkKind:
    """The :class:`WorkKind` of a kernel; copies are classified by their activity type instead."""
    rule = matching_rule(name)
    return WorkKind.MEMORY if rule is None else rule.kind


def is_host_to_device(name: str) -> bool:
    """Whether a copy is from the host to a GPU, by the name that CUDA, HIP or XPU gives it."""
    return _HOST_TO_DEVICE.search(name) is not None


def matching_rule(name: str) -> Rule | None:
    """The rule that names a kernel; None if no rule does, and it counts as memory-bound."""
    return _match_rule(parse_kernel_name(name))


def _match_rule(name: KernelName) -> Rule | None:
    function = _LIBRARY_PREFIX.sub("", name.function)
    for rule, (pattern, scope) in zip(RULES, _COMPILED, strict=True):
        if pattern.search(function) and (
            scope is None or any(scope.search(part) for part in name.scope)
        ):
            return rule
    return None
