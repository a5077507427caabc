"""Workloads of rollouts: prompts of which each has some samples."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nostall.core.errors import BadInput

OWN = 16
"""Tokens of a request behind the shared ones."""
_TEXT = re.compile(r"(\d+)x(\d+)@(\d+)\+(\d+)(?:/(\d+))?")


@dataclass(frozen=True)
class Rollout:
    """Requests that start at once."""

    prompts: int
    samples: int
    shared: int
    """Tokens that the samples of a prompt share, those of the system prompt included."""
    new: int
    """Tokens that each request generates."""
    system: int = 0
    """Tokens that all prompts share."""

    @staticmethod
    def parse(text: str) -> Rollout:
        """The workload of a text. Raises :class:`BadInput` for one that is not a workload."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise BadInput(f"workload {text!r}; allowed is PROMPTSxSAMPLES@SHARED+NEW[/SYSTEM]")
        return Rollout(*(int(part or 0) for part in found.groups()))

    @property
    def text(self) -> str:
        """The text that is parsed."""
        system = f"/{self.system}" if self.system else ""
        return f"{self.prompts}x{self.samples}@{self.shared}+{self.new}{system}"

    @property
    def name(self) -> str:
        """The name for people."""
        system = f" ({self.system} of all)" if self.system else ""
        return f"{self.prompts} x {self.samples}, {self.shared}{system} + {self.new}"

    def tokens(self, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
        """The shared prompts, and the prompts of all requests."""
        draw = random.Random(seed)

        def words(count: int) -> list[int]:
            return [draw.randrange(3, 30_000) for _ in range(count)]

        system = words(self.system)
        shared = [system + words(self.shared - self.system) for _ in range(self.prompts)]
        return shared, [base + words(OWN) for base in shared for _ in range(self.samples)]
