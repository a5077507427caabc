"""When the ``p2p`` engine starts receives: as passes need them, earlier from other servers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="execution needs the extra nostall[torch]")

from nostall.parallel.execute.engines import p2p  # noqa: E402
from nostall.parallel.execute.engines.p2p import P2PExecutor  # noqa: E402
from nostall.parallel.rank_schedule import Operation  # noqa: E402


@dataclass
class _Link:
    """A boundary whose receives are recorded."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    events: list[str]

    def receive_forward(self, m: int) -> Any:
        self.events.append(f"receive {m}")
        return SimpleNamespace(wait=dict)

    def finish(self) -> None:
        pass


def events(monkeypatch: pytest.MonkeyPatch, server: tuple[int, ...], *, ahead: bool) -> list[str]:
    """Receives and passes of the last of two stages, with two forward passes."""
    monkeypatch.setattr(p2p, "AHEAD_WITHIN_SERVER", ahead)
    found: list[str] = []
    nothing = SimpleNamespace(
        reduce_during_backward=lambda: None, finish=lambda: None, reduce_stage=lambda *_: None
    )
    passes = SimpleNamespace(forward=lambda m, *_: (found.append(f"pass {m}"), ({}, None))[1])
    executor = object.__new__(P2PExecutor)
    vars(executor).update(
        device=torch.device("cpu"), replica=0, _is_cold=False, gradients=nothing, _local={},
        operations=[Operation("F", 1, 0), Operation("F", 1, 1)], _receives={}, passes={1: passes},
        _last_backward={1: Operation("B", 1, 1)}, links={0: _Link((0,), (1,), found)},
        slices=SimpleNamespace(samples=lambda s, replica, m: (m, m + 1)),
        plan=SimpleNamespace(stages=[None, None]),
        workload=SimpleNamespace(cluster=SimpleNamespace(server=server), global_batch=2),
        model=SimpleNamespace(job=SimpleNamespace(reduction="mean")),
        _segment=lambda *_: None, _slice=lambda *_: None,
    )  # fmt: skip
    executor.step(None, None)
    return found


AS_NEEDED = ["receive 0", "pass 0", "receive 1", "pass 1"]
EARLY = ["receive 0", "receive 1", "pass 0", "pass 1"]


@pytest.mark.parametrize(
    ("server", "ahead", "expected"),
    [((0, 0), False, AS_NEEDED), ((0, 1), False, EARLY), ((0, 0), True, EARLY)],
)
def test_receives_start_early_only_between_servers(
    monkeypatch: pytest.MonkeyPatch, server: tuple[int, ...], ahead: bool, expected: list[str]
) -> None:
    assert events(monkeypatch, server, ahead=ahead) == expected
