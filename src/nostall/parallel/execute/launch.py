"""Starting a run: one process a GPU under torchrun's agent, and one clear error when it fails."""

from __future__ import annotations

import json
import logging
import signal
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nostall.core.errors import NostallError
from nostall.core.files import write_atomically
from nostall.parallel.errors import BadPlan, RunFailed
from nostall.parallel.execute.failures import Exit, Failure, cause
from nostall.parallel.execute.order import Order, Ran, error_file, result_file

_LOCAL = "localhost:0"
_TAIL = 20_000
"""Characters of a rank's output that are looked at when it fails."""


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
        rdzv_configs={"join_timeout": max(1, round(order.deadline))},
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
    except SignalException as stopped:  # the agent turns signals into these
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise SystemExit(128 + stopped.sigval) from stopped
    except (RendezvousError, DistError) as lost:
        line = str(lost).partition("\n")[0][:300]
        raise RunFailed(
            f"the machines of the run did not come together: {line}; run the same command on "
            f"{nodes.count} machines, with an --endpoint ({nodes.endpoint}) that all can reach"
        ) from lost
    if not result_file(folder).exists():
        return None
    return Ran(**json.loads(result_file(folder).read_text(encoding="utf-8")))


def _cause(failed: ChildFailedError, order: Order, folder: Path, gpus: int) -> NostallError:
    told = {
        rank: Failure(**json.loads(error_file(folder, rank).read_text(encoding="utf-8")))
        for rank in range(gpus)
        if error_file(folder, rank).exists()
    }
    exits = {
        rank: Exit(end.exitcode, end.timestamp, _printed(folder, end.local_rank))
        for rank, end in failed.failures.items()
    }
    return cause(told, exits, order.deadline, str(folder / "logs"))


def _printed(folder: Path, local_rank: int) -> str:
    """The end of what a rank wrote to its standard error."""
    files = sorted((folder / "logs").glob(f"*/attempt_0/{local_rank}/stderr.log"))
    return files[-1].read_text(encoding="utf-8", errors="replace")[-_TAIL:] if files else ""
