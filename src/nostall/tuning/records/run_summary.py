"""Summaries of run directories: what ran, when, with which gain, and in which state it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nostall.core.errors import BadRun
from nostall.core.files.folder_lock import is_locked
from nostall.core.run import Run

UNREADABLE = "unreadable"
STOPPED = "stopped"
"""State of a run whose process ended without a result, as after SIGKILL."""


@dataclass(frozen=True)
class RunSummary:
    """One run directory.  Fields that the run does not have are None."""

    path: Path
    state: str
    """running, stopped, done, interrupted, failed, or unreadable."""
    created: str | None = None
    """ISO 8601."""
    command: str | None = None
    subject: str | None = None
    """Kernel of ``tune``, or target of ``fuse``."""
    original_sha256: str | None = None
    """sha256 of the cubin that ``tune`` started with."""
    objective: str | None = None
    strategy: str | None = None
    seed: int | None = None
    kind: str | None = None
    """Whether times are modelled or measured."""
    before: float | None = None
    """Time of the original in seconds; of greedy fusion for ``fuse``."""
    after: float | None = None
    """Time of the result in seconds."""
    evaluations: int | None = None
    seconds: float | None = None
    """Time of the search."""
    recorded_ratio: float | None = None
    """The recorded gain of ``tune``."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of a measured gain."""
    baseline: str = "the original"
    """What the gain is over."""
    improved: bool | None = None
    """Whether ``tune`` found anything better than the original."""
    remark: str = ""
    """Why a run is unreadable."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    result: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def ratio(self) -> float | None:
        """The recorded gain, otherwise time before / time after."""
        if self.recorded_ratio is not None:
            return self.recorded_ratio
        if self.before is None or self.after is None or self.after <= 0:
            return None
        return self.before / self.after


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs directly in ``folder``, or ``folder`` itself if it is one; oldest first.

    A run that cannot be read is listed as such.  Raises :class:`BadRun` if ``folder`` cannot be
    listed.
    """
    try:
        places = [folder, *folder.iterdir()]
        found = [path for path in places if (path / "run.json").is_file()]
    except OSError as error:
        raise BadRun(
            f"cannot list runs in {folder}: {error.strerror}; give the folder of the runs"
        ) from error
    return sorted(map(summarize, found), key=lambda run: (run.created or "", str(run.path)))


def summarize(path: Path) -> RunSummary:
    """The summary of one run directory."""
    try:
        run = Run.open(path)
        return _read(run)
    except BadRun as error:
        return RunSummary(path, UNREADABLE, remark=str(error))
    except (KeyError, TypeError, ValueError) as error:
        remark = f"{path / 'run.json'} has a result of another form ({error!r}); run it again"
        return RunSummary(path, UNREADABLE, remark=remark)


def _read(run: Run) -> RunSummary:
    """Raises KeyError, TypeError or ValueError for values of another form."""
    record, settings = run.record, run.record.settings
    result = record.result or {}
    before, after = _times(result)
    compared = result.get("comparison") or {}
    checkpoint = None if record.result else run.checkpoint()
    evaluations = result.get("evaluations", checkpoint.evaluations if checkpoint else None)
    return RunSummary(
        run.path,
        _state(run),
        created=record.created,
        command=record.command,
        subject=_text(settings.get("kernel") or settings.get("target")),
        original_sha256=_text(settings.get("original_sha256")),
        objective=_text(settings.get("objective")),
        strategy=_text(settings.get("strategy")),
        seed=settings.get("seed"),
        kind=_text(result.get("kind")),
        before=before,
        after=after,
        recorded_ratio=None if result.get("ratio") is None else float(result["ratio"]),
        interval=(compared["low"], compared["high"]) if "low" in compared else None,
        baseline="greedy fusion" if "passes" in result else "the original",
        improved=result.get("improved") if isinstance(result.get("improved"), bool) else None,
        evaluations=None if evaluations is None else int(evaluations),
        seconds=None if result.get("seconds") is None else float(result["seconds"]),
        settings=settings,
        result=record.result,
    )


def _state(run: Run) -> str:
    status = run.record.status
    if status != "running":
        return status
    return "running" if is_locked(run.path) else STOPPED


def rank(run: RunSummary) -> tuple[bool, float]:
    """Sort key of gains: measured ones first, the largest first."""
    return run.kind != "measured", -(run.ratio or 0.0)


def _times(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Times before and after in seconds: of ``tune``, or the sums over the passes of ``fuse``."""
    passes = result.get("passes")
    if isinstance(passes, Mapping):
        is_known = all("greedy" in values for values in passes.values())
        return _sum(passes, "greedy") if is_known else None, _sum(passes, "fused")
    before, after = result.get("original"), result.get("best")
    return (
        None if before is None else float(before),
        None if after is None else float(after),
    )


def _sum(passes: Mapping[str, Any], key: str) -> float:
    return sum(float(values[key]) for values in passes.values())


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def differences(runs: Sequence[RunSummary]) -> list[str]:
    """Reasons why the times of these runs cannot be compared, as sentences."""
    reasons = []
    if len({run.subject for run in runs}) > 1:
        reasons.append("the runs are of different kernels, so only their gains can be compared")
    elif len(codes := {run.original_sha256 for run in runs}) > 1:
        hashes = ", ".join(sorted(code[:12] if code else "a recording's" for code in codes))
        reasons.append(
            f"the runs start from different cubins of the same kernel (sha256 {hashes}), so only "
            "their gains can be compared"
        )
    if len({run.kind for run in runs if run.kind}) > 1:
        reasons.append("modelled and measured times cannot be compared with each other")
    gpus = {_gpu(run) for run in runs} - {None}
    if len(gpus) > 1:
        reasons.append(
            f"the runs were measured on different GPUs: {', '.join(sorted(map(str, gpus)))}"
        )
    return reasons


def _gpu(run: RunSummary) -> str | None:
    model = (run.result or {}).get("model")
    return (
        _text(model.get("gpu")) if run.kind == "measured" and isinstance(model, Mapping) else None
    )
