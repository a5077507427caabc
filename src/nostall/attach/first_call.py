"""Tune a Triton kernel after its first call, in a separate process.

The search runs as ``python -m nostall.attach.first_call FOLDER``, because the user's program may
lack a main guard, may have work running in its CUDA context, and must survive candidates that
crash.
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

from nostall.attach.launch_capture import capture_source
from nostall.attach.warning import warn_once
from nostall.core.errors import NostallError
from nostall.core.files.atomic import write_atomically
from nostall.core.launch import LaunchSpec, StrictModel
from nostall.core.validation import dump_json, load_json
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan
from nostall.store import Row, Store
from nostall.tuning.assembler.job import open_setup, tune_assembler
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.records.store_records import record_result
from nostall.tuning.settings import Settings
from nostall.tuning.sources.kernel_file import root_cause
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import ASSEMBLER, make_strategy

_CUBIN, _PTX, _JOB = "original.cubin", "original.ptx", "job.json"
"""Files of the tuning process's folder; there is no PTX if the compiler kept none."""
_OVERHEAD_SECONDS = 300.0
"""Time that the tuning process may take in addition to the search itself."""


OpenDevice = Callable[[Kernel, MeasurementPlan, int], AbstractContextManager[Device]]
"""Opens the GPU with a number for a kernel."""


class Job(StrictModel):
    """Content of ``job.json``: what the tuning process needs in addition to the cubin."""

    kernel: str
    launch: LaunchSpec
    origin: str
    """Qualified name of the Triton function."""
    provenance: dict[str, str]
    seconds: float
    """Budget of the search."""
    ordinal: int
    """Number of the GPU."""


class FirstCalls:
    """Tunes each compiled variant of a decorated kernel after its first launch.

    Under ``@triton.autotune`` only the chosen configuration is tuned, because the autotuner's own
    trial launches bypass the decorated object.
    """

    def __init__(
        self,
        outer: Any,
        function: Any,
        seconds: float,
        bounds: Mapping[str, int],
        replace_cubin: Callable[[Any], bool],
    ) -> None:
        """``outer``: the decorated object; ``function``: the ``JITFunction`` in it.

        ``seconds`` and ``bounds`` are those of ``@nostall.optimize``.  ``replace_cubin`` is called
        with the compiled kernel after it was tuned.
        """
        self.outer, self.function, self.seconds, self.bounds = outer, function, seconds, bounds
        self._replace_cubin = replace_cubin
        # By identity.  The values keep the objects alive, so that an id is never reused; Triton
        # keeps compiled kernels as long as their function anyway.
        self._seen: dict[int, Any] = {}

    def track_launches(self) -> None:
        """Observe every launch from now on."""
        launch = self.outer.run

        def run(*args: Any, **options: Any) -> Any:
            compiled = launch(*args, **options)
            if compiled is not None and not options.get("warmup"):
                self._on_launch(compiled, args, options)
            return compiled

        self.outer.run = run

    def _on_launch(self, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if id(compiled) in self._seen:
            return
        self._seen[id(compiled)] = compiled
        try:
            compiled = getattr(compiled, "result", lambda: compiled)()  # a future of async compile
            cubin = compiled.asm.get("cubin")
            if hasattr(compiled, "nostall_record") or cubin is None or Store().is_optimised(cubin):
                return
            source = capture_source(self.function, compiled, args, options, self.bounds)
            tune_in_subprocess(source, self.seconds, _current_ordinal())
        except Exception as error:  # any error: without nostall the user's program would run
            warn_once(f"not tuned on its first call: {_reason(error)}")
            return
        self._replace_cubin(compiled)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):  # no launch specification can describe the call
        return str(error.errors()[0]["msg"])
    return root_cause(error)


def tune_in_subprocess(source: Source, seconds: float, ordinal: int) -> None:
    """Run :func:`tune_folder` in a separate process; its output goes to standard error."""
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
        write_atomically(Path(folder) / _CUBIN, source.cubin)
        if source.ptx is not None:
            write_atomically(Path(folder) / _PTX, source.ptx.encode())
        write_atomically(Path(folder) / _JOB, dump_json(job).encode())
        try:
            subprocess.run(
                # -P: files in the current folder must not shadow modules.
                [sys.executable, "-P", "-m", "nostall.attach.first_call", folder],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=2,  # by number, because a notebook's sys.stderr has no file descriptor
                timeout=seconds + _OVERHEAD_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            warn_once(f"{source.origin} was not tuned: {error}")


def tune_folder(folder: Path, device: OpenDevice | None = None) -> Row | None:
    """Tune the kernel in ``folder`` and store a measured gain.

    With PTX the assembler's input is searched, else the order of native instructions.  ``device``
    opens the device, by default a :class:`LocalGpu`.  Returns the row of the store, or None if
    there is no gain.
    """
    job = load_json(Job, (folder / _JOB).read_text())
    cubin = (folder / _CUBIN).read_bytes()
    ptx = (folder / _PTX).read_text() if (folder / _PTX).exists() else None
    source = Source(cubin, job.kernel, job.launch, job.origin, job.provenance, ptx)
    strategy = Settings.strategy if ptx is None else ASSEMBLER
    settings = Settings(strategy, seconds=job.seconds, objective="gpu")
    kernel = Kernel(cubin, job.kernel, job.launch)
    with (device or LocalGpu)(kernel, settings.measurement_plan, job.ordinal) as gpu:
        tuned = _search(source, settings, gpu)
        return record_result(Store(), source, settings, tuned, gpu.info) if tuned.improved else None


def _search(source: Source, settings: Settings, gpu: Device) -> TuningResult:
    """Run the search of the settings' strategy."""
    search = make_strategy(settings.strategy)
    if settings.strategy != ASSEMBLER:
        return tune(source, search, settings, device=gpu)
    with open_setup(source) as setup:
        return tune_assembler(setup, search, settings, gpu)


def _current_ordinal() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())


def main() -> int:
    """Tune the folder named on the command line; returns the exit code."""
    try:
        row = tune_folder(Path(sys.argv[1]))
    except NostallError as error:
        print(f"nostall: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    gain = f"measured gain {row.ratio:.4f}x, stored" if row else "no gain beyond the noise"
    print(f"nostall: tuned on its first call: {gain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
