"""The recorder of launches, in this process and with fakes of Triton's and the driver's modules."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nostall.attach import launch_recorder
from nostall.attach.launch_recorder import Recorder
from nostall.core.launch import Buffer, Scalar
from nostall.tuning.launches.recorded import read_launches, write_launches


class constexpr:  # noqa: N801
    """Stands for ``tl.constexpr``."""


class Tensor:
    """A tensor with gaps or without."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32", top: int = 0) -> None:
        self.shape, self.dtype, self.top = shape, f"torch.{dtype}", top
        self.gaps = 0

    def data_ptr(self) -> int:
        return 256

    def is_contiguous(self) -> bool:
        return not self.gaps

    def element_size(self) -> int:
        return 4

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 4 * self.gaps)

    def storage_offset(self) -> int:
        return 10

    def max(self) -> int:
        return self.top


def scale(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    n,
    alpha,
    flag,
    BLOCK: constexpr,  # noqa: N803
    KIND: tl.constexpr = None,  # type: ignore[name-defined]  # noqa: F821, N803
):
    """A kernel."""


class JITFunction:
    def __init__(self) -> None:
        self.fn = scale
        self.ran = 0

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> str:
        self.ran += 1
        return "result"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(str(tmp_path / "launches.jsonl"))


@pytest.fixture
def kernel(recorder: Recorder) -> JITFunction:
    module = ModuleType("triton.runtime.jit")
    watched = type("JITFunction", (JITFunction,), {})
    module.JITFunction = watched  # type: ignore[attr-defined]
    launch_recorder._watch_run(module, "JITFunction", recorder)
    instance: JITFunction = watched()
    return instance


def call(kernel: JITFunction, *args: Any, grid: Any = (4,), **options: Any) -> None:
    assert kernel.run(*args, grid=grid, warmup=False, **options) == "result"


def test_launches_are_counted_and_written(
    kernel: JITFunction, recorder: Recorder, tmp_path: Path
) -> None:
    x, index = Tensor((8, 16)), Tensor((5,), "int32", top=41)
    for step in range(3):
        call(kernel, x, index, 128, step / 2, 7, BLOCK=64, KIND="a", num_warps=8)
    call(kernel, x, index, 128, 0.5, 7, grid=lambda meta: (meta["n"] // meta["BLOCK"], 2), BLOCK=64)
    kernel.run(x, index, 1, 1.0, 1, grid=(1,), warmup=True, BLOCK=1)
    assert kernel.ran == 5
    recorder.write_counts()
    often, once = read_launches(Path(recorder.path))
    assert (often.kernel, often.count, once.count) == ("scale", 3, 1)
    assert often.target == f"{__file__}:scale"
    launch = often.launch
    assert (launch.grid, launch.num_warps) == ((4, 1, 1), 8)
    assert launch.args[0] == Buffer(name="x_ptr", dtype="f32", shape=(8, 16), role="inout")
    assert launch.args[1].bound == 42  # type: ignore[union-attr]
    assert launch.args[3] == Scalar(name="alpha", dtype="f32", value=0.0)
    assert [a.constant for a in launch.args if hasattr(a, "constant")] == [64, "a"]
    assert once.fields["grid"] == [2, 2, 1]
    assert once.undescribed == ("KIND is a constant of type NoneType",)
    written = write_launches([often, once, often], tmp_path / "out", "python app.py")
    names = [path.name if path else None for _, path, _ in written]
    assert names == ["scale.toml", None, "scale-2.toml"]
    assert "KIND is a constant" in written[1][2]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Tensor((0, 3)), "an empty tensor"),
        (Tensor((3,), "complex64"), "a tensor of complex64"),
        (True, "a bool"),
        (None, "a NoneType"),
        ([1], "a list"),
        (2**40, {"dtype": "i64", "value": 2**40}),
        (2**63, {"dtype": "u64", "value": 2**63}),
        (Tensor(()), {"dtype": "f32", "shape": [1], "role": "inout"}),
    ],
)
def test_arguments(value: Any, found: Any) -> None:
    expected = {"undescribed": found} if isinstance(found, str) else found
    assert launch_recorder._triton_argument("x", value, False) == {"name": "x", **expected}


def test_a_tensor_with_gaps_is_its_memory_from_the_first_element_on() -> None:
    tensor = Tensor((4, 4))
    tensor.gaps = 100
    assert launch_recorder._storage_shape(tensor) == [90]


