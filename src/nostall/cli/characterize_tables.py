"""Terminal output of ``nostall characterize``: tables of jobs, GPUs, bottlenecks and kernels."""

from __future__ import annotations

from nostall.cli.console import out, show_table
from nostall.workload.characterization import JobsCharacterization, TracesCharacterization
from nostall.workload.characterization.traces import CollectiveSummary, GpuCharacterization
from nostall.workload.model import STEP_PARTS
from nostall.workload.timeline.analysis import TIME_PARTS
from nostall.workload.traces.chakra import ChakraTrace

MAX_KERNELS = 8
MAX_JOBS = 12
"""Limit of the table of single jobs; larger populations have no such table."""
MAX_NAME_LENGTH = 48
BUSY_PARTS = tuple(part for part in TIME_PARTS if not part.startswith("idle"))


def show_jobs(result: JobsCharacterization) -> None:
    """Print the modelled shares, the resource ranking, the portings and the what-if questions."""
    hardware = result.population.hardware.name
    show_table(
        f"modelled shares of a step on {hardware}, weighted by GPU time",
        ("jobs", "count", "GPU time", *STEP_PARTS, "perfect overlap"),
        [
            (
                group.name,
                group.jobs,
                f"{group.gpu_time:.1%}",
                *(f"{group.by_gpu[part]:.1%}" for part in STEP_PARTS),
                f"{group.overlap_gain:.2f}x",
            )
            for group in result.groups
        ],
    )
    _show_single_jobs(result)
    first, second, *_ = result.resource_ranking.items()
    out.print(
        f"main bottleneck: {first[0]} (modelled {first[1]:.1%} of GPU time), then {second[0]} "
        f"({second[1]:.1%})"
    )
    if result.porting:
        show_table(
            "PS/Worker jobs ported to another architecture, modelled throughput",
            ("to", "jobs", "fit", "fit and faster", "mean", "median"),
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
    for answer in result.what_if:
        out.print(
            f"what if {answer.question}: modelled {answer.mean_by_job:.2f}x by job, "
            f"{answer.mean_by_gpu:.2f}x by GPU time ({answer.jobs} jobs)"
        )
    out.print(f"{len(result.population.jobs)} jobs, {result.num_skipped} skipped")


def _show_single_jobs(result: JobsCharacterization) -> None:
    if len(result.population.jobs) > MAX_JOBS:
        return
    show_table(
        "modelled step of each job, seconds",
        ("job", "architecture", *STEP_PARTS, "total", "perfect overlap"),
        [
            (
                job.name,
                job.architecture.value,
                *(f"{step.part(part):.4g}" for part in STEP_PARTS),
                f"{step.total:.4g}",
                f"{step.overlapped:.4g}",
            )
            for job, step in result.largest_jobs()
        ],
    )


def show_traces(result: TracesCharacterization) -> None:
    """Print the measured time of each GPU, details of the first one, and Chakra traces."""
    if result.gpus:
        show_table(
            "measured time of each GPU",
            ("", "s", *BUSY_PARTS, "idle", "launch-bound", "overlap"),
            [_gpu_row(gpu) for gpu in result.gpus],
        )
    if result.collectives:
        _show_collectives(result.collectives)
    for gpu in result.gpus[:1]:
        _show_gpu(gpu)
    if len(result.gpus) > 1:
        out.print(f"details are of {result.gpus[0].name} only; --report has those of other GPUs")
    for trace in result.chakra:
        _show_chakra(trace)
    for note in result.notes:
        out.print(f"note: {note}")
    count = len({gpu.timeline.recording.path for gpu in result.gpus}) + len(result.chakra)
    out.print(f"{count} traces, {len(result.skip_reasons)} skipped")


def _gpu_row(gpu: GpuCharacterization) -> tuple[str, ...]:
    timeline = gpu.timeline
    shares = [timeline.parts[part] / timeline.span for part in BUSY_PARTS]
    shares += [timeline.idle / timeline.span, timeline.parts["idle_launch"] / timeline.span]
    return (
        gpu.name,
        f"{timeline.span:.3g}",
        *(f"{share:.1%}" for share in shares),
        f"{timeline.overlap:.0%}",
    )


def _show_collectives(summary: CollectiveSummary) -> None:
    show_table(
        f"measured time in {summary.collectives} collectives "
        f"(transfer {summary.transfer_seconds * 1e3:.3f} ms)",
        ("rank", "collectives", "of which waiting for other ranks"),
        [
            (
                rank.name,
                f"{rank.collective_seconds * 1e3:.3f} ms",
                f"{rank.waiting_seconds * 1e3:.3f} ms",
            )
            for rank in summary.ranks
        ],
    )


def _show_gpu(gpu: GpuCharacterization) -> None:
    if gpu.bottlenecks:
        show_table(
            f"what to fix first ({gpu.name})",
            ("problem", "measured", "modelled gain", "remedy"),
            [
                (b.problem, f"{b.seconds * 1e3:.3f} ms", f"at most {b.max_speedup:.2f}x", b.remedy)
                for b in gpu.bottlenecks
            ],
        )
    for question, speedup in gpu.what_if:
        out.print(f"what if {question}: modelled {speedup:.2f}x")
    show_table(
        f"kernels ({gpu.name})",
        ("kernel", "class", "launches", "measured", "share", "modelled roofline"),
        [
            (
                k.name.removeprefix("void ")[:MAX_NAME_LENGTH],
                k.kind.name.lower(),
                k.launches,
                f"{k.seconds * 1e3:.3f} ms",
                f"{k.seconds / gpu.timeline.span:.1%}",
                f"{k.roofline.attained_share:.0%} of {k.roofline.bound}" if k.roofline else "-",
            )
            for k in gpu.kernels[:MAX_KERNELS]
        ],
    )


def _show_chakra(trace: ChakraTrace) -> None:
    show_table(
        f"measured GPU time of {trace.path.name} (Chakra {trace.version}, "
        f"{trace.gpu_nodes} GPU nodes)",
        ("class", "seconds"),
        [(kind.name.lower(), f"{value:.4g}") for kind, value in trace.seconds.items() if value],
    )
    for collective, size in trace.moved_bytes.items():
        out.print(f"{collective}: {size / 1e6:.3f} MB")
