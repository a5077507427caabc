"""Run nostall with a device that records, or replays, what a GPU measured.

    python -m tests.docs.replayed record FILE tune kernel.py:kernel --objective gpu
    python -m tests.docs.replayed replay FILE tune kernel.py:kernel --objective gpu

``record`` needs a GPU and writes the outcomes of each device to FILE. ``replay`` needs none: the
command gets the recorded outcomes call by call, so a search with the same seed takes the same
steps. Both replace :class:`nostall.gpu.LocalGpu`. Commands that use a GPU in another way
(``nostall apply``, PyTorch) are not replayed.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import nostall.gpu
from nostall.core.errors import BadRun
from nostall.gpu import Kernel, MeasurementPlan, Outcome
from tests.docs.recording import DeviceRecording, GpuCommand, code_hash
from tests.unit.gpu.replayed_device import Method, OutcomeRecord

OpenDevice = Callable[..., Any]
"""As :class:`nostall.gpu.LocalGpu`: (kernel, plan, ordinal) -> a device with ``close``."""


class Recorder:
    """A device that records its outcomes; it evaluates one candidate at a time."""

    def __init__(self, kernel: Kernel, device: Any) -> None:
        self._device, self._original = device, code_hash(kernel.cubin)
        self._records: list[OutcomeRecord] = []

    @property
    def info(self) -> Mapping[str, str]:
        """As :attr:`nostall.gpu.Device.info`."""
        info: Mapping[str, str] = self._device.info
        return info

    @property
    def recording(self) -> DeviceRecording:
        """The outcomes so far."""
        return DeviceRecording(
            info=dict(self.info), original=self._original, outcomes=tuple(self._records)
        )

    def evaluate(self, cubin: bytes) -> Outcome:
        """As :meth:`nostall.gpu.Device.evaluate`."""
        return self._record("evaluate", cubin, self._device.evaluate(cubin))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """As :meth:`nostall.gpu.Device.compare`."""
        return self._record("compare", cubin, self._device.compare(cubin, rounds, checks))

    def close(self) -> None:
        """Close the device."""
        if close := getattr(self._device, "close", None):
            close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, method: Method, cubin: bytes, outcome: Outcome) -> Outcome:
        record = OutcomeRecord.from_outcome(method, cubin, outcome)
        self._records.append(record.model_copy(update={"cubin": code_hash(cubin)}))
        return outcome


class Replay:
    """A device that returns recorded outcomes.

    Repeated calls with the same cubin return their outcomes in the recorded order. Raises
    :class:`BadRun` for a call that was not recorded.
    """

    def __init__(self, kernel: Kernel, recording: DeviceRecording) -> None:
        if code_hash(kernel.cubin) != recording.original:
            raise BadRun(
                f"the recording is of another cubin than {kernel.name}'s; the compiler or the "
                "tutorial's kernel has changed; record again: python -m tests.docs.record"
            )
        self.info: Mapping[str, str] = recording.info
        self._outcomes: defaultdict[tuple[str, str], deque[OutcomeRecord]] = defaultdict(deque)
        for outcome in recording.outcomes:
            self._outcomes[outcome.verb, outcome.cubin].append(outcome)

    def evaluate(self, cubin: bytes) -> Outcome:
        """As :meth:`nostall.gpu.Device.evaluate`."""
        return self._next("evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """As :meth:`nostall.gpu.Device.compare`."""
        return self._next("compare", cubin)

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, method: str, cubin: bytes) -> Outcome:
        outcomes = self._outcomes[method, code_hash(cubin)]
        if not outcomes:
            raise BadRun(
                f"the recording has no further `{method}` of candidate {code_hash(cubin)[:12]}; "
                "record again: python -m tests.docs.record"
            )
        return outcomes.popleft().outcome


def recording_opener(recorders: list[Recorder], open_gpu: OpenDevice) -> OpenDevice:
    """A function that opens a device and adds its recorder to ``recorders``."""

    def open_device(
        kernel: Kernel, plan: MeasurementPlan | None = None, ordinal: int = 0
    ) -> Recorder:
        recorders.append(Recorder(kernel, open_gpu(kernel, plan, ordinal)))
        return recorders[-1]

    return open_device


def replaying_opener(recordings: Iterable[DeviceRecording]) -> OpenDevice:
    """A function that opens the recorded devices one after the other."""
    remaining = iter(recordings)

    def open_device(
        kernel: Kernel, plan: MeasurementPlan | None = None, ordinal: int = 0
    ) -> Replay:
        recording = next(remaining, None)
        if recording is None:
            raise BadRun("the command opens more devices than the recording has; record again")
        return Replay(kernel, recording)

    return open_device


def main(mode: str, path: Path, arguments: list[str]) -> None:
    """Run nostall with ``arguments``; see the module."""
    recorders: list[Recorder] = []
    if mode == "record":
        opener = recording_opener(recorders, nostall.gpu.LocalGpu)
    else:
        opener = replaying_opener(GpuCommand.model_validate_json(path.read_text("utf-8")).devices)
    # Commands import the name when they start, so it is replaced before that.
    vars(nostall.gpu)["LocalGpu"] = opener
    sys.argv = ["nostall", *arguments]
    from nostall.cli import main as run_nostall

    try:
        run_nostall()
    finally:
        if mode == "record":
            command = GpuCommand(
                line="", returncode=0, seconds=0, output="",
                devices=tuple(recorder.recording for recorder in recorders),
            )  # fmt: skip
            path.write_text(command.model_dump_json(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
