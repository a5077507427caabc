"""A process with one engine of vLLM, which answers commands until it has a problem."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from nostall.core.errors import MissingPart
from nostall.core.process import ChildProcess, ProcessEnded

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
OWN_VARIABLES = "NOSTALL_VLLM"
"""Prefix of the plug-in's variables: an engine gets only those that it names."""
ANSWER_S = 120.0
"""Longest time of an answer; an engine that takes longer is ended."""
LOGGED = 2500
"""Last characters of an engine's log that a problem shows."""


class Engine:
    """A process with one engine."""

    def __init__(
        self, name: str, own: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """``own``: a folder for the engine; ``arguments``: a module and its options.

        The process gets ``--folder`` too, for the model's configuration, and its channel.
        """
        self.name, self.problem = name, ""
        self.record: dict[str, Any] = {"rounds": []}
        own.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(OWN_VARIABLES)}
        every = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(own / "cache"), **environment}
        self._log = own / "log"
        self._process = ChildProcess.run(
            [sys.executable, "-m", *arguments, "--folder", str(own / "model")],
            {**inherited, **every},
            self._log,
        )

    def connect(self, until: float) -> None:
        """Wait until the engine has started, at most to this time of the monotonic clock."""
        self.record |= self._answer(max(1.0, until - monotonic())) or {}

    def ask(self, command: dict[str, Any], seconds: float = ANSWER_S) -> Any:
        """The answer to a command; None, and a problem noted, if there is none in time."""
        if self.problem:
            return None
        try:
            self._process.send(command, seconds)
        except (ProcessEnded, TimeoutError) as error:
            self.fail(str(error))
            return None
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        try:
            return self._process.receive(seconds)
        except ProcessEnded:
            self.fail(f"the process ended with exit code {self._process.reap(5.0)}")
        except TimeoutError:
            self.fail(f"no answer within {seconds:.3g} s")
        return None

    def fail(self, reason: str) -> None:
        """End the engine; nothing more is asked of it."""
        log = self._log.read_text(errors="replace")[-LOGGED:]
        self.problem = f"{reason}; {log.strip()}" if log.strip() else reason
        self.end()

    def end(self) -> None:
        """End the process, if it runs."""
        self._process.reap()


def check_vllm() -> None:
    """Raise :class:`MissingPart` without a GPU, or without a vLLM that nostall serves on it."""
    if find_spec("vllm") is None:
        raise MissingPart(
            "vLLM is not installed; rollouts are measured inside of it: pip install vllm==0.25.1"
        )
    from nostall.attach.vllm.plugin import RUN_ON_GPU, installed_version

    found = installed_version()
    if found not in RUN_ON_GPU:
        raise MissingPart(
            f"vLLM {found} is installed, with which nostall leaves attention to vLLM; allowed is "
            f"{', '.join(RUN_ON_GPU)}: pip install vllm==0.25.1"
        )
    import torch

    if not torch.cuda.is_available():
        raise MissingPart("no GPU is present; rollouts are measured on a machine with a GPU")
