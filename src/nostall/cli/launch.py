"""``nostall launch``: train by a plan, one process a GPU, and compare with what was predicted."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import BadInput
from nostall.parallel.files import load_plan, planned_module
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate import simulated_s
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.execute.order import Engine, Ran

ENGINES = ("auto", "p2p", "torch")


def launch(
    plan: Annotated[Path, typer.Argument(help="A plan file of nostall plan.")],
    module: Annotated[
        str | None,
        typer.Option(help="path.py:build; by default the one that the plan was made from."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Iterations.")] = 10,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="torch (torch.distributed.pipelining, equal replication), p2p (any plan), or "
            "auto: the former where it can."
        ),
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option(help="Train in a single process too, and compare losses and gradients."),
    ] = False,
    deadline: Annotated[
        float, typer.Option(help="Seconds that a rank may wait for another one.")
    ] = 300.0,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; run the command on each.")] = 1,
    endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first machine, for several.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep what the ranks print here; else only of failures.")
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Train by a plan with torchrun underneath; every iteration's time is measured.

    Exit code 1 when --check finds a difference, 3 when a rank dies or hangs.
    """
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is unknown; allowed are {', '.join(ENGINES)}")
    if not 0 < deadline < float("inf"):
        raise BadInput(f"--deadline {deadline}; allowed is a number of seconds above 0")
    if nodes > 1 and endpoint is None:
        raise BadInput(f"--nodes {nodes} needs --endpoint HOST:PORT, the same on each machine")
    work, given, _ = load_plan(plan)
    target = module or planned_module(plan)
    if target is None:
        raise BadInput(
            f"{plan} was made from a profile file and names no module; give --module path.py:build"
        )
    file = Path(target.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        raise BadInput(f"module {target!r}; allowed is path.py:build with a file that is there")
    from nostall.parallel.execute.launch import Nodes, launch_ranks
    from nostall.parallel.execute.order import Order, device_of

    order = Order(
        str(plan.resolve()),
        target,
        steps,
        device_of(device),
        cast("Engine", engine),
        check,
        deadline,
    )
    folder = logs or Path(tempfile.mkdtemp(prefix="nostall-launch-"))
    machines = Nodes(nodes, endpoint, plan.stem) if endpoint else Nodes()
    ran = launch_ranks(order, len(work.cluster), folder, machines)
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    if ran is None:
        out.print("this machine's ranks are done; the machine with rank 0 says what was measured")
        return
    _show(ran, work, given, format)
    if ran.worst_gradient is not None and ran.worst_gradient > 1:
        raise typer.Exit(1)


def _show(ran: Ran, work: Workload, plan: Plan, format: Format) -> None:
    """Measured beside modelled; the first iteration is left out where there are more."""
    counted = ran.seconds[1:] or ran.seconds
    measured, modelled = statistics.median(counted), simulated_s(work, plan)
    document: dict[str, Any] = {
        "measured_iteration_s": measured,
        "predicted_iteration_s": modelled,
        "kind": "measured",
        "split": plan.split,
        "policy": plan.policy,
        **asdict(ran),
    }
    if format is Format.JSON:
        show_json(document)
        return
    time = Scale("s", measured)
    rows = [
        (step, f"{loss:.6g}", time(seconds))
        for step, (loss, seconds) in enumerate(zip(ran.losses, ran.seconds, strict=True))
    ]
    show_table(f"{work.profile.name} on {work.cluster.name}", ("step", "loss", "measured"), rows)
    out.print(
        f"measured iteration {time(measured)} (median), modelled {time(modelled)}: "
        f"{plan.split}, order {plan.policy}, engine {ran.engine}"
    )
    if ran.worst_gradient is not None:
        word = "equal to" if ran.worst_gradient <= 1 else "DIFFERENT from"
        out.print(
            f"gradients {word} those of a single process: largest difference "
            f"{ran.worst_gradient:.3g} of what is allowed"
        )
