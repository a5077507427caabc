"""One candidate in a worker process: realise a proposal, build it, and verify its machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from nostall.core.errors import BadBinary
from nostall.ptx.assemble.builder import Build, Builder, BuildStatus
from nostall.ptx.assemble.ptxas import Resources
from nostall.ptx.schedule.state import PtxState
from nostall.sass import validate
from nostall.sass.binary.code_hash import code_sha256, rename_kernel
from nostall.sass.safety.dependent_launch import check_wait
from nostall.sass.schedule.dependent_wait import sink_wait
from nostall.search.orders.operators import GIVEN, Proposal

CandidateStatus = BuildStatus | Literal["no change", "unreadable", "early access"]
"""As :data:`BuildStatus`, and:

- ``no change``: the state equals its parent
- ``unreadable``: the cubin cannot be read, or the kernel's name cannot be restored
- ``early access``: its machine code may access memory before the wait of a dependent launch
"""


@dataclass(frozen=True)
class Candidate:
    """A state with its cubin, which has the original's kernel name."""

    state: PtxState
    status: CandidateStatus
    ptx_sha256: str = ""
    cubin: bytes = field(default=b"", repr=False)
    code_sha256: str = ""
    """Hash of what the GPU runs; equal for candidates that differ in names only."""
    resources: Resources | None = None
    detail: str = ""
    """Why there is no cubin."""
    codes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Messages of ptxas that drop the candidate, by code."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])


def build_proposal(builder: Builder, proposal: Proposal[PtxState]) -> Candidate:
    """Make the state of a proposal and build it; runs in a worker."""
    state = proposal.realize(builder.space)
    if proposal.operator != GIVEN and state == proposal.parent:
        return Candidate(state, "no change")
    return build_state(builder, state)


def build_state(builder: Builder, state: PtxState) -> Candidate:
    """Build one state; its cubin gets the original's kernel name and a hash of its code."""
    build: Build = builder.build(state)
    cubin, sha256, status, detail = (
        build.cubin,
        "",
        cast(CandidateStatus, build.status),
        build.detail,
    )
    if build.status == "built":
        try:
            cubin = finish_cubin(cubin, state, builder.spec.kernel)
            sha256 = code_sha256(cubin)
        except BadBinary as error:
            cubin, status, detail = b"", "unreadable", str(error)
        else:
            if state.dependent_launch and (problem := check_wait(cubin, builder.spec.kernel)):
                cubin, status, detail = b"", "early access", problem
    return Candidate(
        state,
        status,
        build.ptx_sha256,
        cubin,
        sha256,
        build.resources,
        detail,
        build.codes,
        build.phase_seconds,
    )


def finish_cubin(cubin: bytes, state: PtxState, kernel: str) -> bytes:
    """The cubin of a state from what ptxas made: the original's name, and a late wait."""
    if state.kernel_name:
        cubin = rename_kernel(cubin, state.kernel_name, kernel)
    return sink_wait(cubin, kernel) if state.dependent_launch else cubin


def find_hazards(builder: Builder, cubin: bytes) -> str:
    """Why the verifier of machine code rejects a cubin, or an empty text; runs in a worker."""
    return hazards(cubin, builder.spec.kernel)


def hazards(cubin: bytes, kernel: str) -> str:
    """Why the verifier of machine code rejects a kernel of a cubin, or an empty text."""
    try:
        findings = [f for f in validate(cubin).findings if f.function == kernel]
    except BadBinary as error:
        return str(error)
    return f"{len(findings)} findings, first: {findings[0]}" if findings else ""
