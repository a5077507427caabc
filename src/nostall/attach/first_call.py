"""Tune a Triton kernel after its first call, in a separate process.

The search runs as ``python -m nostall.attach.first_call FOLDER``, because the user's program may
lack a main guard, may have work running in its CUDA context, and must survive candidates that
crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from nostall.attach.warning import warn_once
from nostall.core.errors import BadLaunch, NostallError
from nostall.core.files.atomic import write_atomically
from nostall.core.launch import Buffer, LaunchSpec, Scalar, StrictModel
from nostall.core.validation import dump_json, load_json
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan
from nostall.store import Row, Store
from nostall.tuning.assembler.job import open_setup, tune_assembler
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.records.store_records import record_result
from nostall.tuning.settings import Settings
from nostall.tuning.sources.compiled_launch import compiled_launch
from nostall.tuning.sources.kernel_file import root_cause
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import INTEGERS, TRITON_TYPES
from nostall.tuning.strategies import ASSEMBLER, make_strategy

_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
_BOOL = "i1"


def capture_source(
    function: Any,
    compiled: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    bounds: Mapping[str, int],
) -> Source:
    """The cubin, its PTX and the launch of a call ``function[grid](*args, **options)``.

    ``compiled`` is the kernel that the call ran.  ``bounds``: N by name of an integer tensor, for
    random values in [0, N).

    Each tensor becomes a buffer with the size of its storage from its first element on.  All have
    the role ``inout``, because a call does not say which of its tensors are outputs.

    Raises :class:`BadLaunch` if random data cannot replace an argument.
    """
    origin = f"{function.module}.{function.fn.__qualname__}"
    signature: Mapping[str, Any] = compiled.src.signature
    values = _bind_arguments(function, compiled, args, options)
    arguments: dict[str, Buffer | Scalar] = {}
    for name, kind in signature.items():
        if kind != "constexpr":
            arguments[name] = _argument(origin, name, kind, values.get(name), bounds)
    launch = LaunchSpec(
        grid=_grid(options["grid"], values),
        args=tuple(arguments.values()),
        num_warps=compiled.metadata.num_warps,
    )
    target, ptx = compiled.metadata.target, compiled.asm.get("ptx")
    compile_options = {
        name: getattr(compiled.metadata, name, None) for name in ("enable_fp_fusion", "ptx_options")
    }
    return Source(
        cubin=compiled.asm["cubin"],
        kernel=str(compiled.metadata.name),
        launch=compiled_launch(launch, arguments, {}, compiled.metadata),
        origin=origin,
        provenance={
            "compiler": f"triton {compiled.metadata.triton_version}",
            "arch": f"sm_{target.arch}",
            "options": ", ".join(
                f"{name}={value}" for name, value in compile_options.items() if value is not None
            ),
        },
        ptx=str(ptx) if ptx is not None else None,
    )


def _bind_arguments(
    function: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, including compile-time constants that an autotuner chose."""
    names = set(function.signature.parameters)
    keywords = {name: value for name, value in options.items() if name in names}
    bound = function.signature.bind_partial(*args, **keywords)
    bound.apply_defaults()
    values = dict(bound.arguments)
    for path, value in compiled.src.constants.items():
        if len(path) == 1:
            values[function.arg_names[path[0]]] = value
    return values


def _argument(
    origin: str, name: str, kind: Any, value: Any, bounds: Mapping[str, int]
) -> Buffer | Scalar:
    """Describe one argument; ``kind`` is its type in Triton's signature."""
    if isinstance(kind, str) and kind.startswith("*"):
        return _buffer(origin, name, kind.lstrip("*k"), value, bounds)
    if isinstance(kind, str) and kind in _DTYPES and isinstance(value, int | float):
        return Scalar(name=name, dtype=_DTYPES[kind], value=value)  # type: ignore[arg-type]
    raise BadLaunch(
        f"{origin}: argument {name!r} is a {type(value).__name__} of Triton type {kind!r}, which "
        "cannot be filled with random data; tune it with `nostall tune` and a launch specification"
    )


