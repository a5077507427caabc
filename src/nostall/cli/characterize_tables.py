"""What ``nostall characterize`` prints on a terminal."""

from __future__ import annotations

from nostall.cli.console import out, show_table
from nostall.workload.answers import JobsAnswer, TracesAnswer
from nostall.workload.answers.timelines import Rank
from nostall.workload.model import PARTS as MODEL_PARTS
from nostall.workload.timeline.analysis import PARTS
from nostall.workload.traces.chakra import ChakraTrace

MOST_KERNELS = 8
MOST_JOBS = 12
"""A table of more jobs than this is a population: single ones are not printed."""
MOST_LETTERS = 48
BUSY = tuple(p for p in PARTS if not p.startswith("idle"))


def show_jobs(answer: JobsAnswer) -> None:
    """Breakdown, what to make faster, and what other architectures and rates would change."""
    name = answer.population.hardware.name
    show_table(
        f"modelled shares of a step on {name}, weighted by GPU time",
        ("jobs", "count", "GPU time", *MODEL_PARTS, "perfect overlap"),
        [
            (
                g.name,
                g.jobs,
                f"{g.gpu_time:.1%}",
                *(f"{g.by_gpu[p]:.1%}" for p in MODEL_PARTS),
                f"{g.overlap_gain:.2f}x",
            )
            for g in answer.groups
        ],
    )
    _show_each(answer)
    first, second, *_ = answer.ranking.items()
    out.print(
        f"waits most for: {first[0]} (modelled {first[1]:.1%} of GPU time), then {second[0]} "
        f"({second[1]:.1%})"
    )
    if answer.ported:
        show_table(
            "PS/Worker jobs elsewhere, modelled throughput",
            ("to", "jobs", "fit", "fit and faster", "mean", "median"),
            [
                (
                    p.target,
                    p.jobs,
                    p.fitting,
                    f"{p.faster:.1%}",
                    f"{p.mean_speedup:.2f}x",
                    f"{p.median_speedup:.2f}x",
                )
                for p in answer.ported
            ],
        )
    for changed in answer.changed:
        out.print(
            f"what if {changed.question}: modelled {changed.mean_by_job:.2f}x by job, "
            f"{changed.mean_by_gpu:.2f}x by GPU time ({changed.jobs} jobs)"
        )
    out.print(f"{len(answer.population.jobs)} jobs, {answer.skipped} left out")


def _show_each(answer: JobsAnswer) -> None:
    """The step of each job, where they are few; a population is in the page and in the JSON."""
    if len(answer.population.jobs) > MOST_JOBS:
        return
    show_table(
        "modelled step of each job, seconds",
        ("job", "architecture", *MODEL_PARTS, "total", "perfect overlap"),
        [
            (
                job.name,
                job.architecture.value,
                *(f"{found.part(p):.4g}" for p in MODEL_PARTS),
                f"{found.total:.4g}",
                f"{found.overlapped:.4g}",
            )
            for job, found in answer.largest()
        ],
    )


def show_traces(answer: TracesAnswer) -> None:
    """Each GPU: where its time went, what to fix first, which kernels."""
    if answer.ranks:
        show_table(
            "measured time of each GPU",
            ("", "s", *BUSY, "idle", "launch-bound", "overlap"),
            [_row(rank) for rank in answer.ranks],
        )
    for rank in answer.ranks[:1]:
        _show_rank(rank)
    if len(answer.ranks) > 1:
        out.print(f"{answer.ranks[0].name} is shown in detail; --report shows every one")
    for one in answer.chakra:
        _show_chakra(one)
    for remark in answer.remarks:
        out.print(f"note: {remark}")
    read = len({r.timeline.recording.path for r in answer.ranks}) + len(answer.chakra)
    out.print(f"{read} traces, {len(answer.left_out)} left out")


def _row(rank: Rank) -> tuple[str, ...]:
    own = rank.timeline
    shares = [own.parts[p] / own.span for p in BUSY]
    shares += [own.idle / own.span, own.parts["idle_launch"] / own.span]
    return (rank.name, f"{own.span:.3g}", *(f"{s:.1%}" for s in shares), f"{own.overlap:.0%}")


def _show_rank(rank: Rank) -> None:
    if rank.advice:
        show_table(
            f"what to fix first ({rank.name})",
            ("problem", "measured", "modelled gain", "who"),
            [
                (a.problem, f"{a.seconds * 1e3:.3f} ms", f"at most {a.gain:.2f}x", a.level)
                for a in rank.advice
            ],
        )
    for question, speedup in rank.changed:
        out.print(f"what if {question}: modelled {speedup:.2f}x")
    show_table(
        f"kernels ({rank.name})",
        ("kernel", "class", "launches", "measured", "share", "modelled roofline"),
        [
            (
                k.name.removeprefix("void ")[:MOST_LETTERS],
                k.kind.name.lower(),
                k.launches,
                f"{k.seconds * 1e3:.3f} ms",
                f"{k.seconds / rank.timeline.span:.1%}",
                f"{k.placement.reached:.0%} of {k.placement.bound}" if k.placement else "-",
            )
            for k in rank.kernels[:MOST_KERNELS]
        ],
    )


def _show_chakra(one: ChakraTrace) -> None:
    show_table(
        f"measured GPU time of {one.path.name} (Chakra {one.version}, {one.gpu_nodes} GPU nodes)",
        ("class", "seconds"),
        [(kind.name.lower(), f"{value:.4g}") for kind, value in one.seconds.items() if value],
    )
    for name, size in one.moved.items():
        out.print(f"{name}: {size / 1e6:.3f} MB")
