"""Tuning after the first call, in a process of its own.

The user's program may be a script without a main guard, may hold a CUDA context with work under
way, and must survive whatever a candidate does; so the search runs as
``python -m nostall.attach.first_call FOLDER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nostall.attach.live import source as live_source
from nostall.attach.warning import warn_once
from nostall.core.errors import NostallError
from nostall.core.files import write_atomically
from nostall.core.launch import LaunchSpec, Strict
from nostall.gpu import Device, Kernel, LocalGpu
from nostall.search import make
from nostall.store import Row, Store
from nostall.tuning.job import Settings, tune
from nostall.tuning.kernel_file import one_line
from nostall.tuning.source import Source
from nostall.tuning.store_records import record

_AROUND = 300.0
"""Seconds that starting, racing and deciding may take beside the search itself."""


class Job(Strict):
    """What the tuning process has to know beside the cubin."""

    kernel: str
    launch: LaunchSpec
    origin: str
    provenance: dict[str, str]
    seconds: float
    ordinal: int


class FirstCalls:
    """Follows the launches of one decorated kernel and tunes each compiled variant once.

    Under ``@triton.autotune`` only the chosen configuration is seen, as the launches of the trial
    do not come through the decorated object.
    """

    def __init__(
        self,
        outer: Any,
        function: Any,
        seconds: float,
        bounds: Mapping[str, int],
        exchange: Callable[[Any], bool],
    ) -> None:
        self.outer, self.function, self.seconds, self.bounds = outer, function, seconds, bounds
        self._exchange = exchange
        # By identity, and held: Triton keeps compiled kernels as long as their function anyway.
        self._seen: dict[int, Any] = {}

    def follow(self) -> None:
        """Look at every launch from now on."""
        launch = self.outer.run

        def run(*args: Any, **options: Any) -> Any:
            compiled = launch(*args, **options)
            if compiled is not None and not options.get("warmup"):
                self._launched(compiled, args, options)
            return compiled

        self.outer.run = run

    def _launched(self, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if id(compiled) in self._seen:
            return
        self._seen[id(compiled)] = compiled
        try:
            compiled = getattr(compiled, "result", lambda: compiled)()  # compiled in the background
            cubin = compiled.asm.get("cubin")
            if hasattr(compiled, "nostall_record") or cubin is None or Store().made(cubin):
                return
            found = live_source(self.function, compiled, args, options, self.bounds)
            tune_apart(found, self.seconds, _ordinal())
        except Exception as error:  # the user's program is worth more than any gain
            warn_once(f"not tuned on its first call: {_reason(error)}")
            return
        self._exchange(compiled)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):  # a launch that no specification describes
        return str(error.errors()[0]["msg"])
    return one_line(error)


def tune_apart(source: Source, seconds: float, ordinal: int) -> None:
    """Run :func:`tune_here` in a process of its own; what it says goes to standard error."""
    assert source.launch is not None
    job = Job(
        kernel=source.kernel,
        launch=source.launch,
        origin=source.origin,
        provenance=dict(source.provenance),
        seconds=seconds,
        ordinal=ordinal,
    )
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        write_atomically(Path(folder) / "original.cubin", source.cubin)
        write_atomically(Path(folder) / "job.json", job.model_dump_json().encode())
        try:
            subprocess.run(
                # -P: what lies in the current folder is no module of ours.
                [sys.executable, "-P", "-m", "nostall.attach.first_call", folder],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=2,  # where sys.stderr is a notebook's, it has no file of its own
                timeout=seconds + _AROUND,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            warn_once(f"{source.origin} was not tuned: {error}")


def tune_here(
    folder: Path, device: Callable[[Kernel, int], AbstractContextManager[Device]] | None = None
) -> Row | None:
    """Tune what lies in ``folder`` and record a gain; ``device`` is the GPU when not given."""
    job = Job.model_validate_json((folder / "job.json").read_text())
    cubin = (folder / "original.cubin").read_bytes()
    source = Source(cubin, job.kernel, job.launch, job.origin, job.provenance)
    settings = Settings(seconds=job.seconds, objective="gpu")
    with (device or _gpu)(Kernel(cubin, job.kernel, job.launch), job.ordinal) as gpu:
        tuned = tune(source, make(settings.strategy), settings, device=gpu)
        return record(Store(), source, settings, tuned, gpu.about) if tuned.improved else None


def _gpu(kernel: Kernel, ordinal: int) -> LocalGpu:
    return LocalGpu(kernel, ordinal=ordinal)


def _ordinal() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())


def main() -> int:
    try:
        row = tune_here(Path(sys.argv[1]))
    except NostallError as error:
        print(f"nostall: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    gain = f"measured gain {row.ratio:.4f}x, kept" if row else "no gain beyond the noise"
    print(f"nostall: tuned on its first call: {gain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
