"""Launch files of recorded launches: read what the processes noted, and write one file for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from nostall.core.errors import BadLaunch
from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.core.launch import LaunchSpec
from nostall.core.text.plurals import pluralize
from nostall.core.text.terminal import escape_controls
from nostall.core.validation import parse_json

_TOP_LEVEL = ("grid", "block", "cluster", "shared", "num_warps", "num_stages", "flops", "trips")
_ALWAYS = ("name", "dtype", "role")
"""Keys of an argument that are written even if they have their default."""


def launch_toml(
    launch: LaunchSpec,
    header: Sequence[str] = (),
    comments: Mapping[str, str] = MappingProxyType({}),
    keys: Sequence[str] = (),
) -> str:
    """The text of a launch file.

    ``header``: lines of comment at the top.  ``comments``: a comment behind a top-level key, or
    before the argument of this name.  ``keys``: top-level keys to write even if they have their
    default.
    """
    lines = [_comment(line) for line in header]
    fields = LaunchSpec.model_fields
    for key in _TOP_LEVEL:
        value = getattr(launch, key)
        default = fields[key].get_default(call_default_factory=True)
        if value != default or key in keys:
            note = f"  {_comment(comments[key])}" if key in comments else ""
            lines.append(f"{key} = {_value(value)}{note}")
    for argument in launch.args:
        lines.append("")
        if argument.name in comments:
            lines += [_comment(line) for line in comments[argument.name].splitlines()]
        lines += ["[[args]]", *_table(argument)]
    for shape in launch.shapes:
        lines += ["", "[[shapes]]", *_table(shape)]
    return "\n".join(lines) + "\n"


def _table(model: BaseModel) -> Iterator[str]:
    """The keys of a table that differ from their defaults, and those that say what it is."""
    for key, info in type(model).model_fields.items():
        value = getattr(model, key)
        default = info.get_default(call_default_factory=True)
        if value is not None and (info.is_required() or key in _ALWAYS or value != default):
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(key: Any) -> str:
    text = str(key)
    is_bare = text.isascii() and text.replace("_", "").replace("-", "").isalnum()
    return text if is_bare else json.dumps(text)


def _comment(text: str) -> str:
    return f"# {escape_controls(text)}".rstrip()


_LAUNCH_KEYS = ("grid", "block", "shared", "num_warps", "num_stages")
_INTEGER_NOTE = (
    "The bound is above the largest value at the first launch; 1 if that could not be read."
)
_ROLE_NOTE = "A launch does not say which buffers are read or written: in, out, inout or scratch."


@dataclass(frozen=True)
class Configuration:
    """One configuration of the list of an autotuner."""

    constants: Mapping[str, Any]
    """Values of ``tl.constexpr`` arguments."""
    options: Mapping[str, Any]
    """Compile options of Triton: ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg``."""
    grid: tuple[int, ...]
    """Blocks of the recorded launch with these constants."""
    chosen: bool = False
    """Whether the program launched the kernel with it."""

    def __str__(self) -> str:
        parts = {**self.constants, **self.options}
        return ", ".join(f"{name}={value}" for name, value in parts.items())

    @property
    def compile_options(self) -> dict[str, Any]:
        """The options that a launch file does not have."""
        return {k: v for k, v in self.options.items() if k in ("num_ctas", "maxnreg")}


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch of a program, and how often it ran."""

    kernel: str
    file: str | None
    """Python file of a Triton kernel."""
    count: int
    fields: Mapping[str, Any] = field(repr=False)
    """Keys of a launch file."""
    undescribed: tuple[str, ...]
    """Arguments that a launch file cannot describe, with their types."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Compile options of Triton that a launch file does not have."""
    configurations: tuple[Configuration, ...] = ()
    """What the program's autotuner chose from; empty without one."""

    @property
    def own(self) -> Configuration | None:
        """The configuration that the program launched; None if no autotuner chose it."""
        return next((c for c in self.configurations if c.chosen), None)

    def launch_with(self, configuration: Configuration) -> LaunchSpec:
        """The launch in another configuration; raises :class:`BadLaunch` as :attr:`launch`."""
        constants = configuration.constants
        args = [
            {**a, "constant": constants[a["name"]]} if a.get("name") in constants else a
            for a in self.fields["args"]
        ]
        known = {k: v for k, v in configuration.options.items() if k in _LAUNCH_KEYS}
        changed = {**self.fields, **known, "grid": list(configuration.grid), "args": args}
        return replace(self, fields=changed).launch

    @property
    def launch(self) -> LaunchSpec:
        """The launch; raises :class:`BadLaunch` if it cannot be described."""
        if self.undescribed:
            raise BadLaunch(f"{self.kernel}: {', '.join(self.undescribed)}")
        return LaunchSpec.parse(dict(self.fields), self.kernel)

    @property
    def target(self) -> str | None:
        """The kernel as an argument of ``nostall tune``, if its file is known."""
        return f"{self.file}:{self.kernel}" if self.file is not None else None


