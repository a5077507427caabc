"""Terminal output of ``nostall characterize`` for tables of jobs and of measured steps."""

from __future__ import annotations

from nostall.cli.terminal.console import out, show_table
from nostall.core.text.labels import shorten_all
from nostall.core.text.plurals import pluralize
from nostall.workload.characterization import JobsCharacterization, ScalingCharacterization
from nostall.workload.characterization.scaling import NodeSlowdown
from nostall.workload.hardware.default import CANDIDATES
from nostall.workload.model.breakdown import STEP_PARTS

MAX_JOBS = 12
"""Limit of the table of single jobs; larger populations have no such table."""
MAX_ROWS = 40
"""Rows of the table of slow-downs; --format json has all."""
MAX_NAME_LENGTH = 18
_JOB_CELLS = 62
_ARCHITECTURE_CELLS = 19
"""Cells of the other columns of the table of jobs, and of the gaps."""


def show_jobs(result: JobsCharacterization, *, is_default: bool = False) -> None:
    """Print the modelled shares, the resource ranking, the portings and the what-if questions.

    ``is_default`` says that the user did not choose the hardware.
    """
    hardware = result.population.hardware.name
    if is_default:
        out.print(_default_hardware_note(hardware))
    show_table(
        f"modelled shares of a step on {hardware}, weighted by GPU time, %",
        ("jobs", "count", "GPU time", *STEP_PARTS),
        [
            (
                group.name,
                group.jobs,
                f"{group.gpu_time:.1%}",
                *(f"{100 * group.by_gpu[part]:.1f}" for part in STEP_PARTS),
            )
            for group in result.groups
        ],
    )
    out.print(
        "perfect overlap of input, GPU work and weight traffic: modelled "
        f"{result.groups[0].overlap_gain:.2f}x the speed without overlap"
    )
    _show_single_jobs(result)
    first, second, *_ = result.resource_ranking.items()
    out.print(
        f"main bottleneck: {first[0]} (modelled {first[1]:.1%} of GPU time), then {second[0]} "
        f"({second[1]:.1%})"
    )
    _show_porting(result)
    for answer in result.what_if:
        out.print(
            f"what if {answer.question}: modelled {answer.mean_by_gpu:.2f}x the speed on "
            f"{hardware}, mean by GPU time ({answer.mean_by_job:.2f}x by job; "
            f"{pluralize(answer.jobs, 'job')})"
        )
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(f"{pluralize(len(result.population.jobs), 'job')}, {result.num_skipped} skipped")


def _default_hardware_note(name: str) -> str:
    if name == CANDIDATES[0]:
        return f"hardware: {name}, the cluster of arXiv:1910.05930; --hardware selects another one"
    return (
        f"hardware: {name}, the oldest preset with the precisions of the jobs; --hardware selects "
        "another one"
    )


def _show_single_jobs(result: JobsCharacterization) -> None:
    if len(result.population.jobs) > MAX_JOBS:
        return
    jobs = list(result.largest_jobs())
    room = out.width - _JOB_CELLS + _ARCHITECTURE_CELLS  # the architecture is left out before names
    names = shorten_all([job.name for job, _ in jobs], max(room, MAX_NAME_LENGTH))
    show_table(
        "modelled step of each job, milliseconds",
        ("job", "architecture", *STEP_PARTS, "total"),
        [
            (
                name,
                job.architecture.value,
                *(f"{1e3 * step.part(part):,.2f}" for part in STEP_PARTS),
                f"{1e3 * step.total:,.2f}",
            )
            for (job, step), name in zip(jobs, names, strict=True)
        ],
        optional=("architecture",),
    )


def _show_porting(result: JobsCharacterization) -> None:
    if not result.porting:
        return
    show_table(
        "PS/Worker jobs ported to another architecture: modelled throughput over that of PS/Worker",
        ("to", "jobs", "weights fit", "and faster", "mean", "median"),
        [
            (
                summary.target,
                summary.jobs,
                summary.fitting,
                f"{summary.faster:.1%}",
                f"{summary.mean_speedup:.2f}x",
                f"{summary.median_speedup:.2f}x",
            )
            for summary in result.porting
        ],
    )


def show_scaling(result: ScalingCharacterization) -> None:
    """Print the slow-down over several nodes, the model of the network and its predictions."""
    if result.measured:
        show_table(
            "step time over several nodes, as a multiple of the measured step on one node",
            ("model", "GPUs", "batch", "nodes", "1 node, ms", "measured", "modelled"),
            [_slowdown_row(row) for row in result.measured[:MAX_ROWS]],
        )
        if len(result.measured) > MAX_ROWS:
            out.print(f"{len(result.measured) - MAX_ROWS} more rows: --format json")
    if result.network is not None:
        network = result.network
        out.print(
            f"network between nodes: modelled {network.curve.share * network.peak / 1e9:.3g} GB/s "
            f"({network.curve.share:.1%} of the {network.peak / 1e9:.3g} GB/s of "
            f"{result.hardware.name}), {network.curve.overhead * 1e3:.3g} ms for each exchange; "
            f"communication is hidden by {network.hidden_share:.0%} of the computation"
        )
    for question, answers in result.predictions:
        show_table(
            f"what if {question.text}: modelled step time, as a multiple of the measured step on "
            "one node",
            ("model", "GPUs", "batch", "1 node, ms", "modelled", "90 % interval"),
            [_prediction_row(row) for row in answers[:MAX_ROWS]],
        )
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(f"{pluralize(result.num_steps, 'step')}, {result.num_skipped} skipped")


def _slowdown_row(row: NodeSlowdown) -> tuple[object, ...]:
    configuration = row.configuration
    return (
        _shorten(configuration.model),
        configuration.gpus,
        f"{configuration.batch:g}",
        row.nodes,
        f"{row.one_node_seconds * 1e3:.4g}",
        _multiple(row.measured_seconds, row),
        _multiple(row.modelled_seconds, row),
    )


def _prediction_row(row: NodeSlowdown) -> tuple[object, ...]:
    configuration = row.configuration
    low, high = row.interval or (None, None)
    return (
        _shorten(configuration.model),
        configuration.gpus,
        f"{configuration.batch:g}",
        f"{row.one_node_seconds * 1e3:.4g}",
        _multiple(row.modelled_seconds, row),
        f"{_multiple(low, row)} to {_multiple(high, row)}",
    )


def _multiple(seconds: float | None, row: NodeSlowdown) -> str:
    return "-" if seconds is None else f"{seconds / row.one_node_seconds:.2f}x"


def _shorten(name: str) -> str:
    return shorten_all([name], max(out.width - _JOB_CELLS, MAX_NAME_LENGTH))[0]
