"""Workloads of rollouts: prompts of which each has some samples, and requests of a trace."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from nostall.core.errors import BadInput
from nostall.serving.traces import HASH_BLOCK, Request, load_requests

OWN = 16
"""Tokens of a request behind the shared ones."""
VOCABULARY = 1000
"""Tokens of prompts are below."""
PAGE = 16
"""Tokens of a page of vLLM's cache."""
MOST_TOKENS = 1 << 17
"""Most tokens of a request."""
LONGEST = 16_384
"""Most tokens of a request of a trace: longer prompts are cut."""
MOST_OUTPUT = 1024
"""Most generated tokens of a request of a trace."""
REPEATS = 2
"""Generations with the same history: equal turns of both show the noise."""
HISTORIES = 4
"""Histories of a workload that grows."""
Tokens = list[int]
_ROLLOUT = re.compile(r"(\d+)x(\d+)@(\d+)\+(\d+|[\w.-]+\.csv)(?:/(\d+))?(?:~(\d+))?")
_TRACE = re.compile(r"(\d+)@([\w.-]+\.jsonl)/(\d+)\+(\d+)")
GRAMMAR = "PROMPTSxSAMPLES@SHARED+NEW[/SYSTEM][~GROWTH], or REQUESTS@TRACE.jsonl/PARTS+NEW"


class Requests(NamedTuple):
    """The requests of a generation."""

    cached: list[Tokens]
    """Prompts that are cached before the requests start."""
    prompts: list[Tokens]
    outputs: list[int]
    """Tokens that each request generates."""


class Workload(Protocol):
    """Requests that start at once, in one or more generations."""

    @property
    def text(self) -> str:
        """The text that :func:`parse_workload` reads."""
        ...

    @property
    def name(self) -> str:
        """The name for people."""
        ...

    @property
    def new(self) -> int | None:
        """Tokens that each request generates; None if they differ."""
        ...

    @property
    def shares(self) -> bool:
        """Whether most of a prompt is in several requests."""
        ...

    @property
    def histories(self) -> int:
        """Numbers of shared tokens that follow each other, :data:`REPEATS` generations each."""
        ...

    def requests(self, generation: int = 0) -> Requests:
        """The requests of a generation; equal for each call."""
        ...


