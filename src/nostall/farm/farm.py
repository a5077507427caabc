"""Dask workers, of this machine or of others, as something that calls functions elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Protocol, TypeVar

from nostall.core.errors import BadInput, MissingPart

A = TypeVar("A")
B = TypeVar("B")

GPU = "NOSTALL_WORKER_GPU"
"""Environment variable of a worker: the number of the GPU that it uses, 0 unless set."""
CONNECTING = 10.0
"""Seconds that a scheduler may take to answer."""
PATIENCE = 20.0
"""Seconds to wait for a worker when there is none: at the start, and when the last one is lost."""
_POLL = 1.0
_DEAF = {"preload": ["nostall.farm.ignore_sigint"]}
"""A local worker's option: Ctrl-C in a terminal reaches it, too, and is not meant for it."""
_GONE = "the Dask scheduler is gone; start the run anew"


class Works(Protocol):
    """What a search over several devices needs; :class:`Farm`, or a test's stand-in."""

    @property
    def workers(self) -> int: ...

    def map(
        self,
        function: Callable[[A], B],
        items: Sequence[A],
        *,
        ending: Callable[[], None] | None = None,
    ) -> list[B]: ...

    def call(self, function: Callable[..., B], *arguments: Any) -> B: ...

    def everywhere(self, function: Callable[..., None], *arguments: Any) -> None: ...


class Farm:
    """Runs functions on Dask workers.

    What a lost worker was doing is done again by another one.  Errors that a function raises are
    raised here; :class:`MissingPart` says that no worker is left, or that a function took three
    workers down with it.
    """

    def __init__(self, client: Any, workers: int, patience: float = PATIENCE) -> None:
        self.client, self.workers, self.patience = client, workers, patience
        self._favourite: str | None = None

    def map(
        self,
        function: Callable[[A], B],
        items: Sequence[A],
        *,
        ending: Callable[[], None] | None = None,
    ) -> list[B]:
        """One call per item, spread over the workers; answers in the order of ``items``.

        After a first Ctrl-C ``ending`` is to make the calls end soon, and their answers are awaited
        (it is called again and again, since a call that lost its worker begins anew); without it,
        and after a second one, they are given up.
        """
        futures = [self.client.submit(function, item, pure=False) for item in items]
        try:
            return self._gather(futures)
        except KeyboardInterrupt:
            if ending is None:
                raise
            return self._gather(futures, ending)
        finally:
            self._give_up(futures)

    def call(self, function: Callable[..., B], *arguments: Any) -> B:
        """One call on the same worker as the calls before, as long as that one lives."""
        there = self._there()
        if self._favourite not in there and there:
            self._favourite = min(there)
        where = [self._favourite] if self._favourite in there else None
        future = self.client.submit(
            function, *arguments, pure=False, workers=where, allow_other_workers=True
        )
        try:
            answer: B = self._gather([future])[0]
            return answer
        finally:
            self._give_up([future])

    def everywhere(self, function: Callable[..., None], *arguments: Any) -> None:
        """One call in every worker that can still be reached."""
        with suppress(OSError, RuntimeError):
            self.client.run(function, *arguments)

    def _gather(
        self, futures: list[Any], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        seen = monotonic()
        meanwhile()
        while not self._ended(futures):
            meanwhile()
            seen = monotonic() if self._there() else seen
            if monotonic() - seen > self.patience:
                raise MissingPart(
                    f"no worker has been there for {self.patience:g} s; what they found is "
                    "lost; see why they ended, and start the run anew"
                )
        return [self._answer(future) for future in futures]

    def _give_up(self, futures: list[Any]) -> None:
        self.client.cancel([future for future in futures if not future.done()])

    def _ended(self, futures: list[Any]) -> bool:
        """Whether all are done, at the latest after ``_POLL`` seconds."""
        from distributed import CancelledError, wait

        try:
            wait(futures, timeout=_POLL)
        except TimeoutError:
            return False
        except CancelledError as error:
            raise MissingPart(_GONE) from error
        return True

    def _answer(self, future: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            raise MissingPart(
                f"three workers ended while they did the same work ({error}); look at their logs"
            ) from error
        except CancelledError as error:
            raise MissingPart(_GONE) from error

    def _there(self) -> set[str]:
        """Addresses of the workers that are there now."""
        try:
            return set(self.client.nthreads())
        except (OSError, RuntimeError) as error:
            raise MissingPart(
                f"the Dask scheduler is gone ({error}); start the run anew"
            ) from error


@contextmanager
def local(workers: int, patience: float = PATIENCE) -> Iterator[Farm]:
    """``workers`` processes on this machine; number i uses GPU i and is started anew if it ends."""
    dask, distributed = _dask()
    here = {"host": "127.0.0.1", "port": 0, "dashboard": False}
    one = {**here, "nthreads": 1, "memory_limit": 0, "silence_logs": logging.CRITICAL}
    nannies = {
        i: {"cls": distributed.Nanny, "options": {**one, "env": {GPU: str(i)}, **_DEAF}}
        for i in range(workers)
    }
    options = {**here, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": options}
    # A daemon may not have children, and each GPU is held by a child of its worker.
    with (
        dask.config.set({"distributed.worker.daemon": False}),
        distributed.SpecCluster(nannies, scheduler, silence_logs=logging.CRITICAL) as cluster,
        distributed.Client(cluster) as client,
    ):
        _await_workers(client, workers, patience, "on this machine")
        yield Farm(client, workers, patience)


@contextmanager
def remote(address: str, workers: int | None = None, patience: float = PATIENCE) -> Iterator[Farm]:
    """The workers of a running Dask scheduler; ``workers``: how many to wait for (1 unless given).

    Each is to be started with one GPU (:data:`GPU` or ``CUDA_VISIBLE_DEVICES``) and as a process
    that may have children: ``DASK_DISTRIBUTED__WORKER__DAEMON=False dask worker ADDRESS``.
    """
    _, distributed = _dask()
    if not address.startswith(("tcp://", "tls://")):
        raise BadInput(
            f"--scheduler is {address!r}; give the address that `dask scheduler` prints, such as "
            "tcp://host:8786"
        )
    try:
        client = distributed.Client(address, timeout=CONNECTING)
    except (OSError, TimeoutError) as error:
        raise MissingPart(
            f"no Dask scheduler answers at {address} ({_first_line(error)}); start one with `dask "
            "scheduler`, or correct --scheduler"
        ) from error
    except ValueError as error:
        raise BadInput(
            f"--scheduler {address!r} is not understood ({_first_line(error)}); give tcp://host:8786"
        ) from error
    with client:
        _await_workers(client, workers or 1, patience, f"at {address}")
        yield Farm(client, workers or len(client.nthreads()), patience)


def _await_workers(client: Any, workers: int, patience: float, where: str) -> None:
    try:
        client.wait_for_workers(workers, timeout=patience)
    except TimeoutError as error:
        raise MissingPart(
            f"{len(client.nthreads())} Dask workers {where} after {patience:g} s, {workers} are "
            "needed; start them with `dask worker ADDRESS --nthreads 1`, one per GPU"
        ) from error


def _dask() -> tuple[Any, Any]:
    try:
        import dask
        import distributed
    except ImportError as error:
        raise MissingPart(
            f"work over several GPUs needs Dask ({error}); pip install 'nostall[farm]'"
        ) from error
    return dask, distributed


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