def test_an_error_of_the_recorder_does_not_reach_the_program(
    kernel: JITFunction, capsys: pytest.CaptureFixture[str]
) -> None:
    def grid(meta: Any) -> Any:
        raise ValueError("no grid")

    assert kernel.run(grid=grid, warmup=False) == "result"
    assert "a launch is not recorded: no grid" in capsys.readouterr().err


def test_a_full_disk_does_not_reach_the_program(
    kernel: JITFunction,
    recorder: Recorder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "path", "/dev/full")
    for _ in range(2):
        call(kernel, Tensor((8,)), Tensor((8,)), 8, 1.0, 1, BLOCK=8)
    assert kernel.ran == 2
    assert capsys.readouterr().err.count("not recorded: [Errno 28] No space left on device") == 1


FULL_DISK = """
import os, resource, signal, sys
from nostall.attach.launch_recorder import Recorder, _quietly

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
recorder = Recorder(sys.argv[1])

def launch(name):
    _quietly(recorder.note, {"kernel": name, "grid": [1, 1, 1]}, lambda: {"args": []})

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

launch("before")
limit(os.path.getsize(sys.argv[1]) + 20)
launch("cut")
launch("lost")
if len(sys.argv) > 2:
    limit(resource.RLIM_INFINITY)
    launch("after")
"""


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_line_that_a_full_disk_cuts_spoils_no_other(tmp_path: Path, is_freed: bool) -> None:
    path = tmp_path / "log"
    command = [sys.executable, "-c", FULL_DISK, str(path), *(["freed"] if is_freed else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Each launch that is lost is named once; without space the counts at the end are lost too.
    assert done.stderr.count("a launch is not recorded") == (2 if is_freed else 3), done.stderr
    assert "Traceback" not in done.stderr
    kept = {"before", "after"} if is_freed else {"before"}
    assert {launch.kernel for launch in read_launches(path)} == kept


def test_trials_of_an_autotuner_are_left_out(kernel: JITFunction, recorder: Recorder) -> None:
    class Autotuner:
        def _bench(self) -> str:
            call(kernel, Tensor((8,)), Tensor((8,)), 8, 1.0, 1, BLOCK=8)
            return "measured"

        def run(self) -> None: ...

    module = ModuleType("triton.runtime.autotuner")
    module.Autotuner = Autotuner  # type: ignore[attr-defined]
    launch_recorder._watch_autotuner(module, recorder)
    assert Autotuner()._bench() == "measured"
    assert not Path(recorder.path).exists()
    call(kernel, Tensor((8,)), Tensor((8,)), 8, 1.0, 1, BLOCK=8)
    assert Path(recorder.path).read_text().count('"kernel"') == 1


def test_compile_options_of_a_launch_make_it_another_one(
    kernel: JITFunction, recorder: Recorder
) -> None:
    arguments = (Tensor((8,)), Tensor((8,)), 8, 1.0, 1)
    for more in ({}, {"maxnreg": 64}, {"maxnreg": 64, "num_ctas": None}):
        call(kernel, *arguments, BLOCK=8, KIND="a", **more)
    recorder.write_counts()
    limited, plain = read_launches(Path(recorder.path))
    assert (limited.count, limited.options) == (2, {"maxnreg": 64})
    assert (plain.count, plain.options) == (1, {})


def config(block: int, **fields: Any) -> Any:
    """A configuration with the fields of Triton's."""
    values = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "pre_hook": None}
    return SimpleNamespace(kwargs={"BLOCK": block, "KIND": "a"}, **{**values, **fields})


class Tuner:
    """An autotuner that chose its last configuration."""

    def __init__(self, kernel: JITFunction, *configs: Any, **fields: Any) -> None:
        self.fn, self.configs, self.best_config = kernel, list(configs), configs[-1]
        self.early_config_prune = self.perf_model = None
        vars(self).update(fields)

    def run(self, *args: Any, grid: Any) -> str:
        best = self.best_config
        options = {**best.kwargs, "num_warps": best.num_warps, "num_stages": best.num_stages}
        result: str = self.fn.run(*args, grid=grid, warmup=False, **options)
        return result

    def _bench(self) -> None: ...


def tuned(recorder: Recorder, kernel: Any, *configs: Any, grid: Any, **fields: Any) -> Any:
    """The recorded launch of an autotuned kernel."""
    module = ModuleType("triton.runtime.autotuner")
    module.Autotuner = watched = type("Autotuner", (Tuner,), {})  # type: ignore[attr-defined]
    launch_recorder._watch_autotuner(module, recorder)
    tuner = watched(kernel, *configs, **fields)
    x = Tensor((1024,))
    assert tuner.run(x, x, 1024, 1.0, 3, grid=grid) == "result" and recorder.tuner is None
    (launch,) = read_launches(Path(recorder.path))
    return launch


def blocks(meta: Any) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def test_configurations_of_an_autotuner_have_their_grids(
    kernel: JITFunction, recorder: Recorder
) -> None:
    listed = (config(32), config(128, maxnreg=96), config(64, num_warps=8))
    launch = tuned(recorder, kernel, *listed, grid=blocks)
    assert [c.constants["BLOCK"] for c in launch.configurations] == [32, 128, 64]
    assert [c.grid for c in launch.configurations] == [(32, 1, 1), (8, 1, 1), (16, 1, 1)]
    assert [c.chosen for c in launch.configurations] == [False, False, True]
    assert launch.configurations[1].options["maxnreg"] == 96
    assert launch.launch == launch.launch_with(launch.own)
    assert launch.launch.num_warps == 8 and launch.launch.grid == (16, 1, 1)


def test_a_grid_that_depends_on_no_constant_is_that_of_each_configuration(
    kernel: JITFunction, recorder: Recorder
) -> None:
    launch = tuned(recorder, kernel, config(32), config(64), grid=(5, 2))
    assert [c.grid for c in launch.configurations] == [(5, 2, 1)] * 2


def test_configurations_that_a_launch_cannot_describe_are_left_out(
    kernel: JITFunction, recorder: Recorder
) -> None:
    listed = (config(32, pre_hook=print), config(16, ir_override="k.ttgir"), config(64))
    launch = tuned(recorder, kernel, *listed, grid=blocks)
    assert [c.constants["BLOCK"] for c in launch.configurations] == [64]


def test_of_a_pruned_list_only_what_was_timed_is_noted(
    kernel: JITFunction, recorder: Recorder
) -> None:
    listed = (config(32), config(64))
    fields = {"early_config_prune": list, "configs_timings": [listed[1]]}
    launch = tuned(recorder, kernel, *listed, grid=blocks, **fields)
    assert [c.constants["BLOCK"] for c in launch.configurations] == [64]


def test_with_a_heuristic_between_no_configurations_are_noted(
    kernel: JITFunction, recorder: Recorder
) -> None:
    between = SimpleNamespace(run=kernel.run)
    assert not tuned(recorder, between, config(32), config(64), grid=blocks).configurations


def test_a_grid_that_fails_for_a_configuration_spoils_no_launch(
    kernel: JITFunction, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    def grid(meta: Any) -> tuple[int]:
        return (1024 // (meta["BLOCK"] - 32),)

    launch = tuned(recorder, kernel, config(32), config(64), grid=grid)
    assert launch.launch.grid == (32, 1, 1) and not launch.configurations
    assert "the configurations of a launch are not recorded" in capsys.readouterr().err


def test_launches_by_the_driver(recorder: Recorder) -> None:
    launched: list[Any] = []
    driver: Any = ModuleType("cuda.bindings.driver")
    driver.cuFuncGetName = lambda function: (0, b"saxpy")
    driver.cuMemGetAddressRange = lambda address: (0 if address < 5000 else 1, 4000, 1000)
    driver.cuLaunchKernel = lambda *args: launched.append(args)
    launch_recorder._watch_driver(driver, recorder)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int, None)
    for n in (7, 8):
        parameters = ((4096, 9000, 1.5, n, object()), types)
        driver.cuLaunchKernel("f", 4, 1, 1, 128, 1, 1, 64, 0, parameters, 0)
    driver.cuLaunchKernel("f", 4, 1, 1, 128, 1, 1, 0, 0, ((4096, 2.0), types[:1] + types[2:3]), 0)
    assert len(launched) == 3
    recorder.write_counts()
    first, second = read_launches(Path(recorder.path))
    assert (first.kernel, first.count, first.file) == ("saxpy", 2, None)
    assert first.undescribed == (
        "p1 is an address that is no allocation of the GPU",
        "p4 is object",
    )
    assert second.launch.block == (128, 1, 1)
    assert second.launch.args[0].shape == (904,)  # type: ignore[union-attr]


def test_broken_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = json.dumps({"process": 1, "number": 0, "kernel": "k\x1b", "grid": [1, 1, 1], "args": []})
    path.write_text(f"{line}\n[1]\n{line[:20]}")
    (launch,) = read_launches(path)
    assert (launch.kernel, launch.count) == ("k\\x1b", 1)
    assert read_launches(tmp_path / "none") == []
