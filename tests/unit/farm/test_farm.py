"""Searches on several workers: same results as on one device, lost workers, Ctrl-C."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.robustness.kill_resume import Slow, Synthetic, kernel

from nostall import farm
from nostall.cli.terminal.progress import Interruption
from nostall.core import BadInput, Budget, MissingPart, Run
from nostall.farm import DeviceSpec, Farm, FarmDevice
from nostall.gpu import (
    Device,
    Kernel,
    LocalGpu,
    MeasurementPlan,
    Outcome,
)
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal
from nostall.tuning.farm_search import Chain, ParallelChains, chain_seeds, run_chain
from nostall.tuning.gpu_objective import GpuObjective
from nostall.tuning.job import TuningResult, describe, tune
from nostall.tuning.settings import Settings
from tests.e2e.sockets import listening
from tests.unit.gpu.replayed_device import RecordingDevice, ReplayedDevice
from tests.unit.gpu.test_worker import make_fake

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.slow

SETTINGS = Settings(seed=5, evaluations=60, objective="gpu", rounds=12, checks=2)


class InlinePool:
    """A pool of two workers that runs everything in this process."""

    workers = 2

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        on_interrupt: Callable[[], None] | None = None,
    ) -> list[Any]:
        return [function(item) for item in items]

    def run_on_all(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@cache
def recording_device(cubin: bytes) -> RecordingDevice:
    return RecordingDevice(Synthetic(cubin))


def make_recording(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Device:
    return recording_device(kernel.cubin)


def make_replayed(path: Path, kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Device:
    return Slow(ReplayedDevice(path))


def device_spec(make: Any) -> DeviceSpec:
    source = kernel()
    assert source.launch is not None
    return DeviceSpec(Kernel(source.cubin, source.kernel, source.launch), MeasurementPlan(), make)


def tune_on(pool: Any, make: Any, run: Run | None = None) -> TuningResult:
    spec = device_spec(make)
    search = ParallelChains(Anneal(), pool, spec)
    return tune(kernel(), search, SETTINGS, run=run, device=FarmDevice(pool, spec))


def deterministic_part(tuned: TuningResult) -> tuple[Any, ...]:
    """The part of a result that does not depend on the workers and on time."""
    search = tuned.search
    numbers = (search.evaluations, search.start_measurement, search.best_measurement)
    return (tuned.cubin, tuned.decision, tuned.num_moved, tuned.num_retimed, *numbers)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[TuningResult, Path]:
    """The result of both chains on a single device, and the recording of its measurements."""
    folder = tmp_path_factory.mktemp("farm")
    with Run.create(folder / "run", "tune", describe(kernel(), SETTINGS)) as run:
        tuned = tune_on(InlinePool(), make_recording, run)
    recording_device(kernel().cubin).save(folder / "measured.json")
    return tuned, folder / "measured.json"


@pytest.fixture(scope="module")
def workers() -> Iterator[Farm]:
    with farm.local(2) as pool:
        yield pool


def test_local_workers_ask_for_a_secret(workers: Farm) -> None:
    """Whoever can reach a scheduler's port can run code on its workers."""
    info = workers.client.scheduler_info()
    addresses = [info["address"], *info["workers"]]
    assert len(addresses) == 3
    for address in addresses:
        assert address.startswith("tls://127.0.0.1:")
        place = address.removeprefix("tls://")
        with pytest.raises((OSError, TimeoutError)):
            distributed.Client(f"tcp://{place}", timeout=2)
        with pytest.raises((OSError, TimeoutError)):
            stranger = distributed.Security.temporary()
            distributed.Client(address, security=stranger, timeout=2)
    assert {address for _, address in listening(os.getpid())} == {"127.0.0.1"}


def process_id(_: object) -> int:
    return os.getpid()


def test_chains_equal_single_searches_with_their_seeds(single: tuple[TuningResult, Path]) -> None:
    assert chain_seeds(7, 1) == [7] and len(set(chain_seeds(7, 64))) == 64
    source = kernel()
    program = Program.from_cubin(source.cubin)
    space, budget = ScheduleSpace(program, program.kernel(source.kernel)), SETTINGS.budget
    results = []
    for seed in chain_seeds(SETTINGS.seed, 2):
        measured = GpuObjective(space, Synthetic(source.cubin))
        results.append(Anneal().run(space, measured, budget, seed=seed))
    pool, spec = InlinePool(), device_spec(make_recording)
    measured = GpuObjective(space, Synthetic(b""))
    pool.workers = 1
    one_chain = ParallelChains(Anneal(), pool, spec).run(
        space, measured, budget, seed=SETTINGS.seed
    )
    assert one_chain.checkpoint.best == results[0].checkpoint.best
    assert one_chain.best_measurement.value == results[0].best_measurement.value
    assert one_chain.evaluations == results[0].evaluations
    both = single[0].search
    assert both.evaluations == sum(r.evaluations for r in results)
    assert both.best_measurement.value == min(r.best_measurement.value for r in results)


