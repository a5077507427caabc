"""Several workers: the same result as one device, also when a worker is killed in the middle."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.kill_resume import Slow, Synthetic, kernel

from nostall import farm
from nostall.cli import main
from nostall.cli.interruption import Interruption
from nostall.core import BadInput, Budget, MissingPart, Run
from nostall.farm import Farm, FarmDevice, Opening
from nostall.gpu import Device, Kernel, LocalGpu, Outcome, Plan, Recording, Replay
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal
from nostall.tuning.farm_search import Chain, Chains, run_chain, seeds
from nostall.tuning.gpu_objective import MeasuredSchedules
from nostall.tuning.job import Settings, Tuned, describe, tune
from tests.unit.gpu.test_worker import pretend

distributed = pytest.importorskip("distributed")

SETTINGS = Settings(seed=5, evaluations=60, objective="gpu", rounds=12, checks=2)


class Inline:
    """Two workers that are this process."""

    workers = 2

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        ending: Callable[[], None] | None = None,
    ) -> list[Any]:
        return [function(item) for item in items]

    def everywhere(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@cache
def recorder(cubin: bytes) -> Recording:
    return Recording(Synthetic(cubin))


def recording(kernel: Kernel, plan: Plan, ordinal: int) -> Device:
    return recorder(kernel.cubin)


def replayed(path: Path, kernel: Kernel, plan: Plan, ordinal: int) -> Device:
    return Slow(Replay(path))


def opening(make: Any) -> Opening:
    source = kernel()
    assert source.launch is not None
    return Opening(Kernel(source.cubin, source.kernel, source.launch), Plan(), make)


def tuned(works: Any, make: Any, run: Run | None = None) -> Tuned:
    how = opening(make)
    search = Chains(Anneal(), works, how)
    return tune(kernel(), search, SETTINGS, run=run, device=FarmDevice(works, how))


def answer(found: Tuned) -> tuple[Any, ...]:
    """All of a result that may not depend on who measured when."""
    searched = found.search
    numbers = (searched.evaluations, searched.start_measurement, searched.best_measurement)
    return (found.cubin, found.decision, found.moved, found.retimed, *numbers)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, Path]:
    """Both chains on one device, one after the other, and the recording of what it measured."""
    folder = tmp_path_factory.mktemp("farm")
    with Run.create(folder / "run", "tune", describe(kernel(), SETTINGS)) as run:
        found = tuned(Inline(), recording, run)
    recorder(kernel().cubin).save(folder / "measured.json")
    return found, folder / "measured.json"


@pytest.fixture(scope="module")
def workers() -> Iterator[Farm]:
    with farm.local(2) as works:
        yield works


def process(_: object) -> int:
    return os.getpid()


def test_chains_are_the_searches_of_their_seeds(one: tuple[Tuned, Path]) -> None:
    assert seeds(7, 1) == [7] and len(set(seeds(7, 64))) == 64
    source = kernel()
    program = Program.from_cubin(source.cubin)
    space, budget = ScheduleSpace(program, program.kernel(source.kernel)), SETTINGS.budget
    found = []
    for seed in seeds(SETTINGS.seed, 2):
        measured = MeasuredSchedules(space, Synthetic(source.cubin))
        found.append(Anneal().run(space, measured, budget, seed=seed))
    works, how, measured = Inline(), opening(recording), MeasuredSchedules(space, Synthetic(b""))
    works.workers = 1
    alone = Chains(Anneal(), works, how).run(space, measured, budget, seed=SETTINGS.seed)
    assert alone.checkpoint.best == found[0].checkpoint.best
    assert alone.best_measurement.value == found[0].best_measurement.value
    assert alone.evaluations == found[0].evaluations
    both = one[0].search
    assert both.evaluations == sum(f.evaluations for f in found)
    assert both.best_measurement.value == min(f.best_measurement.value for f in found)


def test_workers_give_what_one_device_gives_though_one_is_killed_in_the_middle(
    one: tuple[Tuned, Path], workers: Farm, tmp_path: Path
) -> None:
    found, path = one
    victims = sorted(set(workers.map(process, range(20))))
    assert len(victims) == 2
    began = tmp_path / "began"

    def kill() -> None:
        while not began.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(victims[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    again = tuned(workers, partial(noticed, path, began, victims[0]))
    killer.join(10)
    assert began.exists() and not killer.is_alive()
    assert victims[0] not in workers.map(process, range(20))
    assert answer(again) == answer(found)


def noticed(
    path: Path, began: Path, victim: int, kernel: Kernel, plan: Plan, ordinal: int
) -> Device:
    """A slower replay that leaves a file when the worker that will be killed has opened it."""
    if os.getpid() == victim:
        began.touch()
        time.sleep(1.0)
    return replayed(path, kernel, plan, ordinal)


def test_the_run_directory_tells_of_all_chains(one: tuple[Tuned, Path]) -> None:
    run = Run.open(one[1].parent / "run")
    trials = list(run.trials())
    assert len(trials) == one[0].search.evaluations == 2 * (SETTINGS.evaluations or 0)
    assert {t.move.partition(":")[0] for t in trials} == {"chain 0", "chain 1"}
    assert trials[-1].best == min(t.value for t in trials)
    assert all(a.best >= b.best for a, b in pairwise(trials))
    assert run.record.result is not None and run.record.result["fates"]["timed"] > len(trials)


def raises(_: object) -> None:
    raise BadInput("the kernel is not deterministic")


def test_an_error_in_a_worker_is_raised_here(workers: Farm) -> None:
    with pytest.raises(BadInput, match="not deterministic"):
        workers.map(raises, [1])
    with pytest.raises(BadInput, match="not deterministic"):
        workers.call(raises, 1)


def gpu(_: object) -> str | None:
    return os.environ.get(farm.farm.GPU)


def runs_out_of_time(_: object) -> None:
    raise TimeoutError("nobody answered")


def test_a_worker_s_own_timeout_is_not_ours(workers: Farm) -> None:
    with pytest.raises(TimeoutError, match="nobody answered"):
        workers.map(runs_out_of_time, [1])


def test_each_local_worker_has_a_gpu_of_its_own(workers: Farm) -> None:
    assert set(workers.map(gpu, range(20))) == {"0", "1"}


def test_calls_stay_on_one_worker(workers: Farm) -> None:
    assert len({workers.call(process, None) for _ in range(6)}) == 1


def held(kernel: Kernel, plan: Plan, ordinal: int) -> Device:
    return LocalGpu(Kernel(b"", "k", kernel.launch), plan, ordinal, make=pretend)


def test_a_worker_holds_its_gpu_in_a_process_of_its_own(workers: Farm) -> None:
    device = FarmDevice(workers, opening(held))
    assert device.evaluate(b"good").fate == "timed"
    assert device.evaluate(b"die").fate == "fault"
    assert device.compare(b"good", 4, 1).timing is not None
    held_by = int(device.about["process"])
    assert held_by not in workers.map(process, range(20))
    workers.everywhere(farm.close, opening(recording))  # somebody else's
    assert Path(f"/proc/{held_by}").exists()
    workers.everywhere(farm.close, opening(held))
    assert not Path(f"/proc/{held_by}").exists()


@dataclass(frozen=True)
class Begun:
    """Leaves a file at the ``after``-th evaluation of a device; equal in every process."""

    path: Path
    after: int = 1

    def __call__(self, kernel: Kernel, plan: Plan, ordinal: int) -> Device:
        return Telling(Slow(Synthetic(kernel.cubin)), self)


class Telling:
    def __init__(self, device: Device, begun: Begun) -> None:
        self.device, self.begun, self.about, self.asked = device, begun, device.about, 0

    def evaluate(self, cubin: bytes) -> Outcome:
        self.asked += 1
        if self.asked == self.begun.after:
            self.begun.path.touch()
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)


def test_a_search_ends_when_its_parent_lets_go(workers: Farm, tmp_path: Path) -> None:
    """As after Ctrl-C: whoever waited for the search's own end would wait for its whole budget."""
    how = opening(Begun(tmp_path / "began"))
    chain = Chain("run", Anneal(), how, Budget(seconds=30), 0, None)
    future = workers.client.submit(run_chain, chain, pure=False)
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    workers.everywhere(farm.close, how)
    assert future.result(timeout=5).stopped == "interrupted"


