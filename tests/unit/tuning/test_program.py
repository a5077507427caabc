"""Kernels of a program: shares of its time, division of one budget, configurations as starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.core import BadInput
from nostall.core.errors import Interrupted, MissingPart
from nostall.tuning import program as job
from nostall.tuning.job import TuningResult
from nostall.tuning.launches.recorded import Configuration, RecordedLaunch, read_launches
from nostall.tuning.program import KernelResult, ProgramKernel, ProgramResult, Start
from nostall.tuning.room import Kind, load_gains
from nostall.tuning.sources.source import Source

US = 1e-6
SOFTMAX: dict[str, Any] = {
    "grid": [4, 1, 1],
    "args": [
        {"name": "y_ptr", "dtype": "f32", "shape": [4, 64], "role": "out"},
        {"name": "x_ptr", "dtype": "f32", "shape": [4, 64], "role": "in"},
        {"name": "columns", "dtype": "i32", "value": 64},
        {"name": "stride", "dtype": "i32", "value": 64},
        {"name": "BLOCK", "constant": 64},
    ],
}
OWN = Configuration({"BLOCK": 64}, {"num_warps": 4}, (16, 1, 1), chosen=True)
OTHERS = tuple(
    Configuration({"BLOCK": block}, {"num_warps": 4, "maxnreg": 64}, (1024 // block, 1, 1))
    for block in (32, 128, 256, 512)
)


def make_start(us: float, configuration: Configuration | None = None) -> Start:
    source = Source(f"{configuration} {us}".encode(), "k", None, "app.py:k", {})
    return Start(source, us * US, configuration)


def make_kernel(
    name: str, us: float, launches: int = 1, kind: Kind = "mma", configured: bool = False
) -> ProgramKernel:
    listed = (OWN, *OTHERS) if configured else ()
    launch = RecordedLaunch(name, "app.py", launches, {}, (), {}, listed)
    own = make_start(us, OWN if configured else None)
    return ProgramKernel(own, launch, launches, launches * us * US, kind)


def found(ratio: float, stopped: str = "budget") -> TuningResult:
    result: Any = SimpleNamespace(ratio=ratio, search=SimpleNamespace(stopped=stopped))
    return result  # type: ignore[no-any-return]


def test_the_budget_follows_shares_and_measured_gains() -> None:
    kernels = [
        make_kernel("small", 1, 1),
        make_kernel("wgmma", 10, 5, "wgmma"),
        make_kernel("mma", 10, 5, "mma"),
    ]
    results = job.divide(100.0, kernels, "assembler")
    gains = load_gains()
    assert gains.mean("assembler", "mma") > gains.mean("assembler", "wgmma") > 1.0
    assert [r.kernel.name for r in results] == ["mma", "wgmma", "small"]
    assert [round(r.share, 4) for r in results] == [0.495, 0.495, 0.0099]
    saved = [1 - 1 / gains.mean("assembler", kind) for kind in ("mma", "wgmma")]  # type: ignore[arg-type]
    assert results[0].budget / results[1].budget == pytest.approx(saved[0] / saved[1])
    assert results[2].budget == 0.0 and sum(r.budget for r in results) == pytest.approx(100.0)
    assert [r.budget for r in job.divide(100.0, kernels[::-1], "assembler")] == [
        r.budget for r in results
    ]


def test_a_small_budget_goes_to_one_kernel() -> None:
    kernels = [make_kernel("a", 10), make_kernel("b", 10), make_kernel("c", 9)]
    assert [r.budget for r in job.divide(2.0, kernels, "assembler")] == [2.0, 0.0, 0.0]
    assert [r.budget > 0 for r in job.divide(11.0, kernels, "assembler")] == [True, True, False]


def test_without_gains_of_the_kind_shares_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = load_gains()
    best = {"assembler": {"mma": {"k": 1.0}}}
    monkeypatch.setattr(job, "load_gains", lambda: gains.model_copy(update={"best": best}))
    kernels = [make_kernel("a", 10), make_kernel("b", 30)]
    assert [r.budget for r in job.divide(40.0, kernels, "assembler")] == [30.0, 10.0]


def test_starts_are_the_configurations_that_can_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {32: 9.0, 128: 10.2, 256: 30.0}

    def compile_(launch: Any, configuration: Any, arch: str, time: Any) -> Start:
        block = configuration.constants["BLOCK"]
        if block not in times:
            raise BadInput("too much shared memory")
        return make_start(times[block], configuration)

    monkeypatch.setattr(job, "_compile", compile_)

    def starts(budget: float) -> tuple[list[str], list[str]]:
        result = KernelResult(make_kernel("k", 9.5, configured=True), 1.0, budget)
        found = job.find_starts(result, "sm_90", lambda source: 0.0, "assembler")
        return [str(start) for start in found], result.notes

    names, notes = starts(60.0)
    assert [name.split(",")[0] for name in names] == ["BLOCK=32", "BLOCK=64", "BLOCK=128"]
    assert notes == ["BLOCK=512, num_warps=4, maxnreg=64: too much shared memory"]
    assert 30.0 / 9.0 > load_gains().largest("assembler", "mma") > 10.2 / 9.0
    assert len(starts(11.0)[0]) == 2 and len(starts(1.0)[0]) == 1


def test_the_fastest_pair_of_configuration_and_binary_is_kept() -> None:
    kernel = make_kernel("k", 10, 3, configured=True)
    result = KernelResult(kernel, 0.75, 20.0)
    starts = [kernel.own, make_start(10.5, OTHERS[0]), make_start(11, OTHERS[1])]
    ratios = iter((1.05, 1.2, 1.0))
    asked = []

    def tune(source: Source, seconds: float) -> TuningResult:
        asked.append((source, seconds))
        return found(next(ratios))

    (done,) = job.search_kernels([result], lambda result: starts, tune)
    assert done is result and [seconds for _, seconds in asked] == [20 / 3] * 3
    assert result.best is not None and result.best[0] is starts[1]
    assert result.ratio == pytest.approx(10 / (10.5 / 1.2))
    other = KernelResult(make_kernel("other", 10), 0.25, 0.0)
    whole = ProgramResult((result, other), (("lost", "why"),), "measured")
    assert whole.ratio == pytest.approx(1 / (0.75 / result.ratio + 0.25))
    document = json.loads(json.dumps(whole.to_json()))
    assert document["kernels"][0]["configuration"].startswith("BLOCK=32")
    assert [s["own"] for s in document["kernels"][0]["searches"]] == [True, False, False]
    assert document["kernels"][1]["configuration"] is None
    assert document["kernels"][1]["ratio"] == 1.0
    assert document["refused"] == [{"kernel": "lost", "reason": "why"}]


def test_a_slower_configuration_without_a_gain_changes_nothing() -> None:
    result = KernelResult(make_kernel("k", 10, configured=True), 1.0, 20.0)
    result.found = [(make_start(10, OWN), found(1.0)), (make_start(11, OTHERS[0]), found(1.05))]
    assert result.best is None and result.ratio == 1.0
    faster = make_start(8, OTHERS[0])
    result.found.append((faster, found(1.0)))
    assert result.best == (faster, result.found[-1][1]) and result.ratio == pytest.approx(1.25)


@pytest.mark.parametrize(
    "second", [found(1.1, "interrupted"), KeyboardInterrupt(), Interrupted("kept")]
)
def test_ctrl_c_keeps_what_was_found(second: Any) -> None:
    results = [KernelResult(make_kernel(name, 10), 1 / 3, 5.0) for name in "abc"]
    outcomes = iter((found(1.2), second))

    def tune(source: Source, seconds: float) -> TuningResult:
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    searches = job.search_kernels(results, lambda result: [result.kernel.own], tune)
    assert next(searches) is results[0]
    with pytest.raises(KeyboardInterrupt):
        next(searches)
    kept = 1.1 if isinstance(second, SimpleNamespace) else 1.0
    assert [r.ratio for r in results] == pytest.approx([1.2, kept, 1.0])
    assert results[2].found == []


def test_a_search_that_fails_is_noted_and_the_next_one_runs() -> None:
    results = [KernelResult(make_kernel(name, 10), 0.5, 5.0) for name in "ab"]

    def tune(source: Source, seconds: float) -> TuningResult:
        if not results[0].notes:
            raise BadInput("cannot be measured")
        return found(1.5)

    list(job.search_kernels(results, lambda result: [result.kernel.own], tune))
    assert results[0].notes == ["as launched: cannot be measured"] and results[0].best is None
    assert results[1].ratio == 1.5


def test_launches_of_one_binary_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).resolve().parents[3] / "examples" / "softmax.py"
    sizes = {"rows": 64, "more rows": 128, "other": 256}
    launches = [RecordedLaunch(name, str(file), 2, {"n": n}, ()) for name, n in sizes.items()]
    monkeypatch.setattr(job, "code_sha256", lambda cubin: cubin.decode())
    function = SimpleNamespace(instructions=())
    program = SimpleNamespace(kernel=lambda name: function)
    monkeypatch.setattr(job.Program, "of_kernel", lambda cubin, kernel: program)

    def compile_(launch: RecordedLaunch, configuration: Any, arch: str, time: Any) -> Start:
        assert configuration is None and arch == "sm_90"
        code = b"one" if "rows" in launch.kernel else b"two"
        return Start(Source(code, "k", None, "", {}), launch.fields["n"] * US, None)

    monkeypatch.setattr(job, "_compile", compile_)
    kernels, refused = job.load_kernels(launches, "sm_90", lambda source: 0.0)
    assert [(k.name, k.launches) for k in kernels] == [("more rows", 4), ("other", 2)]
    assert kernels[0].total == pytest.approx(2 * 64 * US + 2 * 128 * US) and not refused


def test_launches_without_a_file_are_refused_by_name() -> None:
    launches = [RecordedLaunch("saxpy", None, 1, {}, ())]
    kernels, ((name, reason),) = job.load_kernels(launches, "sm_90", lambda source: 0.0)
    assert not kernels and name == "saxpy" and "nostall tune FILE.cubin" in reason


def test_a_missing_gpu_is_no_fault_of_a_kernel() -> None:
    file = Path(__file__).resolve().parents[3] / "examples" / "softmax.py"

    def time(source: Source) -> float:
        raise MissingPart("no usable GPU")

    args = [{"name": "x", "dtype": "f32", "shape": [64], "role": "inout"}]
    launch = RecordedLaunch("k", str(file), 1, {"grid": [1, 1, 1], "args": args}, ())
    kernels, ((_, reason),) = job.load_kernels([launch], "sm_90", time)
    assert not kernels and "has no kernel 'k'" in reason
    named = replace(launch, kernel="softmax", fields=SOFTMAX, options={"maxnreg": 32})
    with pytest.raises(MissingPart, match="no usable GPU"):
        job.load_kernels([named], "sm_90", time)


def test_a_kernel_is_compiled_with_the_options_of_its_launch() -> None:
    file = Path(__file__).resolve().parents[3] / "examples" / "softmax.py"
    launch = RecordedLaunch("softmax", str(file), 1, SOFTMAX, ())
    limited = replace(launch, options={"maxnreg": 32})
    seen: list[str] = []

    def time(source: Source) -> float:
        seen.append(source.provenance["options"])
        return 1e-6

    assert not job.load_kernels([launch, limited], "sm_90", time)[1]
    assert "maxnreg=32" not in seen[0] and "maxnreg=32" in seen[1]


def test_a_launch_in_another_configuration(tmp_path: Path) -> None:
    log = tmp_path / "log"
    args = [
        {"name": "x", "dtype": "f32", "shape": [1024], "role": "inout", "bound": 1},
        {"name": "BLOCK", "constant": 64},
    ]
    args[0].pop("bound")
    listed = [
        {"constants": c.constants, "options": c.options, "grid": c.grid, "chosen": c.chosen}
        for c in (OWN, OTHERS[0])
    ]
    line = {"process": 1, "number": 0, "kernel": "k", "file": "app.py", "grid": [16, 1, 1]}
    more = {"num_warps": 4, "args": args, "configurations": listed}
    log.write_text(json.dumps({**line, **more}))
    (launch,) = read_launches(log)
    assert launch.own == OWN and launch.launch == launch.launch_with(OWN)
    other = launch.launch_with(launch.configurations[1])
    assert other.grid == (32, 1, 1) and other.args[1].constant == 32  # type: ignore[union-attr]
    assert other.args[0] == launch.launch.args[0]
    assert launch.configurations[1].compile_options == {"maxnreg": 64}
    assert replace(launch, configurations=()).own is None
