"""Identifier of a GPU kernel, without namespaces, template arguments and parameters.

A library's namespace and the types of template arguments do not tell what a kernel computes: the
identifier of its function does.  Some libraries launch all kernels through one function template,
for example ``cutlass::Kernel``; the identifier of such a kernel is that of its first template
argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