@dataclass(frozen=True)
class Rollout:
    """Samples of prompts."""

    prompts: int
    samples: int
    shared: int
    """Tokens that the samples of a prompt share, those of the system prompt included."""
    new: int | None
    """Tokens that each request generates; None: as the requests of a trace."""
    system: int = 0
    """Tokens that all prompts share."""
    growth: int = 0
    """Tokens by which the shared part grows from history to history."""
    trace: Path | None = None
    """Trace whose first requests give the numbers of generated tokens."""

    def __post_init__(self) -> None:
        most = (self.new or MOST_OUTPUT) + OWN
        most += self.shared + self.growth * (self.histories - 1)
        if min(self.prompts, self.samples) < 1 or self.system > self.shared or most > MOST_TOKENS:
            raise BadInput(
                f"workload {self.text}, with requests of {most} tokens; allowed are 1 or more "
                "prompts and samples, a system prompt within the shared tokens, and requests of "
                f"up to {MOST_TOKENS} tokens"
            )

    @property
    def shares(self) -> bool:
        return self.samples > 1

    @property
    def histories(self) -> int:
        return HISTORIES if self.growth else 1

    @property
    def text(self) -> str:
        new = self.trace.name if self.trace else self.new
        system = f"/{self.system}" if self.system else ""
        growth = f"~{self.growth}" if self.growth else ""
        return f"{self.prompts}x{self.samples}@{self.shared}+{new}{system}{growth}"

    @property
    def name(self) -> str:
        system = f" ({self.system} of all)" if self.system else ""
        growth = f" to {self.shared + self.growth * (self.histories - 1)}" if self.growth else ""
        new = self.new or "lengths of a trace"
        return f"{self.prompts} x {self.samples}, {self.shared}{growth}{system} + {new}"

    def requests(self, generation: int = 0) -> Requests:
        words = _Words(self.text)
        common = words(self.system)
        most = self.shared + self.growth * (self.histories - 1)
        shared = self.shared + self.growth * (generation // REPEATS % self.histories)
        bases = [(common + words(most - self.system))[:shared] for _ in range(self.prompts)]
        prompts = [base + words(OWN) for base in bases for _ in range(self.samples)]
        return Requests(bases, prompts, self._outputs(len(prompts)))

    def _outputs(self, count: int) -> list[int]:
        if self.trace is None:
            return [self.new or 1] * count
        found = _first_requests(self.trace, count)
        return [min(request.output, MOST_OUTPUT) for request in found]


@dataclass(frozen=True)
class TraceRequests:
    """Requests that follow each other in a trace with prefix hashes, all of the same output."""

    count: int
    trace: Path
    parts: int
    """A block of 512 prompt tokens of the trace has so many times fewer, so that they fit."""
    new: int

    @property
    def shares(self) -> bool:
        return False

    @property
    def histories(self) -> int:
        return 1

    @property
    def text(self) -> str:
        return f"{self.count}@{self.trace.name}/{self.parts}+{self.new}"

    @property
    def name(self) -> str:
        return f"{self.count} neighbours of {self.trace.stem}, 1/{self.parts} + {self.new}"

    def requests(self, generation: int = 0) -> Requests:
        found = _first_requests(self.trace, self.count)
        if not all(request.hashes for request in found):
            raise BadInput(f"trace {self.trace} has requests without hashes; give one with them")
        words = _Words(self.text)
        most = LONGEST - OWN - self.new
        cached = []
        for request in found:
            blocks = [
                token
                for block in request.hashes
                for token in _Words(f"{self.text} {block}")(HASH_BLOCK // self.parts)
            ]
            cached.append(blocks[: min(most, max(1, request.prompt // self.parts))])
        prompts = [prompt + words(OWN) for prompt in cached]
        return Requests(cached, prompts, [self.new] * self.count)


def parse_workload(text: str, traces: Path | None = None) -> Workload:
    """The workload of a text; ``traces``: folder of the traces that it names.

    Raises :class:`BadInput` for a text that is not a workload. Traces are read by ``requests``.
    """
    rollout, requests = _ROLLOUT.fullmatch(text), _TRACE.fullmatch(text)
    if rollout is None and requests is None:
        raise BadInput(f"workload {text!r}; allowed is {GRAMMAR}")
    folder = traces or Path()
    if requests is not None:
        count, name, parts, each = requests.groups()
        return TraceRequests(int(count), folder / name, max(1, int(parts)), int(each))
    assert rollout is not None
    prompts, samples, shared, new, system, growth = rollout.groups()
    trace = None if new.isdigit() else folder / new
    sizes = (int(prompts), int(samples), int(shared), int(new) if trace is None else None)
    return Rollout(*sizes, int(system or 0), int(growth or 0), trace)


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens in the pages that a prefix cache keeps of these prompts."""
    seen: set[tuple[int, Sequence[int]]] = set()
    total = 0
    for prompt in prompts:
        before = 0
        for start in range(0, len(prompt), PAGE):
            page = (before, tuple(prompt[start : start + PAGE]))
            before = hash(page)
            if page not in seen:
                seen.add(page)
                total += len(page[1])
    return total


def _first_requests(trace: Path, count: int) -> list[Request]:
    """The first requests of a trace; raises :class:`BadInput` if it has fewer."""
    if not trace.is_file():
        raise BadInput(f"trace {trace} is missing; give the folder that has it with --traces")
    found = load_requests(trace, count)
    if len(found) < count:
        raise BadInput(f"trace {trace} has {len(found)} requests; {count} are needed")
    return found


class _Words:
    """Random tokens, the same for the same text."""

    def __init__(self, text: str) -> None:
        self._draw = random.Random(zlib.crc32(text.encode()))

    def __call__(self, count: int) -> Tokens:
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]
