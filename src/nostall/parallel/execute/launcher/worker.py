"""Process of one rank of ``nostall launch``, started by torchrun's agent with a config file.

Command: ``python -m nostall.parallel.execute.launcher.worker CONFIG.json``.  Errors and results
are written to the folder of the config file, where the launcher reads them.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nostall.core.errors import NostallError
from nostall.core.files.atomic import write_text_atomically
from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.launcher.failures import RankFailure, classify_error
from nostall.parallel.execute.launcher.loopback import use_loopback_interface
from nostall.parallel.execute.parts.any_plan import load_any_plan
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.pipeline_part import planned_model
from nostall.parallel.execute.run import (
    RunOptions,
    run_engine_plan,
    run_hybrid_plan,
    run_plan,
    run_sharding_plan,
)
from nostall.parallel.execute.run_config import RunConfig, RunResult, error_file, result_file
from nostall.parallel.module.job import load_job
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.plan_file import PlanFile


def main(config: RunConfig, folder: Path) -> None:
    """Run this rank and write its error or result; an error of nostall's sets the exit code."""
    rank = int(os.environ["RANK"])
    try:
        result = run_rank(config)
    except NostallError as error:
        _write(error_file(folder, rank), asdict(RankFailure(str(error), error.exit_code)))
        sys.exit(error.exit_code)
    except Exception as error:  # any error of torch or of the user's code is reported, then raised
        _write(error_file(folder, rank), asdict(classify_error(error)))
        raise
    if rank == 0:
        _write(result_file(folder), asdict(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_rank(config: RunConfig) -> RunResult:
    """Join the process group, build the job and train by the plan."""
    # CUDA streams that share a hardware queue wait for each other, so a message could wait for one
    # that can complete only after it.  More queues make this less likely.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    path = Path(config.plan)
    plan = load_any_plan(path)
    cluster = plan[0].cluster if isinstance(plan, tuple) else plan.cluster
    device = _local_device(config)
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if os.environ["GROUP_WORLD_SIZE"] == "1":  # all ranks are on this machine
        use_loopback_interface()
    dist.init_process_group(backend, timeout=timedelta(seconds=config.deadline), **device_id)
    if dist.get_world_size() != len(cluster):
        raise BadPlan(
            f"{dist.get_world_size()} processes run and the plan's cluster has "
            f"{len(cluster)} GPUs; start one process per GPU"
        )
    job = load_job(config.module)
    options = RunOptions(
        config.steps,
        device,
        engine=config.engine,
        check=config.check,
        deadline=config.deadline,
        compile=config.compile,
        capture=config.capture,
    )
    if isinstance(plan, PlanFile):
        return run_sharding_plan(job, plan, options)
    if isinstance(plan, EngineFile):
        return run_engine_plan(job, plan, options)
    if isinstance(plan, HybridFile):
        return run_hybrid_plan(job, plan, options)
    workload, pipeline, _ = plan
    return run_plan(planned_model(Computation(job, job), workload), workload, pipeline, options)


def _local_device(config: RunConfig) -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
        raise BadPlan(
            f"rank {os.environ['RANK']} needs GPU {local} and this machine has "
            f"{torch.cuda.device_count()} GPUs; give --device cpu, or more --nodes"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _write(path: Path, record: dict[str, Any]) -> None:
    write_text_atomically(path, json.dumps(record) + "\n")


def _exit_without_finalizing() -> NoReturn:
    """Wait for threads, run exit handlers and end the process without finalizing the interpreter.

    Finalizing can abort a rank whose work is done: PyTorch's threads may return to an interpreter
    that no longer exists (Python before 3.14).
    """
    shutdown: Any = getattr(threading, "_shutdown")  # noqa: B009, missing in typeshed
    shutdown()  # waits for non-daemon threads and ends thread pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    # Python would note Ctrl-C only after a wait for another rank, which may have ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config_path = Path(sys.argv[1])
    main(RunConfig(**json.loads(config_path.read_text(encoding="utf-8"))), config_path.parent)
    _exit_without_finalizing()