def read_launches(path: Path) -> list[RecordedLaunch]:
    """The launches in a file of lines of JSON, the most frequent first; broken lines are left out.

    A process that was killed noted no counts: each of its launches counts once.
    """
    lines = list(_lines(path))
    counts: dict[tuple[int, int], int] = {}
    for line in lines:
        for number, count in dict(line.get("counts") or {}).items():
            counts[line.get("process", 0), int(number)] = int(count)
    merged: dict[str, RecordedLaunch] = {}
    for line in lines:
        if "kernel" not in line:
            continue
        recorded = _recorded(line, counts.get((line.get("process", 0), line.get("number", 0)), 1))
        parts = [recorded.kernel, recorded.file, recorded.fields, recorded.options]
        key = json.dumps(parts, sort_keys=True)
        before = merged.get(key)
        total = recorded.count + (before.count if before else 0)
        merged[key] = replace(before or recorded, count=total)
    return sorted(merged.values(), key=lambda launch: (-launch.count, launch.kernel))


def write_launches(
    launches: Sequence[RecordedLaunch], folder: Path, command: str
) -> list[tuple[RecordedLaunch, Path | None, str]]:
    """Write a launch file for each launch; returns its path, or None and the reason.

    Existing files are kept: a number makes the name new.
    """
    create_folder(folder)
    written: list[tuple[RecordedLaunch, Path | None, str]] = []
    for recorded in launches:
        try:
            launch = recorded.launch
        except BadLaunch as error:
            written.append((recorded, None, str(error)))
            continue
        header = [
            f"Launch of the kernel {recorded.kernel}, seen in "
            f"{pluralize(recorded.count, 'launch')} by `nostall record -- {command}`.",
            "All keys: docs/reference/launch-spec.md",
        ]
        comments = {
            argument.name: _INTEGER_NOTE if getattr(argument, "bound", None) else _ROLE_NOTE
            for argument in launch.args
            if hasattr(argument, "role")
        }
        path = _free_name(folder, recorded.kernel)
        write_text_atomically(path, launch_toml(launch, header, comments, ("grid",)))
        written.append((recorded, path, ""))
    return written


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            values = parse_json(line)
        except ValueError:
            continue  # cut off by a kill
        if isinstance(values, dict):
            yield values


def _recorded(line: Mapping[str, Any], count: int) -> RecordedLaunch:
    args = [a for a in line.get("args") or () if isinstance(a, dict)]
    undescribed = tuple(
        f"{a.get('name')} is {a['undescribed']}" for a in args if "undescribed" in a
    )
    fields = {key: line[key] for key in _LAUNCH_KEYS if line.get(key) is not None}
    file = line.get("file")
    return RecordedLaunch(
        escape_controls(str(line["kernel"])),
        str(file) if file else None,
        count,
        {**fields, "args": args},
        undescribed,
        dict(line.get("options") or {}),
        tuple(map(_configuration, line.get("configurations") or ())),
    )


def _configuration(values: Mapping[str, Any]) -> Configuration:
    return Configuration(
        values["constants"], values["options"], tuple(values["grid"]), bool(values["chosen"])
    )


def _free_name(folder: Path, kernel: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in kernel)[:60] or "kernel"
    number = 1
    while True:
        path = folder / (f"{name}.toml" if number == 1 else f"{name}-{number}.toml")
        if not path.exists():
            return path
        number += 1
