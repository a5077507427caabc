"""Terminal output of ``nostall characterize`` for traces: GPUs, bottlenecks, kernels, hosts."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.cli.terminal.console import out, show_table
from nostall.core.text.labels import kernel_labels, shorten_all
from nostall.core.text.plurals import pluralize
from nostall.workload.characterization import TracesCharacterization
from nostall.workload.characterization.traces import CollectiveSummary, GpuCharacterization
from nostall.workload.timeline.analysis import TIME_PARTS
from nostall.workload.timeline.bottlenecks import Bottleneck
from nostall.workload.timeline.host import HOST_PARTS, HostTimeline
from nostall.workload.timeline.kernels import KernelTime
from nostall.workload.traces.chakra.reader import ChakraTrace
from nostall.workload.traces.work_kinds import WorkKind

MAX_KERNELS = 8
MAX_NAME_LENGTH = 18
"""Characters of the name of a GPU; longer ones are cut in the middle."""
MIN_LINE_LENGTH = 16
BUSY_PARTS = tuple(part for part in TIME_PARTS if not part.startswith("idle"))
IDLE_PARTS = tuple(part for part in TIME_PARTS if part.startswith("idle"))
KIND_NAMES = {WorkKind.COMMUNICATION: "weights"}
"""Names of kinds of work in the tables; the others are in lower case."""


def show_traces(result: TracesCharacterization) -> None:
    """Print the measured time of each GPU, details of the first one, hosts and Chakra traces."""
    if result.gpus:
        _show_gpus(result.gpus)
    if result.collectives:
        _show_collectives(result.collectives)
    for gpu, name in zip(result.gpus[:1], _short([gpu.name for gpu in result.gpus]), strict=False):
        _show_gpu(gpu, name)
    if len(result.gpus) > 1:
        out.print(f"details are of {result.gpus[0].name} only; --report has those of other GPUs")
    if result.hosts:
        _show_hosts(result.hosts, [result.labels[host.recording.path] for host in result.hosts])
    for trace in result.chakra:
        _show_chakra(trace, result.labels[trace.path])
    for note in (*result.notes, *(note for gpu in result.gpus for note in gpu.edge_notes)):
        out.print(f"note: {note}")
    gpu_traces = {gpu.timeline.recording.path for gpu in result.gpus}
    count = len(gpu_traces) + len(result.hosts) + len(result.chakra)
    out.print(f"{pluralize(count, 'trace')}, {len(result.skip_reasons)} skipped")


def _short(names: Sequence[str]) -> list[str]:
    return shorten_all(names, MAX_NAME_LENGTH)


def _show_gpus(gpus: tuple[GpuCharacterization, ...]) -> None:
    names = _short([gpu.name for gpu in gpus])
    show_table(
        "measured time of each GPU, % of its span",
        ("GPU", "span, ms", *BUSY_PARTS, "idle"),
        [
            (
                name,
                f"{gpu.timeline.span * 1e3:.4g}",
                *(_percent(gpu.timeline.parts[part], gpu) for part in BUSY_PARTS),
                _percent(gpu.timeline.idle, gpu),
            )
            for gpu, name in zip(gpus, names, strict=True)
        ],
    )
    show_table(
        "measured idle time by its cause, % of the span",
        ("GPU", *(part.removeprefix("idle_") for part in IDLE_PARTS), "communication hidden"),
        [
            (
                name,
                *(_percent(gpu.timeline.parts[part], gpu) for part in IDLE_PARTS),
                f"{gpu.timeline.overlap:.0%}" if gpu.timeline.communication else "-",
            )
            for gpu, name in zip(gpus, names, strict=True)
        ],
    )


def _percent(seconds: float, gpu: GpuCharacterization) -> str:
    return f"{100 * seconds / gpu.timeline.span:.1f}"


def _show_collectives(summary: CollectiveSummary) -> None:
    show_table(
        f"measured time in {pluralize(summary.collectives, 'collective')} "
        f"(transfer {summary.transfer_seconds * 1e3:.3f} ms)",
        ("rank", "collectives", "of which waiting for other ranks"),
        [
            (
                name,
                f"{rank.collective_seconds * 1e3:.3f} ms",
                f"{rank.waiting_seconds * 1e3:.3f} ms",
            )
            for rank, name in zip(
                summary.ranks, _short([rank.name for rank in summary.ranks]), strict=True
            )
        ],
    )


def _show_gpu(gpu: GpuCharacterization, name: str) -> None:
    if gpu.bottlenecks:
        show_table(
            f"what to fix first ({name}); modelled gain over the measured span",
            ("problem", "measured", "modelled gain", "remedy"),
            [(b.problem, f"{b.seconds * 1e3:.3f} ms", _gain(b), b.remedy) for b in gpu.bottlenecks],
        )
    for question, speedup in gpu.what_if:
        out.print(f"what if {question}: modelled {speedup:.2f}x the measured speed")
    for answer in gpu.slowdowns:
        out.print(
            f"what if {answer.question}: modelled {answer.best:.2f}x to {answer.worst:.2f}x the "
            f"measured step time ({answer.gradient_bytes / 1e6:.4g} MB of gradients; all but the "
            "last bucket hidden, nothing hidden)"
        )
    has_roofline = any(kernel.roofline for kernel in gpu.kernels)
    shown = gpu.kernels[:MAX_KERNELS]
    others = 57 if has_roofline else 42  # cells of the other columns and of the gaps
    labels = kernel_labels([k.name for k in shown], max(out.width - others, MIN_LINE_LENGTH))
    show_table(
        f"kernels ({name})",
        ("kernel", "kind", "calls", "ms", "%", *(["modelled roofline"] if has_roofline else [])),
        [_kernel_row(k, label, gpu, has_roofline) for k, label in zip(shown, labels, strict=True)],
    )


def _gain(bottleneck: Bottleneck) -> str:
    speedup = bottleneck.max_speedup
    return "-" if speedup is None else f"at most {speedup:.2f}x"


def _kernel_row(
    kernel: KernelTime, label: str, gpu: GpuCharacterization, has_roofline: bool
) -> tuple[object, ...]:
    roofline = kernel.roofline
    position = f"{roofline.attained_share:.0%} of {roofline.bound}" if roofline else "-"
    return (
        label,
        KIND_NAMES.get(kernel.kind, kernel.kind.name.lower()),
        kernel.launches,
        f"{kernel.seconds * 1e3:.3f}",
        _percent(kernel.seconds, gpu),
        *([position] if has_roofline else []),
    )


def _show_hosts(hosts: tuple[HostTimeline, ...], labels: Sequence[str]) -> None:
    names = _short(labels)
    show_table(
        "measured time of the host, % of its span (no GPU activities are recorded)",
        ("host", "span, ms", *(part.replace("_", " ") for part in HOST_PARTS)),
        [
            (
                name,
                f"{host.span * 1e3:.4g}",
                *(f"{100 * host.parts[part] / host.span:.1f}" for part in HOST_PARTS),
            )
            for host, name in zip(hosts, names, strict=True)
        ],
    )
    first = hosts[0]
    if shown := first.operators[:MAX_KERNELS]:
        width = max(out.width - 44, MIN_LINE_LENGTH)
        labels = kernel_labels([operator.name for operator in shown], width)
        show_table(
            f"operators of the host ({names[0]})",
            ("operator", "calls", "own ms", "own %", "total ms"),
            [
                (
                    label,
                    operator.calls,
                    f"{operator.self_seconds * 1e3:.3f}",
                    f"{100 * operator.self_seconds / first.span:.1f}",
                    f"{operator.seconds * 1e3:.3f}",
                )
                for operator, label in zip(shown, labels, strict=True)
            ],
        )


def _show_chakra(trace: ChakraTrace, label: str) -> None:
    show_table(
        f"measured GPU time of {label} (Chakra {trace.version}, "
        f"{pluralize(trace.gpu_nodes, 'GPU node')})",
        ("kind", "seconds"),
        [
            (KIND_NAMES.get(kind, kind.name.lower()), f"{value:.4g}")
            for kind, value in trace.seconds.items()
            if value
        ],
    )
    for collective, size in trace.moved_bytes.items():
        out.print(f"{collective}: {size / 1e6:.3f} MB")
