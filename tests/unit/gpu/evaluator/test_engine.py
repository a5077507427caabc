"""The engine on a fake driver: checking, timing and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nostall.core import (
    BadInput,
    Buffer,
    Comparison,
    LaunchSpec,
    LaunchVariant,
    MissingPart,
    Scalar,
)
from nostall.core.tolerance import Tolerance
from nostall.gpu import Kernel, MeasurementPlan
from nostall.gpu.driver import Cuda, DriverError
from nostall.gpu.evaluator.checking import SINGLE_SAMPLES
from nostall.gpu.evaluator.engine import Engine
from tests.unit.gpu.fake_driver import FakeDriver, Program

ORIGINAL, GOOD, WRONG = b"original", b"good", b"wrong"
LAUNCH = LaunchSpec(
    args=(
        Buffer(name="y", dtype="f32", shape=(50,), role="out"),
        Buffer(name="x", dtype="f32", shape=(50,)),
        Scalar(name="n", dtype="i32", value=50),
    )
)
PLAN = MeasurementPlan(inputs=2, loads=3)
Work = Callable[[FakeDriver, tuple[Any, ...]], None]


def doubling(n_used: int | None = None, function: Callable[[Any], Any] | None = None) -> Work:
    """A program that writes y = 2 x, or ``function(x)``, to its first ``n_used`` outputs."""

    def work(driver: FakeDriver, values: tuple[Any, ...]) -> None:
        out, inputs, n = values
        x = driver.array(inputs, n, "f4")
        y = 2 * x if function is None else function(x)
        driver.array(out, n, "f4")[:n_used] = y[:n_used]

    return work


def make_engine(
    plan: MeasurementPlan = PLAN, launch: LaunchSpec = LAUNCH, **programs: Work | Program
) -> tuple[Engine, FakeDriver]:
    all_programs = {"original": doubling(), "good": doubling(), **programs}
    driver = FakeDriver(
        {
            name.encode(): program if isinstance(program, Program) else Program(program)
            for name, program in all_programs.items()
        }
    )
    cuda = Cuda(0, driver)
    return Engine(Kernel(ORIGINAL, "k", launch), plan, cuda=cuda), driver


def test_a_candidate_is_checked_then_timed() -> None:
    slower = Program(doubling(), lambda address: 20e-6)
    engine, driver = make_engine(slower=slower, wrong=doubling(function=lambda x: 2 * x + 1))
    good, slow, wrong = (engine.evaluate(c) for c in (GOOD, b"slower", WRONG))
    assert good.timing is not None and slow.timing is not None
    assert np.median(good.timing.candidate) == pytest.approx(10e-6)
    assert np.median(slow.timing.candidate) == pytest.approx(20e-6)
    assert np.median(slow.timing.original) == pytest.approx(10e-6)
    assert (wrong.status, wrong.timing) == ("wrong", None)
    assert "50 words of the outputs differ on sample 0" in wrong.detail
    assert engine.evaluate(b"garbage").status == "rejected"
    assert driver.unloaded == 3
    assert set(good.phase_seconds) == {"load", "check", "time"}


def test_a_launch_that_is_refused_rejects_the_candidate_and_keeps_the_engine() -> None:
    def refuse(driver: FakeDriver, values: tuple[Any, ...]) -> None:
        raise DriverError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cuLaunchKernel")

    def fault(driver: FakeDriver, values: tuple[Any, ...]) -> None:
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "cuLaunchKernel")

    engine, driver = make_engine(large=refuse, broken=fault)
    refused = engine.evaluate(b"large")
    assert (refused.status, refused.timing) == ("rejected", None)
    assert "OUT_OF_RESOURCES" in refused.detail and driver.unloaded == 1
    assert engine.evaluate(GOOD).status == "timed"
    with pytest.raises(DriverError):
        engine.evaluate(b"broken")


def test_hinted_modules_are_loaded_while_the_gpu_is_busy() -> None:
    slower = Program(doubling(), lambda address: 20e-6)
    engine, driver = make_engine(replace(PLAN, prefetch=True), slower=slower)
    hints = [b"good", None, b"slower", b"cannot be loaded"]
    engine.next_hint = lambda: hints.pop(0)
    assert engine.evaluate(b"slower").status == "timed"
    loaded, unloaded = driver.modules, driver.unloaded
    assert engine.evaluate(b"good").status == "timed"
    assert driver.modules == loaded and driver.unloaded == unloaded + 1  # prefetched
    assert engine.evaluate(b"good").status == "timed"
    assert driver.modules == loaded + 2 and driver.unloaded == unloaded + 2
    assert engine.evaluate(b"good").status == "timed" and not hints
    # One hinted module was not evaluated next, one could not be loaded.
    assert driver.modules == loaded + 4 and driver.unloaded == unloaded + 4


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("an output not written", doubling(n_used=49)),
        ("one bit", doubling(function=lambda x: np.nextafter(2 * x, np.float32(9)))),
        ("an input used up", doubling(function=lambda x: 2 * x * (x > -1))),
    ],
)
def test_wrong_outputs_are_detected(name: str, work: Work) -> None:
    engine, _ = make_engine(wrong=work)
    status = engine.check(WRONG, 0, 3).status
    assert status == ("agrees" if name == "an input used up" else "wrong")


def rarely_wrong(driver: FakeDriver, values: tuple[Any, ...]) -> None:
    """A program that is wrong if its first input is in a 33rd of the input range."""
    out, inputs, n = values
    x = driver.array(inputs, n, "f4")
    driver.array(out, n, "f4")[:] = 2 * x + (1 if 0.3 < x[0] < 0.36 else 0)


def test_a_rare_mistake_is_detected_and_its_sample_found() -> None:
    engine, driver = make_engine(rare=rarely_wrong)
    few = engine.check(b"rare", 0, SINGLE_SAMPLES)
    assert few.status == "agrees"
    many = engine.check(b"rare", SINGLE_SAMPLES, 120)
    assert many.status == "wrong"
    number = int(many.detail.rsplit(" ", 1)[1])
    assert number >= SINGLE_SAMPLES and many.detail.startswith("50 words")
    assert engine.check(b"rare", number, 1).status == "wrong"
    assert engine.check(b"rare", SINGLE_SAMPLES, number - SINGLE_SAMPLES).status == "agrees"
    assert not driver.capturing


def test_samples_do_not_depend_on_the_size_of_batches() -> None:
    inputs: list[list[bytes]] = [[], []]

    def recording(samples: list[bytes]) -> Work:
        def work(driver: FakeDriver, values: tuple[Any, ...]) -> None:
            samples.append(driver.array(values[1], 50, "f4").tobytes())
            doubling()(driver, values)

        return work

    engine, _ = make_engine(whole=recording(inputs[0]), batched=recording(inputs[1]))
    engine.check(b"whole", 0, 50)
    for first, count in ((0, 7), (7, 20), (27, 23)):
        engine.check(b"batched", first, count)
    assert inputs[0] == inputs[1]
    assert len(set(inputs[0])) == 50


def test_the_first_launch_of_a_check_has_a_cold_cache() -> None:
    engine, driver = make_engine()
    launches_before_flush: list[int] = []
    fill = driver.cuMemsetD8Async

    def recorded_fill(target: int, byte: int, size: int, stream: str) -> Any:
        if size == 2 * driver.l2:
            launches_before_flush.append(driver.launched.count(GOOD))
        return fill(target, byte, size, stream)

    driver.cuMemsetD8Async = recorded_fill  # type: ignore[method-assign]
    engine.check(GOOD, 0, 3)
    assert launches_before_flush == [0]


def test_a_nondeterministic_kernel_is_rejected() -> None:
    count = iter(range(10**6))
    noisy = doubling(function=lambda x: 2 * x + next(count))
    with pytest.raises(BadInput, match=r"k is not deterministic: 50 words.*--tolerance"):
        make_engine(original=noisy)


def test_a_kernel_that_is_rarely_nondeterministic_is_rejected_when_it_shows() -> None:
    count = iter(range(10**6))
    engine, _ = make_engine(original=doubling(function=lambda x: 2 * x + (next(count) == 200)))
    with pytest.raises(BadInput, match="not deterministic"):
        engine.check(GOOD, 0, 400)


def test_outputs_within_a_tolerance_agree_only_if_there_is_one() -> None:
    near = doubling(function=lambda x: 2 * x * np.float32(1 + 1e-4))
    engine, _ = make_engine(near=near)
    assert engine.check(b"near", 0, 40).status == "wrong"
    plan = replace(PLAN, tolerance=Tolerance(rtol=1e-3))
    engine, _ = make_engine(plan, near=near, far=rarely_wrong)
    assert engine.check(b"near", 0, 40).status == "agrees"
    assert engine.check(b"far", 0, 120).status == "wrong"


def test_launch_variants_are_checked() -> None:
    variants = (
        LaunchVariant(values={"n": 20}, buffers={"x": (20,), "y": (20,)}),
        LaunchVariant(grid=(3, 1, 1)),
    )
    launch = LAUNCH.model_copy(update={"shapes": variants})
    engine, driver = make_engine(
        launch=launch, wrong=doubling(function=lambda x: 2 * x + (1 if len(x) == 20 else 0))
    )
    allocated = sum(map(len, driver.memory.values()))
    assert engine.check(GOOD, 0, 20).status == "agrees"
    assert driver.launched.count(GOOD) == 60
    outcome = engine.check(WRONG, 0, 20)
    assert (outcome.status, outcome.detail) == (
        "wrong",
        "20 words of the outputs differ on sample 0 of further shape 0",
    )
    flush = 2 * driver.l2
    assert sum(map(len, driver.memory.values())) == allocated + flush


def test_a_comparison_loads_all_modules_several_times() -> None:
    def seconds(address: int) -> float:
        return 10e-6 * (1 + 0.01 * (address % 5))

    program = Program(doubling(), seconds)
    engine, driver = make_engine(original=program, good=program)
    before = driver.modules
    outcome = engine.compare(GOOD, 7)
    assert driver.modules - before == 9
    assert outcome.timing is not None
    timing = outcome.timing
    assert timing.loads == 3
    assert [len(s) for s in (timing.original, timing.candidate, timing.null)] == [7, 7, 7]
    assert len({round(s * 1e9) for s in timing.candidate}) > 1
    comparison = Comparison.from_samples(
        timing.original, timing.candidate, timing.null, kind="measured", loads=timing.loads
    )
    assert comparison.verdict == "same"
    assert comparison.low < comparison.ratio < comparison.high


def test_candidates_are_timed_as_dependent_launches_and_the_original_is_not() -> None:
    engine, driver = make_engine(replace(PLAN, dependent_launch=True))
    assert engine.evaluate(GOOD).status == "timed"
    assert engine.check(GOOD, 0, 20).status == "agrees"
    assert engine.compare(GOOD, 4).status == "timed"
    assert set(driver.dependent) == {GOOD}
    in_graphs = driver.dependent.count(GOOD)
    assert in_graphs < driver.launched.count(GOOD), "the first launch of a graph is not dependent"
    plain, other = make_engine()
    assert plain.evaluate(GOOD).status == "timed"
    assert other.dependent == []


def test_a_dependent_launch_that_does_not_wait_is_wrong() -> None:
    engine, _ = make_engine(
        replace(PLAN, dependent_launch=True), hasty=Program(doubling(), waits=False)
    )
    assert engine.evaluate(b"hasty").status == "wrong"
    checked = engine.check(b"hasty", 0, 20)
    assert checked.status == "wrong"
    assert "does not wait" in checked.detail
    plain, _ = make_engine(hasty=Program(doubling(), waits=False))
    assert plain.evaluate(b"hasty").status == "timed"


@pytest.mark.parametrize("clock", ["graph", "events"])
@pytest.mark.parametrize("cold", [False, True])
def test_timing_methods_agree_if_launches_have_no_gaps(clock: Any, cold: bool) -> None:
    engine, _ = make_engine(
        replace(PLAN, clock=clock, cold=cold), fast=Program(doubling(), lambda address: 8e-6)
    )
    outcome = engine.evaluate(b"fast")
    assert outcome.timing is not None
    ratio = np.array(outcome.timing.original) / outcome.timing.candidate
    assert np.median(ratio) == pytest.approx(1.25)


def test_buffers_that_do_not_fit_on_the_gpu() -> None:
    big = Buffer(name="big", dtype="f64", shape=(1 << 20, 4))
    launch = LAUNCH.model_copy(update={"args": (big, *LAUNCH.args)})
    with pytest.raises(BadInput) as error:
        make_engine(launch=launch)
    text = str(error.value)
    needed = 3 * 8 * (1 << 22) + 3 * 208 + 3 * 208
    assert f"{needed:,} bytes are needed" in text and f"{1 << 26:,} are free" in text
    assert "'big'" in text


def test_a_kernel_for_another_architecture() -> None:
    driver = FakeDriver()
    with pytest.raises(BadInput, match=r"cannot be loaded on Fake 9000 \(sm_90\).*NO_BINARY"):
        Engine(Kernel(ORIGINAL, "k", LAUNCH), PLAN, cuda=Cuda(0, driver))


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (FakeDriver(devices=0), "no usable GPU number 1"),
        (FakeDriver(devices=1), "no usable GPU number 1"),
        (FakeDriver(devices=2, device_name="NVIDIA H200 MIG 1g.18gb"), "is a MIG slice"),
    ],
)
def test_a_gpu_that_cannot_measure(driver: FakeDriver, message: str) -> None:
    with pytest.raises(MissingPart, match=message):
        Cuda(1, driver)
