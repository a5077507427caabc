"""Build of a candidate: render its PTX, prove it, assemble it, and look at the messages.

Messages of ptxas about lost asynchronous execution of matrix instructions.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

from nostall.core.errors import BadInput
from nostall.ptx.assemble.command import Command
from nostall.ptx.assemble.ptxas import TIMEOUT_SECONDS, PtxasRun, Resources, run_ptxas
from nostall.ptx.assemble.versions import Assembler

_CODE = re.compile(r"\(?\b(C75\d\d)\b\)?")


def loss_codes(messages: Iterable[str]) -> Counter[str]:
    """Number of messages by code C75nn: serialized wgmma, injected waits and the like."""
    return Counter(code for message in messages for code in _CODE.findall(message))


def new_codes(messages: Iterable[str], original: Iterable[str]) -> Counter[str]:
    """Messages by code beyond those of the original."""
    return loss_codes(messages) - loss_codes(original)


BuildStatus = Literal["built", "unproved", "error", "timeout", "serialized"]
"""Outcome of a build:

- ``built``: there is a cubin
- ``unproved``: the PTX validator does not accept the candidate
- ``error``: ptxas rejects the candidate
- ``timeout``: ptxas does not end in time
- ``serialized``: ptxas reports a loss of asynchronous execution that the original does not have
"""


class AssemblerState(Protocol):
    """The fields of a state that change the command line."""

    @property
    def options(self) -> tuple[str, ...]: ...

    @property
    def assembler(self) -> str: ...

    @property
    def kernel_name(self) -> str: ...


class RendersPtx(Protocol):
    """The part of a space of PTX programs that a build needs."""

    def text(self, state: Any) -> str: ...


CheckPtx = Callable[[str], str]
"""Returns why a candidate's text is not proved equal to the original, or an empty text."""


@dataclass(frozen=True)
class BuildSpec:
    """What is built: one kernel's PTX, the compiler's command and the assemblers."""

    ptx: str = field(repr=False)
    kernel: str
    command: Command
    assemblers: tuple[Assembler, ...]
    """The first one is the compiler's own; states name the others by version."""
    make_space: Callable[[str, str], RendersPtx]
    """Makes the space from the PTX and the kernel's name.  A function that can be pickled."""
    make_check: Callable[[str], CheckPtx]
    """Makes the check from the original's PTX.  A function that can be pickled."""
    timeout: float = TIMEOUT_SECONDS

    def assembler(self, version: str) -> Assembler:
        """The assembler that a state names; the compiler's own for an empty name."""
        if not version:
            return self.assemblers[0]
        for assembler in self.assemblers:
            if assembler.version == version:
                return assembler
        known = ", ".join(a.version for a in self.assemblers)
        raise BadInput(f"a state names ptxas {version!r}, but this search has {known}")

    def arguments(self, state: AssemblerState) -> tuple[str, ...]:
        """All options of ptxas for a state, without the files."""
        return self.command.arguments(state.options)


@dataclass(frozen=True)
class Build:
    """Result of building one state."""

    status: BuildStatus
    ptx_sha256: str
    cubin: bytes = field(default=b"", repr=False)
    """As ptxas wrote it; empty unless ``status`` is ``built``."""
    resources: Resources | None = None
    messages: tuple[str, ...] = ()
    detail: str = ""
    """Why there is no cubin."""
    codes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Messages that the original does not have, by code."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of ``render``, ``prove`` and ``assemble``; not part of the result's identity."""


class Builder:
    """Builds states of one kernel, one after the other."""

    def __init__(self, spec: BuildSpec) -> None:
        self.spec = spec
        self.space = spec.make_space(spec.ptx, spec.kernel)
        self.check = spec.make_check(spec.ptx)
        self._folder = tempfile.TemporaryDirectory(prefix="nostall-", dir=_memory_folder())
        self._original_runs: dict[str, PtxasRun] = {}

    def build(self, state: Any) -> Build:
        """Build a state of the space.  The outcome, except its times, depends on it alone."""
        phases = {}
        start = perf_counter()
        ptx = self.space.text(state)
        phases["render"] = (rendered := perf_counter()) - start
        sha256 = hashlib.sha256(ptx.encode()).hexdigest()
        objection = self.check(ptx) if ptx != self.spec.ptx else ""
        phases["prove"] = perf_counter() - rendered
        if objection:
            return Build("unproved", sha256, detail=objection, phase_seconds=phases)
        run = self._assemble(ptx, state)
        phases["assemble"] = run.seconds
        if run.status != "assembled":
            return Build(
                run.status,
                sha256,
                messages=run.messages,
                detail=run.detail,
                phase_seconds=phases,
            )
        codes = new_codes(run.messages, self._original_messages(state.assembler))
        return Build(
            "serialized" if codes else "built",
            sha256,
            b"" if codes else run.cubin,
            run.resources.get(state.kernel_name or self.spec.kernel),
            run.messages,
            _describe_codes(codes, run.messages),
            dict(codes),
            phases,
        )

    def close(self) -> None:
        """Delete the files of the runs."""
        self._folder.cleanup()

    def _assemble(self, ptx: str, state: AssemblerState) -> PtxasRun:
        assembler = self.spec.assembler(state.assembler)
        folder = Path(self._folder.name)
        return run_ptxas(assembler, ptx, self.spec.arguments(state), folder, self.spec.timeout)

    def _original_messages(self, version: str) -> tuple[str, ...]:
        """Messages of the unchanged PTX with the compiler's options and this assembler."""
        if version not in self._original_runs:
            assembler = self.spec.assembler(version)
            self._original_runs[version] = run_ptxas(
                assembler,
                self.spec.ptx,
                self.spec.command.arguments(),
                Path(self._folder.name),
                self.spec.timeout,
            )
        return self._original_runs[version].messages


def _describe_codes(codes: Counter[str], messages: tuple[str, ...]) -> str:
    if not codes:
        return ""
    first = next(m for m in messages if any(code in m for code in codes))
    counts = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items()))
    return f"ptxas reports {counts}, which the original does not have: {first[:200]}"


def _memory_folder() -> str | None:
    """A folder in memory for the files of a run, or None for the usual one."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() else None
