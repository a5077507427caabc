"""Launcher of a run: starts one process per GPU with torchrun's agent and reports one error."""

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
from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.parallel.errors import BadPlan, RunFailed
from nostall.parallel.execute.launcher import loopback
from nostall.parallel.execute.launcher.failures import RankExit, RankFailure, root_cause
from nostall.parallel.execute.run_config import RunConfig, RunResult, error_file, result_file

_LOCAL_ENDPOINT = "localhost:0"
_MAX_STDERR_CHARACTERS = 20_000
"""Last characters of a failed rank's standard error that are searched for the cause."""


@dataclass(frozen=True)
class Nodes:
    """Machines of a run."""

    count: int = 1
    endpoint: str = _LOCAL_ENDPOINT
    """``host:port`` of the first machine, the same on all; unused on one machine, whose ports are
    on the loopback interface."""
    run_id: str = ""
    """Identifier of the run, the same on all machines; empty for a random one."""


def launch_ranks(
    config: RunConfig, gpus: int, folder: Path, nodes: Nodes | None = None
) -> RunResult | None:
    """Run a plan on ``gpus`` processes, this machine's share of them here.

    ``folder`` holds the config, results and logs.  Returns None on machines other than that of rank
    0.  Raises the root cause if a rank fails: :class:`BadInput`, :class:`MissingPart`, or
    :class:`RunFailed` if a rank failed or waited longer than the deadline.
    """
    nodes = nodes or Nodes()
    if gpus % nodes.count:
        raise BadPlan(
            f"{gpus} GPUs on {nodes.count} nodes; the number of GPUs must be a multiple of --nodes"
        )
    create_folder(folder)
    for old in (result_file(folder), *(error_file(folder, rank) for rank in range(gpus))):
        old.unlink(missing_ok=True)
    config_path = folder / "run_config.json"
    write_text_atomically(config_path, json.dumps(asdict(config)) + "\n")
    launch_config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=gpus // nodes.count,
        run_id=nodes.run_id or uuid.uuid4().hex,
        rdzv_backend=loopback.BACKEND if nodes.count == 1 else "c10d",
        rdzv_endpoint=nodes.endpoint,
        rdzv_configs={"join_timeout": max(1, round(config.deadline))},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    loopback.register()
    # The agent's report of a failure is a page long; nostall's error is one line and names the
    # logs.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launch = elastic_launch(launch_config, sys.executable)
    try:
        launch("-m", "nostall.parallel.execute.launcher.worker", str(config_path))
    except ChildFailedError as error:
        raise _root_cause(error, config, folder, gpus) from error
    except SignalException as error:  # the agent converts signals to these
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise SystemExit(128 + error.sigval) from error
    except (RendezvousError, DistError) as error:
        line = str(error).partition("\n")[0][:300]
        raise RunFailed(
            f"the machines of the run did not connect: {line}; run the same command on "
            f"{nodes.count} machines, with an --endpoint ({nodes.endpoint}) that all can reach"
        ) from error
    if not result_file(folder).exists():
        return None
    return RunResult(**json.loads(result_file(folder).read_text(encoding="utf-8")))


def _root_cause(
    error: ChildFailedError, config: RunConfig, folder: Path, gpus: int
) -> NostallError:
    reported = {
        rank: RankFailure(**json.loads(error_file(folder, rank).read_text(encoding="utf-8")))
        for rank in range(gpus)
        if error_file(folder, rank).exists()
    }
    exits = {
        rank: RankExit(end.exitcode, end.timestamp, _stderr_tail(folder, end.local_rank))
        for rank, end in error.failures.items()
    }
    return root_cause(reported, exits, config.deadline, str(folder / "logs"))


def _stderr_tail(folder: Path, local_rank: int) -> str:
    """The last characters that a rank wrote to its standard error."""
    files = sorted((folder / "logs").glob(f"*/attempt_0/{local_rank}/stderr.log"))
    if not files:
        return ""
    return files[-1].read_text(encoding="utf-8", errors="replace")[-_MAX_STDERR_CHARACTERS:]
