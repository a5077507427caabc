"""The workload of rollouts: prompts of which each has some samples."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nostall.core.errors import BadInput

OWN = 16
"""Tokens of a request behind the shared ones."""
VOCABULARY = 1000
"""Tokens of prompts are below."""
PAGE = 16
"""Tokens of a page of vLLM's cache."""
MOST_TOKENS = 1 << 17
"""Most tokens of a request."""
REPEATS = 2
"""Equal generations: equal turns of both show the noise."""
Tokens = list[int]
_TEXT = re.compile(r"(\d+)x(\d+)@(\d+)\+(\d+)(?:/(\d+))?")


class Requests(NamedTuple):
    """The requests of a generation."""

    cached: list[Tokens]
    """Prompts that are cached before the requests start."""
    prompts: list[Tokens]
    outputs: list[int]
    """Tokens that each request generates."""


@dataclass(frozen=True)
class Rollout:
    """Samples of prompts, which start at once."""

    prompts: int
    samples: int
    shared: int
    """Tokens that the samples of a prompt share, those of the system prompt included."""
    new: int
    """Tokens that each request generates."""
    system: int = 0
    """Tokens that all prompts share."""

    def __post_init__(self) -> None:
        is_inside = min(self.prompts, self.samples) >= 1 and self.system <= self.shared
        if not is_inside or self.longest > MOST_TOKENS:
            raise BadInput(
                f"workload {self.text}, with requests of {self.longest} tokens; allowed are 1 or "
                "more prompts and samples, a system prompt within the shared tokens, and requests "
                f"of up to {MOST_TOKENS} tokens"
            )

    @staticmethod
    def parse(text: str) -> Rollout:
        """The workload of a :attr:`text`. Raises :class:`BadInput` for another one."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise BadInput(f"workload {text!r}; allowed is PROMPTSxSAMPLES@SHARED+NEW[/SYSTEM]")
        return Rollout(*(int(number or 0) for number in match.groups()))

    @property
    def text(self) -> str:
        """PROMPTSxSAMPLES@SHARED+NEW[/SYSTEM], which :meth:`parse` reads."""
        system = f"/{self.system}" if self.system else ""
        return f"{self.prompts}x{self.samples}@{self.shared}+{self.new}{system}"

    @property
    def name(self) -> str:
        """The name for people."""
        system = f" ({self.system} of all)" if self.system else ""
        return f"{self.prompts} x {self.samples}, {self.shared}{system} + {self.new}"

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.shared + OWN + self.new

    def requests(self) -> Requests:
        """The requests of a generation; equal for each call."""
        words = Words(self.text)
        common = words(self.system)
        bases = [common + words(self.shared - self.system) for _ in range(self.prompts)]
        prompts = [base + words(OWN) for base in bases for _ in range(self.samples)]
        return Requests(bases, prompts, [self.new] * len(prompts))


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


class Words:
    """Random tokens, the same for the same text."""

    def __init__(self, text: str) -> None:
        self._draw = random.Random(zlib.crc32(text.encode()))

    def __call__(self, count: int) -> Tokens:
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]