def test_the_result_does_not_change_if_a_worker_is_killed(
    single: tuple[TuningResult, Path], workers: Farm, tmp_path: Path
) -> None:
    expected, path = single
    processes = sorted(set(workers.map(process_id, range(20))))
    assert len(processes) == 2
    opened = tmp_path / "opened"

    def kill() -> None:
        while not opened.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(processes[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    tuned = tune_on(workers, partial(make_replayed_and_report, path, opened, processes[0]))
    killer.join(10)
    assert opened.exists() and not killer.is_alive()
    assert processes[0] not in workers.map(process_id, range(20))
    assert deterministic_part(tuned) == deterministic_part(expected)


def make_replayed_and_report(
    path: Path, opened: Path, process: int, kernel: Kernel, plan: MeasurementPlan, ordinal: int
) -> Device:
    """Create a replayed device; in ``process`` also create the file ``opened`` and wait."""
    if os.getpid() == process:
        opened.touch()
        time.sleep(1.0)
    return make_replayed(path, kernel, plan, ordinal)


def test_the_run_directory_has_the_trials_of_all_chains(single: tuple[TuningResult, Path]) -> None:
    run = Run.open(single[1].parent / "run")
    trials = list(run.trials())
    assert len(trials) == single[0].search.evaluations == 2 * (SETTINGS.evaluations or 0)
    assert {t.move.partition(":")[0] for t in trials} == {"chain 0", "chain 1"}
    assert trials[-1].best == min(t.value for t in trials)
    assert all(a.best >= b.best for a, b in pairwise(trials))
    assert run.record.result is not None and run.record.result["fates"]["timed"] > len(trials)


def raise_bad_input(_: object) -> None:
    raise BadInput("the kernel is not deterministic")


def test_an_error_in_a_worker_is_raised_in_the_caller(workers: Farm) -> None:
    with pytest.raises(BadInput, match="not deterministic"):
        workers.map(raise_bad_input, [1])
    with pytest.raises(BadInput, match="not deterministic"):
        workers.call(raise_bad_input, 1)


def worker_gpu(_: object) -> str | None:
    return os.environ.get(farm.farm.GPU_VARIABLE)


def raise_timeout(_: object) -> None:
    raise TimeoutError("no answer")


def test_a_timeout_in_a_worker_is_raised_in_the_caller(workers: Farm) -> None:
    with pytest.raises(TimeoutError, match="no answer"):
        workers.map(raise_timeout, [1])


def test_each_local_worker_has_its_own_gpu(workers: Farm) -> None:
    assert set(workers.map(worker_gpu, range(20))) == {"0", "1"}


def test_calls_stay_on_one_worker(workers: Farm) -> None:
    assert len({workers.call(process_id, None) for _ in range(6)}) == 1


def make_local(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Device:
    return LocalGpu(Kernel(b"", "k", kernel.launch), plan, ordinal, make=make_fake)


def test_a_worker_uses_its_gpu_in_a_child_process(workers: Farm) -> None:
    device = FarmDevice(workers, device_spec(make_local))
    assert device.evaluate(b"good").status == "timed"
    assert device.evaluate(b"die").status == "fault"
    assert device.compare(b"good", 4, 1).timing is not None
    child = int(device.info["process"])
    assert child not in workers.map(process_id, range(20))
    workers.run_on_all(farm.close_device, device_spec(make_recording))  # another device
    assert Path(f"/proc/{child}").exists()
    workers.run_on_all(farm.close_device, device_spec(make_local))
    assert not Path(f"/proc/{child}").exists()


@dataclass(frozen=True)
class MakeReporting:
    """Creates devices that create a file at their ``after``-th evaluation.

    A dataclass, so that copies in several processes are equal.
    """

    path: Path
    after: int = 1

    def __call__(self, kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Device:
        return ReportingDevice(Slow(Synthetic(kernel.cubin)), self)


class ReportingDevice:
    def __init__(self, device: Device, maker: MakeReporting) -> None:
        self.device, self.maker, self.info, self.evaluations = device, maker, device.info, 0

    def evaluate(self, cubin: bytes) -> Outcome:
        self.evaluations += 1
        if self.evaluations == self.maker.after:
            self.maker.path.touch()
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)


def test_a_search_ends_when_its_device_is_closed(workers: Farm, tmp_path: Path) -> None:
    """As after Ctrl-C: the search must not use up its budget."""
    spec = device_spec(MakeReporting(tmp_path / "started"))
    chain = Chain("run", Anneal(), spec, Budget(seconds=30), 0, None)
    future = workers.client.submit(run_chain, chain, pure=False)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    workers.run_on_all(farm.close_device, spec)
    assert future.result(timeout=5).stopped == "interrupted"


def test_ctrl_c_keeps_the_results_of_the_chains(workers: Farm, tmp_path: Path) -> None:
    """Ctrl-C in a terminal also reaches the workers."""
    spec = device_spec(MakeReporting(tmp_path / "started", after=20))
    processes = set(workers.map(process_id, range(20)))

    def interrupt() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        for process in processes:
            os.kill(process, signal.SIGINT)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    settings = replace(SETTINGS, evaluations=None, seconds=60.0)
    start = time.monotonic()
    with Interruption() as interruption, Run.create(tmp_path / "run", "tune", {}) as run:
        search, device = ParallelChains(Anneal(), workers, spec), FarmDevice(workers, spec)
        tuned = tune(kernel(), search, settings, run=run, observers=[interruption], device=device)
    assert time.monotonic() - start < 30
    assert tuned.search.stopped == "interrupted" and tuned.decision is not None
    trials = list(Run.open(tmp_path / "run").trials())
    assert len(trials) == tuned.search.evaluations >= 20
    assert {t.move.partition(":")[0] for t in trials} == {"chain 0", "chain 1"}
    assert set(workers.map(process_id, range(20))) == processes


class MovingDevice(Synthetic):
    """A device that moves from GPU A to GPU B at its second evaluation."""

    evaluations = 0

    @property
    def info(self) -> Mapping[str, str]:
        return {"gpu": "A" if self.evaluations < 2 else "B"}

    def evaluate(self, cubin: bytes) -> Outcome:
        self.evaluations += 1
        return super().evaluate(cubin)


def test_info_describes_the_gpu_of_the_last_outcome() -> None:
    device = MovingDevice(kernel().cubin)
    farm_device = FarmDevice(InlinePool(), device_spec(lambda *_: device))
    assert farm_device.info == {"gpu": "A"}
    farm_device.evaluate(kernel().cubin)
    assert farm_device.info == {"gpu": "A"}
    farm_device.evaluate(kernel().cubin)
    assert farm_device.info == {"gpu": "B"}


@pytest.fixture(scope="module")
def empty_scheduler() -> Iterator[str]:
    """The address of a scheduler without workers."""
    options = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": options}
    with distributed.SpecCluster({}, scheduler) as cluster:
        yield str(cluster.scheduler_address)


def test_a_scheduler_without_workers(empty_scheduler: str) -> None:
    with pytest.raises(MissingPart, match=r"0 Dask workers at tcp://.* after 0.5 s"):
        farm.remote(empty_scheduler, wait_seconds=0.5).__enter__()


def test_workers_that_never_return(empty_scheduler: str) -> None:
    with distributed.Client(empty_scheduler) as client:
        pool = Farm(client, 1, wait_seconds=0.5)
        with pytest.raises(MissingPart, match="no worker has"):
            pool.map(process_id, [1])


def test_a_scheduler_with_workers(workers: Farm) -> None:
    security = workers.client.security
    keys = {
        "distributed.comm.tls.ca-file": security.tls_ca_file,
        "distributed.comm.tls.client.key": security.tls_client_key,
        "distributed.comm.tls.client.cert": security.tls_client_cert,
    }
    with (
        dask.config.set(keys),
        farm.remote(workers.client.scheduler.address) as pool,
    ):
        assert pool.workers == 2
        assert set(pool.map(worker_gpu, range(20))) == {"0", "1"}


def test_a_tls_scheduler_without_keys() -> None:
    with pytest.raises(BadInput, match="DASK_DISTRIBUTED__COMM__TLS__CA_FILE"):
        farm.remote("tls://127.0.0.1:9").__enter__()


def test_an_invalid_address() -> None:
    with pytest.raises(BadInput, match=r"give the address that `dask scheduler` prints"):
        farm.remote("127.0.0.1:9").__enter__()