def _buffer(origin: str, name: str, kind: str, value: Any, bounds: Mapping[str, int]) -> Buffer:
    """Describe a tensor; ``kind`` is Triton's name of its element type."""
    dtype = "u8" if kind == _BOOL else _DTYPES.get(kind)
    if dtype is None or not hasattr(value, "untyped_storage"):
        raise BadLaunch(
            f"{origin}: argument {name!r} is a {type(value).__name__} of element type {kind!r}; "
            f"torch tensors of {', '.join(_DTYPES)} or bool can be tuned on the first call"
        )
    bound = 2 if kind == _BOOL else bounds.get(name)
    if dtype in INTEGERS and not bound:
        raise BadLaunch(
            f"{origin}: tensor {name!r} holds integers, and random ones could be used as indices "
            f"outside of a buffer; give optimize(bounds={{{name!r}: N}}) for values in [0, N)"
        )
    size = value.element_size()
    count = value.untyped_storage().nbytes() // size - value.storage_offset()
    return Buffer(name=name, dtype=dtype, shape=(count,), role="inout", bound=bound)  # type: ignore[arg-type]


def _grid(grid: Any, values: Mapping[str, Any]) -> tuple[int, int, int]:
    sizes = grid(dict(values)) if callable(grid) else grid
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


_CUBIN, _PTX, _JOB, _ANSWER = "original.cubin", "original.ptx", "job.json", "answer.json"
"""Files of the tuning process's folder; there is no PTX if the compiler kept none."""
_WATCHED = "NOSTALL_PROGRAM"
"""Environment variable of a watched program; the tuning process is none."""
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
            warn_once(f"not tuned on its first call: {reason_of(error)}")
            return
        self._replace_cubin(compiled)


def reason_of(error: Exception) -> str:
    """Why a launch cannot be searched, in one line."""
    if isinstance(error, ValidationError):  # no launch specification can describe the call
        return str(error.errors()[0]["msg"])
    return root_cause(error)


def tune_in_subprocess(source: Source, seconds: float, ordinal: int) -> dict[str, Any]:
    """Run :func:`tune_folder` in a separate process; its output goes to standard error.

    Returns ``seconds`` of the original's launch, if it was compared, and ``reason``: why nothing
    was stored, empty if something was.
    """
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
    inherited = {name: value for name, value in os.environ.items() if name != _WATCHED}
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        write_atomically(Path(folder) / _CUBIN, source.cubin)
        if source.ptx is not None:
            write_atomically(Path(folder) / _PTX, source.ptx.encode())
        write_atomically(Path(folder) / _JOB, dump_json(job).encode())
        try:
            subprocess.run(
                # -P: files in the current folder must not shadow modules.
                [sys.executable, "-P", "-m", "nostall.attach.first_call", folder],
                env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=2,  # by number, because a notebook's sys.stderr has no file descriptor
                timeout=seconds + _OVERHEAD_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            answer = _read_answer(Path(folder)) or {"reason": _failure(error)}
            warn_once(f"{source.origin} was not tuned: {answer['reason']}")
            return answer
        return _read_answer(Path(folder)) or {"reason": "the search gave no answer"}


def _failure(error: OSError | subprocess.SubprocessError) -> str:
    """What happened to a tuning process that gave no answer, without its command line."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"its search ended with code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"its search had no end after {error.timeout:g} s"
    return str(error)


def _read_answer(folder: Path) -> dict[str, Any] | None:
    """What the tuning process wrote; None if it was killed before."""
    try:
        answer: dict[str, Any] = json.loads((folder / _ANSWER).read_text())
    except (OSError, ValueError):
        return None
    return answer


def _write_answer(folder: Path, reason: str, seconds: float | None = None) -> None:
    text = json.dumps({"reason": reason, "seconds": seconds})
    write_atomically(folder / _ANSWER, text.encode())


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
        row = record_result(Store(), source, settings, tuned, gpu.info) if tuned.improved else None
    timing = tuned.decision.outcome.timing if tuned.decision is not None else None
    seconds = median(timing.original) if timing is not None else None
    _write_answer(folder, "" if row else "no gain beyond the noise", seconds)
    return row


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
    folder = Path(sys.argv[1])
    try:
        row = tune_folder(folder)
    except NostallError as error:
        _write_answer(folder, reason_of(error))
        print(f"nostall: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # any error of the device: the program is told
        _write_answer(folder, reason_of(error))
        raise
    gain = f"measured gain {row.ratio:.4f}x, stored" if row else "no gain beyond the noise"
    print(f"nostall: tuned on its first call: {gain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
