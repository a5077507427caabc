"""One rank of ``nostall launch``, started by torchrun: ``python -m ...execute.worker ORDER.json``.

What went wrong is written to the order's folder, where the launcher looks for it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nostall.core.errors import NostallError
from nostall.core.files import write_atomically
from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.failures import Failure, failure_of
from nostall.parallel.execute.order import Order, Ran, error_file, result_file
from nostall.parallel.execute.run import check_fits, run_plan
from nostall.parallel.files import load_plan
from nostall.parallel.module.job import load_job
from nostall.parallel.module.layering import GRANULARITIES
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Workload


def main(order: Order, folder: Path) -> None:
    """Run this rank; exits with the code of the error that stopped it."""
    rank = int(os.environ["RANK"])
    try:
        ran = work(order)
    except NostallError as error:
        _report(error_file(folder, rank), asdict(Failure(str(error), error.exit_code)))
        sys.exit(error.exit_code)
    except Exception as error:  # torch's own errors: a lost peer, a time-out, no memory
        _report(error_file(folder, rank), asdict(failure_of(error)))
        raise
    if rank == 0:
        _report(result_file(folder), asdict(ran))
    if dist.is_initialized():
        dist.destroy_process_group()


def work(order: Order) -> Ran:
    """Join the group, build the job, train."""
    # Streams that share a queue wait for each other: messages for ones that wait for them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    planned, plan, _ = load_plan(Path(order.plan))
    device = _device(order)
    backend = "nccl" if device.type == "cuda" else "gloo"
    more: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=order.deadline), **more)
    if dist.get_world_size() != len(planned.cluster):
        raise BadPlan(
            f"{dist.get_world_size()} processes run and the plan's cluster has "
            f"{len(planned.cluster)} GPUs; start one process a GPU"
        )
    job = load_job(order.module)
    model = _model(job, planned)
    return run_plan(
        model,
        planned,
        plan,
        order.steps,
        device,
        engine=order.engine,
        check=order.check,
        deadline=order.deadline,
    )


def _model(job: Any, planned: Workload) -> Model:
    """The job in the layers that the plan speaks of, whichever way of cutting gives them."""
    names = tuple(layer.name for layer in planned.profile.layers)
    models = (Model(job, granularity) for granularity in GRANULARITIES)
    first = next(models)
    if first.names == names:
        return first
    found = next((model for model in models if model.names == names), None)
    check_fits(found or first, planned)
    return found or first


def _device(order: Order) -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if order.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
        raise BadPlan(
            f"rank {os.environ['RANK']} wants GPU {local} of {torch.cuda.device_count()} here; "
            "give --device cpu, or more --nodes"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _report(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(record) + "\n").encode())


def _end() -> NoReturn:
    """What jobs have to finish, without the end of the interpreter: in that a rank aborts now and
    then that has done all its work, as where threads of PyTorch come back to an interpreter that is
    gone (Python before 3.14)."""
    shutdown: Any = getattr(threading, "_shutdown")  # noqa: B009, typeshed does not know it
    shutdown()  # waits for threads, and has pools end theirs
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    main(Order(**json.loads(given.read_text(encoding="utf-8"))), given.parent)
    _end()