def test_ctrl_c_keeps_what_the_chains_found(workers: Farm, tmp_path: Path) -> None:
    """In a terminal it reaches the workers, too."""
    how = opening(Begun(tmp_path / "began", after=20))
    victims = set(workers.map(process, range(20)))

    def interrupt() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        for victim in victims:
            os.kill(victim, signal.SIGINT)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    settings = replace(SETTINGS, evaluations=None, seconds=60.0)
    began = time.monotonic()
    with Interruption() as heard, Run.create(tmp_path / "run", "tune", {}) as run:
        search, device = Chains(Anneal(), workers, how), FarmDevice(workers, how)
        found = tune(kernel(), search, settings, run=run, observers=[heard], device=device)
    assert time.monotonic() - began < 30
    assert found.search.stopped == "interrupted" and found.decision is not None
    trials = list(Run.open(tmp_path / "run").trials())
    assert len(trials) == found.search.evaluations >= 20
    assert {t.move.partition(":")[0] for t in trials} == {"chain 0", "chain 1"}
    assert set(workers.map(process, range(20))) == victims


class Moved(Synthetic):
    """The worker of the first answers is lost; another one, with another GPU, decides."""

    asked = 0

    @property
    def about(self) -> Mapping[str, str]:
        return {"gpu": "A" if self.asked < 2 else "B"}

    def evaluate(self, cubin: bytes) -> Outcome:
        self.asked += 1
        return super().evaluate(cubin)


