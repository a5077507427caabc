"""An earlier run of the command that was stopped: what it proved is not tried again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall import __version__
from nostall.core.errors import BadInput
from nostall.core.measurement import Comparison
from nostall.core.validation import explain, load_json
from nostall.optimizing.diagnosis import Facts, Level
from nostall.optimizing.proof import Proof
from nostall.optimizing.result import Attempt, Outcome

RESULT_FILE = "result.json"
MAX_BYTES = 16 << 20
MAX_FILE_BYTES = 1 << 24
"""Largest file of a command whose content is compared."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class EarlierProof(_Part):
    """A proof as ``result.json`` has it."""

    ratio: float = Field(gt=0, allow_inf_nan=False)
    interval: tuple[float, float]
    null_interval: tuple[float, float]
    step_seconds: tuple[float, float]
    pairs: int
    refusal: str | None

    def proof(self) -> Proof:
        """The proof; its verdict is derived again."""
        numbers = self.ratio, *self.interval, *self.null_interval
        comparison = Comparison(*numbers, kind="measured")
        return Proof(comparison, self.refusal or "", self.pairs, self.step_seconds)


class RefusedProof(_Part):
    """A proof that has no comparison."""

    pairs: int
    refusal: str

    def proof(self) -> Proof:
        """The same."""
        return Proof(None, self.refusal, self.pairs)


class EarlierAttempt(_Part):
    """An attempt as ``result.json`` has it."""

    change: dict[str, str]
    outcome: Outcome
    reason: str
    result_class: str = Field(alias="class")
    warm_seconds: float
    proof: EarlierProof | RefusedProof | None
    kernels: tuple[dict[str, Any], ...] = ()


class EarlierWatch(_Part):
    """What tells that a program is the same."""

    roots: tuple[str, ...]
    optimizers: tuple[str, ...]
    world: int
    step_is: str
    identity: dict[str, Any]
    """Of the sources that the program imported, and of its tensors."""


class Earlier(_Part):
    """The ``result.json`` of an earlier run."""

    schema_version: Literal[1] = Field(alias="schema")
    nostall: str
    command: tuple[str, ...]
    command_files: dict[str, str]
    step: str | None
    device: str
    driver: str | None
    torch: str
    watched: EarlierWatch
    attempts: tuple[EarlierAttempt, ...]

    def attempt(self, level: Level) -> Attempt | None:
        """The earlier attempt of a level; None if it was not tried, or not to its end."""
        for found in self.attempts:
            if found.change == level.change and found.outcome != "undecided":
                proof = found.proof
                return Attempt(
                    level, found.outcome, f"{found.reason} (earlier run)", found.result_class,
                    None if proof is None else proof.proof(), found.warm_seconds,
                    found.kernels,
                )  # fmt: skip
        return None

    def check(self, facts: Facts) -> None:
        """Raises :class:`BadInput` if the program or its machine are not those of the run."""
        raw = facts.raw
        pairs = [(name, getattr(self, name), raw[name]) for name in ("device", "driver", "torch")]
        pairs += [("modules", list(self.watched.roots), raw["roots"]),
                  ("optimisers", list(self.watched.optimizers), raw["optimizers"]),
                  ("ranks", self.watched.world, raw["world"]),
                  ("a step", self.watched.step_is, raw["step_is"]),
                  ("the digest of its sources and parameters", self.watched.identity,
                   raw["identity"])]  # fmt: skip
        for name, before, here in pairs:
            if before != here:
                raise BadInput(_other(name, before, here))


def read_earlier(folder: Path, command: Sequence[str], step: str | None) -> Earlier:
    """The earlier run in ``folder``.

    Raises :class:`BadInput` if there is none that can be read, if it was of another command or
    version, or if a verdict does not follow from its numbers.
    """
    path = folder / RESULT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)  # what is cut off is no JSON
    except OSError as error:
        raise BadInput(
            f"--resume: cannot read {path}: {error.strerror}; give the --out folder of an earlier "
            "run"
        ) from error
    try:
        earlier = load_json(Earlier, data)
    except ValidationError as error:
        raise BadInput(
            f"--resume: {path} is no result of this version of nostall: {explain(error, Earlier)}; "
            "run without --resume"
        ) from error
    for name, before, here in (
        ("nostall", earlier.nostall, __version__),
        ("the command", list(earlier.command), list(command)),
        ("--step", earlier.step, step),
        ("the content of the command's files", earlier.command_files, command_files(command)),
    ):
        if before != here:
            raise BadInput(_other(name, before, here))
    for attempt in earlier.attempts:
        proof = attempt.proof
        if attempt.outcome in ("kept", "replaced") and not (
            isinstance(proof, EarlierProof) and proof.proof().faster
        ):
            raise BadInput(
                f"--resume: {path} keeps {attempt.change.get('name')!r}, which its numbers do not "
                "prove; run without --resume"
            )
    return earlier


def command_files(command: Sequence[str]) -> dict[str, str]:
    """sha256 of the files that a command names, by its words, such as the script."""
    found = {}
    for word in command:
        path = Path(word)
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            found[word] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _other(name: str, before: Any, here: Any) -> str:
    return (
        f"--resume: {name} was {str(before)[:120]} in the earlier run, and here it is "
        f"{str(here)[:120]}, so its gains need not hold; run without --resume"
    )
