"""The worker's engine on a driver in host memory: what is checked, timed and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nostall.core import BadInput, Buffer, Comparison, LaunchSpec, MissingPart, OtherShape, Scalar
from nostall.core.tolerance import Tolerance
from nostall.gpu import Kernel, Plan
from nostall.gpu.checking import CAREFUL
from nostall.gpu.driver import Cuda
from nostall.gpu.engine import Engine
from tests.unit.gpu.fake_driver import FakeDriver, Program

ORIGINAL, GOOD, WRONG = b"original", b"good", b"wrong"
LAUNCH = LaunchSpec(
    args=(
        Buffer(name="y", dtype="f32", shape=(50,), role="out"),
        Buffer(name="x", dtype="f32", shape=(50,)),
        Scalar(name="n", dtype="i32", value=50),
    )
)
PLAN = Plan(inputs=2, loads=3)
Work = Callable[[FakeDriver, tuple[Any, ...]], None]


def doubling(n_used: int | None = None, off: Callable[[Any], Any] | None = None) -> Work:
    """y = 2 x on the first ``n_used`` values; ``off`` changes the result."""

    def work(driver: FakeDriver, values: tuple[Any, ...]) -> None:
        out, given, n = values
        x = driver.array(given, n, "f4")
        y = 2 * x if off is None else off(x)
        driver.array(out, n, "f4")[:n_used] = y[:n_used]

    return work


def engine(
    plan: Plan = PLAN, launch: LaunchSpec = LAUNCH, **programs: Work | Program
) -> tuple[Engine, FakeDriver]:
    made = {"original": doubling(), "good": doubling(), **programs}
    driver = FakeDriver(
        {
            name.encode(): program if isinstance(program, Program) else Program(program)
            for name, program in made.items()
        }
    )
    cuda = Cuda(0, driver)
    return Engine(Kernel(ORIGINAL, "k", launch), plan, cuda=cuda), driver


def test_a_candidate_is_checked_then_timed() -> None:
    slower = Program(doubling(), lambda place: 20e-6)
    works, driver = engine(slower=slower, wrong=doubling(off=lambda x: 2 * x + 1))
    good, slow, wrong = (works.evaluate(c) for c in (GOOD, b"slower", WRONG))
    assert good.timing is not None and slow.timing is not None
    assert np.median(good.timing.candidate) == pytest.approx(10e-6)
    assert np.median(slow.timing.candidate) == pytest.approx(20e-6)
    assert np.median(slow.timing.original) == pytest.approx(10e-6)
    assert (wrong.fate, wrong.timing) == ("wrong", None)
    assert "50 words of the outputs differ on sample 0" in wrong.detail
    assert works.evaluate(b"garbage").fate == "rejected"
    assert driver.unloaded == 3
    assert set(good.spent) == {"load", "check", "time"}


def test_what_may_come_next_is_loaded_while_the_gpu_is_busy() -> None:
    slower = Program(doubling(), lambda place: 20e-6)
    works, driver = engine(replace(PLAN, ahead=True), slower=slower)
    told = [b"good", None, b"slower", b"cannot be loaded"]
    works.foretold = lambda: told.pop(0)
    assert works.evaluate(b"slower").fate == "timed"
    loaded, dropped = driver.modules, driver.unloaded
    assert works.evaluate(b"good").fate == "timed"
    assert driver.modules == loaded and driver.unloaded == dropped + 1  # it was there
    assert works.evaluate(b"good").fate == "timed"
    assert driver.modules == loaded + 2 and driver.unloaded == dropped + 2
    assert works.evaluate(b"good").fate == "timed" and not told
    # One could not be loaded, one did not come.
    assert driver.modules == loaded + 4 and driver.unloaded == dropped + 4


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("an output not written", doubling(n_used=49)),
        ("one bit", doubling(off=lambda x: np.nextafter(2 * x, np.float32(9)))),
        ("an input used up", doubling(off=lambda x: 2 * x * (x > -1))),
    ],
)
def test_what_is_wrong_is_found(name: str, work: Work) -> None:
    works, _ = engine(wrong=work)
    fate = works.check(WRONG, 0, 3).fate
    assert fate == ("agrees" if name == "an input used up" else "wrong")


def rarely(driver: FakeDriver, values: tuple[Any, ...]) -> None:
    """Wrong when the first of its inputs lies in a 33rd of their range."""
    out, given, n = values
    x = driver.array(given, n, "f4")
    driver.array(out, n, "f4")[:] = 2 * x + (1 if 0.3 < x[0] < 0.36 else 0)


def test_a_rare_mistake_is_found_among_many_samples_and_located() -> None:
    works, driver = engine(rare=rarely)
    few = works.check(b"rare", 0, CAREFUL)
    assert few.fate == "agrees"
    found = works.check(b"rare", CAREFUL, 120)
    assert found.fate == "wrong"
    number = int(found.detail.rsplit(" ", 1)[1])
    assert number >= CAREFUL and found.detail.startswith("50 words")
    assert works.check(b"rare", number, 1).fate == "wrong"
    assert works.check(b"rare", CAREFUL, number - CAREFUL).fate == "agrees"
    assert not driver.capturing


def test_samples_are_the_same_in_shares_of_any_size() -> None:
    seen: list[list[bytes]] = [[], []]

    def watching(kept: list[bytes]) -> Work:
        def work(driver: FakeDriver, values: tuple[Any, ...]) -> None:
            kept.append(driver.array(values[1], 50, "f4").tobytes())
            doubling()(driver, values)

        return work

    works, _ = engine(one=watching(seen[0]), other=watching(seen[1]))
    works.check(b"one", 0, 50)
    for first, count in ((0, 7), (7, 20), (27, 23)):
        works.check(b"other", first, count)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 50


def test_the_first_launch_of_a_check_finds_an_empty_cache() -> None:
    works, driver = engine()
    flushed: list[int] = []
    fill = driver.cuMemsetD8Async

    def watched(target: int, byte: int, size: int, stream: str) -> Any:
        if size == 2 * driver.l2:
            flushed.append(driver.launched.count(GOOD))
        return fill(target, byte, size, stream)

    driver.cuMemsetD8Async = watched  # type: ignore[method-assign]
    works.check(GOOD, 0, 3)
    assert flushed == [0]


def test_a_kernel_that_does_not_repeat_itself_is_refused() -> None:
    count = iter(range(10**6))
    noisy = doubling(off=lambda x: 2 * x + next(count))
    with pytest.raises(BadInput, match=r"k is not deterministic: 50 words.*--tolerance"):
        engine(original=noisy)


def test_a_kernel_that_seldom_repeats_itself_is_refused_when_it_shows() -> None:
    count = iter(range(10**6))
    works, _ = engine(original=doubling(off=lambda x: 2 * x + (next(count) == 200)))
    with pytest.raises(BadInput, match="not deterministic"):
        works.check(GOOD, 0, 400)


def test_a_tolerance_counts_only_when_it_is_asked_for() -> None:
    near = doubling(off=lambda x: 2 * x * np.float32(1 + 1e-4))
    works, _ = engine(near=near)
    assert works.check(b"near", 0, 40).fate == "wrong"
    works, _ = engine(replace(PLAN, tolerance=Tolerance(rtol=1e-3)), near=near, far=rarely)
    assert works.check(b"near", 0, 40).fate == "agrees"
    assert works.check(b"far", 0, 120).fate == "wrong"


def test_further_shapes_are_checked_too() -> None:
    shapes = (
        OtherShape(values={"n": 20}, buffers={"x": (20,), "y": (20,)}),
        OtherShape(grid=(3, 1, 1)),
    )
    launch = LAUNCH.model_copy(update={"shapes": shapes})
    works, driver = engine(
        launch=launch, wrong=doubling(off=lambda x: 2 * x + (1 if len(x) == 20 else 0))
    )
    held = sum(map(len, driver.memory.values()))
    assert works.check(GOOD, 0, 20).fate == "agrees"
    assert driver.launched.count(GOOD) == 60
    outcome = works.check(WRONG, 0, 20)
    assert (outcome.fate, outcome.detail) == (
        "wrong",
        "20 words of the outputs differ on sample 0 of further shape 0",
    )
    flush = 2 * driver.l2
    assert sum(map(len, driver.memory.values())) == held + flush


def test_a_comparison_loads_everything_several_times() -> None:
    def placed(place: int) -> float:
        return 10e-6 * (1 + 0.01 * (place % 5))

    works, driver = engine(original=Program(doubling(), placed), good=Program(doubling(), placed))
    before = driver.modules
    outcome = works.compare(GOOD, 7)
    assert driver.modules - before == 9
    assert outcome.timing is not None
    timing = outcome.timing
    assert timing.loads == 3
    assert [len(s) for s in (timing.original, timing.candidate, timing.null)] == [7, 7, 7]
    assert len({round(s * 1e9) for s in timing.candidate}) > 1
    compared = Comparison.of(
        timing.original, timing.candidate, timing.null, kind="measured", loads=timing.loads
    )
    assert compared.verdict == "same" and compared.low < compared.ratio < compared.high


@pytest.mark.parametrize("clock", ["graph", "events"])
@pytest.mark.parametrize("cold", [False, True])
def test_clocks_agree_where_nothing_is_between_launches(clock: Any, cold: bool) -> None:
    works, _ = engine(
        replace(PLAN, clock=clock, cold=cold), fast=Program(doubling(), lambda place: 8e-6)
    )
    outcome = works.evaluate(b"fast")
    assert outcome.timing is not None
    ratio = np.array(outcome.timing.original) / outcome.timing.candidate
    assert np.median(ratio) == pytest.approx(1.25)


def test_too_large_for_the_gpu() -> None:
    big = Buffer(name="big", dtype="f64", shape=(1 << 20, 4))
    launch = LAUNCH.model_copy(update={"args": (big, *LAUNCH.args)})
    with pytest.raises(BadInput) as error:
        engine(launch=launch)
    text = str(error.value)
    needed = 3 * 8 * (1 << 22) + 3 * 208 + 3 * 208
    assert f"{needed:,} bytes are needed" in text and f"{1 << 26:,} are free" in text
    assert "'big'" in text


def test_another_architecture() -> None:
    driver = FakeDriver()
    with pytest.raises(BadInput, match=r"cannot be loaded on Pretended 9000 \(sm_90\).*NO_BINARY"):
        Engine(Kernel(ORIGINAL, "k", LAUNCH), PLAN, cuda=Cuda(0, driver))


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (FakeDriver(devices=0), "no usable GPU number 1"),
        (FakeDriver(devices=1), "no usable GPU number 1"),
        (FakeDriver(devices=2, device_name="NVIDIA H200 MIG 1g.18gb"), "a slice of one"),
    ],
)
def test_no_gpu_that_could_measure(driver: FakeDriver, said: str) -> None:
    with pytest.raises(MissingPart, match=said):
        Cuda(1, driver)