def test_the_gpu_is_the_one_that_answered_last() -> None:
    device = Moved(kernel().cubin)
    there = FarmDevice(Inline(), opening(lambda *_: device))
    assert there.about == {"gpu": "A"}
    there.evaluate(kernel().cubin)
    assert there.about == {"gpu": "A"}
    there.evaluate(kernel().cubin)
    assert there.about == {"gpu": "B"}


@pytest.fixture(scope="module")
def lonely() -> Iterator[str]:
    """The address of a scheduler without workers."""
    options = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": options}
    with distributed.SpecCluster({}, scheduler) as cluster:
        yield str(cluster.scheduler_address)


def test_a_scheduler_without_workers(lonely: str) -> None:
    with pytest.raises(MissingPart, match=r"0 Dask workers at tcp://.* after 0.5 s"):
        farm.remote(lonely, patience=0.5).__enter__()


def test_workers_that_never_come_back(lonely: str) -> None:
    with distributed.Client(lonely) as client, pytest.raises(MissingPart, match="no worker has"):
        Farm(client, 1, patience=0.5).map(process, [1])


def test_a_scheduler_with_workers(workers: Farm) -> None:
    with farm.remote(workers.client.scheduler.address) as again:
        assert again.workers == 2
        assert set(again.map(gpu, range(20))) == {"0", "1"}


def test_an_address_that_is_none() -> None:
    with pytest.raises(BadInput, match=r"give the address that `dask scheduler` prints"):
        farm.remote("127.0.0.1:9").__enter__()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--workers", "2"], "--objective gpu"),
        (["--scheduler", "tcp://127.0.0.1:9"], "--objective gpu"),
        (["--workers", "0", "--objective", "gpu"], "1 or more"),
    ],
)
def test_workers_are_for_measuring(
    more: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["nostall", "tune", "/nothing.cubin", *more])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and why in capfd.readouterr().err
