"""Starting a run: one process a GPU under torchrun's agent, and one clear error when it fails."""

from __future__ import annotations

import json
import logging
import signal
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nostall.core.errors import BadInput, MissingPart
from nostall.core.run import write_atomically
from nostall.parallel.errors import BadPlan, RunFailed
from nostall.parallel.execute.order import Order, Ran, error_file, result_file

_LOCAL = "localhost:0"
_BAD_INPUT = 2


@dataclass(frozen=True)
class Nodes:
    """Machines of a run; ``endpoint`` is host:port of the first one where there are several."""

    count: int = 1
    endpoint: str = _LOCAL
    run: str = ""


def launch_ranks(order: Order, gpus: int, folder: Path, nodes: Nodes | None = None) -> Ran | None:
    """Run on ``gpus`` processes; None on machines other than the one with rank 0.

    Raises what stopped the first rank: :class:`BadInput`, :class:`MissingPart`, or
    :class:`RunFailed` for a rank that died or waited longer than the deadline.
    """
    nodes = nodes or Nodes()
    if gpus % nodes.count:
        raise BadPlan(f"{gpus} GPUs on {nodes.count} nodes; allowed is a whole number on each")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (result_file(folder), *(error_file(folder, rank) for rank in range(gpus))):
        old.unlink(missing_ok=True)
    given = folder / "order.json"
    write_atomically(given, (json.dumps(asdict(order)) + "\n").encode())
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=gpus // nodes.count,
        run_id=nodes.run or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.endpoint,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    # The agent's own account of a failure is a page long; ours is one line and names the logs.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "nostall.parallel.execute.worker", str(given))
    except ChildFailedError as failed:
        raise _cause(failed, order, folder, gpus) from failed
    if not result_file(folder).exists():
        return None
    return Ran(**json.loads(result_file(folder).read_text(encoding="utf-8")))


def _cause(failed: ChildFailedError, order: Order, folder: Path, gpus: int) -> Exception:
    """The one error worth telling: bad input first, then who died, then who waited in vain."""
    told: dict[int, dict[str, Any]] = {
        rank: json.loads(error_file(folder, rank).read_text(encoding="utf-8"))
        for rank in range(gpus)
        if error_file(folder, rank).exists()
    }
    for rank in sorted(told):
        if "kind" not in told[rank]:
            text = told[rank]["text"]
            return BadInput(text) if told[rank]["code"] == _BAD_INPUT else MissingPart(text)
    logs = f"see {folder / 'logs'}"
    first, failure = failed.get_first_failure()
    deaths = {
        rank: f.exitcode
        for rank, f in failed.failures.items()
        if f.exitcode < 0 and -f.exitcode != signal.SIGTERM
    }
    if deaths:
        rank, code = min(deaths.items())
        return RunFailed(
            f"rank {rank} was killed by {signal.Signals(-code).name}; the other ranks were "
            f"stopped; {logs}, and start again"
        )
    for rank in sorted(told):
        if told[rank]["kind"] == "error":
            text = told[rank]["text"].splitlines()[0][:300]
            return RunFailed(f"rank {rank} stopped: {text}; {logs}")
    if told:
        rank = min(told)
        return RunFailed(
            f"rank {rank} waited for another rank for more than {order.deadline:g} s; a rank "
            f"hangs, or --deadline is too short; {logs}"
        )
    return RunFailed(f"rank {first} ended with exit code {failure.exitcode}; {logs}")
