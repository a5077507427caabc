"""The command ``nostall serving simulate``: a trace on a simulated engine, by policy."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    out,
    show_json,
    show_table,
)
from nostall.cli.terminal.progress import stage_bar
from nostall.core.errors import BadInput
from nostall.core.text.plurals import pluralize
from nostall.serving.scheduling import POLICIES, Limits, find_policy
from nostall.serving.simulate.step_costs import BUILT_IN, StepCosts, load_step_costs
from nostall.serving.traces import HASH_BLOCK, Request, load_requests

if TYPE_CHECKING:
    from nostall.serving.simulate.engine import Distribution, EngineSettings, Metrics

HOW_TO_MEASURE = (
    "python -m benchmarks run serving.step_costs --out FILE, on a machine with a GPU and vLLM"
)

UNSHARED_REMARK = (
    "reading once changes nothing here: no step of {fewest} decodes or more, without "
    "speculation and prefills, had shared blocks; traces have them with prefix hashes (Mooncake's)"
)


TraceArgument = Annotated[
    Path, typer.Argument(help="Trace: CSV of Azure or of BurstGPT, or JSON lines of Mooncake.")
]
CostsOption = Annotated[
    Path,
    typer.Option(
        help=f"Measured step costs, written by: {HOW_TO_MEASURE}; default: steps of vLLM that come "
        "with nostall.",
        show_default=False,
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(POLICIES)}; default: all of them.")
]
RequestsOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="First requests of the trace.")
]
RateOption = Annotated[
    float, typer.Option(help="Factor on the arrival rate; 2: twice as many a second.")
]
BudgetOption = Annotated[int, typer.Option(min=1, help="Tokens of a step.")]
ReservedOption = Annotated[
    int, typer.Option(min=1, help="Tokens that xy-serve keeps for decodes and verifies.")
]
MaxRunningOption = Annotated[int, typer.Option(min=1, help="Requests that run at a time.")]
KvTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of the KV cache; default: as measured.")
]
PrefixCacheOption = Annotated[
    bool, typer.Option(help="Share the blocks of equal prefixes, if the trace has hashes.")
]
ReadOnceOption = Annotated[
    bool,
    typer.Option(
        "--read-once",
        help="Also simulate decodes that read what they share once, as the vLLM plug-in does.",
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option(min=0, help="Draft tokens of a verify; 0: no speculation.")
]
AcceptanceOption = Annotated[
    float, typer.Option(min=0, max=1, help="Probability that a draft token is accepted.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the accepted drafts.")]


def simulate_trace(
    trace: TraceArgument,
    costs: CostsOption = BUILT_IN,
    policy: PolicyOption = None,
    requests: RequestsOption = None,
    rate: RateOption = 1.0,
    budget: BudgetOption = 4096,
    reserved: ReservedOption = 128,
    max_running: MaxRunningOption = 256,
    kv_tokens: KvTokensOption = None,
    prefix_cache: PrefixCacheOption = True,
    read_once: ReadOnceOption = False,
    draft_tokens: DraftTokensOption = 0,
    acceptance: AcceptanceOption = 0.7,
    seed: SeedOption = 0,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Simulate a serving engine on a trace: throughput, time to first token, between tokens.

    Step times come from a model fitted to measured steps of a real engine, so all results are
    modelled. The policies are vLLM's scheduler and XY-Serve's.
    """
    from nostall.serving.simulate.engine import READ_ONCE_SEQUENCES, EngineSettings

    if not 0 < rate < float("inf"):
        raise BadInput(f"--rate {rate}; allowed is a number above 0")
    names = [policy] if policy else list(POLICIES)
    for name in names:
        find_policy(name)
    choices = [(name, once) for name in names for once in (False, True)[: 1 + read_once]]
    model = load_step_costs(costs)
    given = load_requests(trace, requests)
    faster = [replace(request, arrival_s=request.arrival_s / rate) for request in given]
    settings = EngineSettings(
        "vllm",
        Limits(budget, max_running, min(reserved, budget)),
        kv_tokens,
        prefix_cache,
        draft_tokens,
        acceptance,
    )
    results = [
        _simulate(faster, model, replace(settings, policy=name, reads_once=once), seed, quiet)
        for name, once in choices
    ]
    if format is Format.JSON:
        show_json(_document(model, settings, seed, rate, results, choices))
        return
    columns = [f"{name}, read once" if once else name for name, once in choices]
    if are_equal(results[:: 1 + read_once]):
        out.print(equal_remark(draft_tokens))
    _print(trace, model, results, columns)
    if requests is not None and len(given) < requests:
        out.print(f"{trace.name} has {pluralize(len(given), 'request')}, so all were taken")
    if read_once and results[0] == results[1]:
        out.print(UNSHARED_REMARK.format(fewest=READ_ONCE_SEQUENCES))


def _simulate(
    requests: list[Request], model: StepCosts, settings: EngineSettings, seed: int, quiet: bool
) -> Metrics:
    from nostall.serving.simulate.engine import BLOCK, simulate

    bar = stage_bar(enabled=not quiet)
    with bar:
        task = bar.add_task(f"simulating {settings.policy}", total=len(requests))
        found = simulate(
            requests, model, settings, seed, lambda done: bar.update(task, completed=done)
        )
    if found.rejected == len(requests):
        raise BadInput(
            f"no request fits into the KV cache of {settings.kv_tokens or model.kv_tokens:,} "
            f"tokens, whose blocks are {BLOCK} tokens, or {HASH_BLOCK} with prefix hashes, and one "
            "of which stays free; give a larger --kv-tokens"
        )
    return found


def _print(trace: Path, model: StepCosts, results: list[Metrics], columns: list[str]) -> None:
    first = results[0]
    rows = [
        ("requests / s", *(f"{m.requests_per_s:.2f}" for m in results)),
        ("output tokens / s", *(f"{m.output_tokens_per_s:,.1f}" for m in results)),
        ("time to first token (s)", *(_times(m.time_to_first_token, 1) for m in results)),
        ("time between tokens (ms)", *(_times(m.time_between_tokens, 1e3) for m in results)),
        ("latency (s)", *(_times(m.latency, 1) for m in results)),
        ("cached prompt tokens", *(f"{_share(m.cached_tokens, m.prompt_tokens)}" for m in results)),
        ("steps", *(f"{m.steps:,}" for m in results)),
        ("tokens of a step, mean", *(f"{m.mean_step_tokens:.1f}" for m in results)),
        ("busy", *(_share(m.busy_s, m.duration_s) for m in results)),
        ("preemptions", *(f"{m.preemptions:,}" for m in results)),
        ("steps beyond the measured", *(_share(m.extrapolated_steps, m.steps) for m in results)),
    ]
    title = f"{pluralize(first.requests, 'request')} of {trace.name}, modelled; mean / p50 / p99"
    show_table(title, ("metric", *columns), rows)
    if first.rejected:
        rejected = pluralize(first.rejected, "request")
        out.print(f"left out, as longer than the KV cache: {rejected}")
    out.print(
        f"step costs: {model.samples} measured steps ({model.source}); the fitted model is "
        f"{model.median_error:.1%} off in the median of steps that were not fitted, "
        f"{model.p95_error:.1%} at the 95th percentile"
    )


def are_equal(results: list[Metrics]) -> bool:
    """Whether several policies gave the same figures."""
    first, *others = (replace(metrics, policy="") for metrics in results)
    return bool(others) and all(metrics == first for metrics in others)


def equal_remark(draft_tokens: int) -> str:
    """Why policies gave the same figures, and what would make them differ."""
    if not draft_tokens:
        return (
            "the policies are equal here: they differ in the order of verify steps, and without "
            "speculation there are none; try --draft-tokens 4"
        )
    return (
        "the policies are equal here: no step was full, so their orders of the same requests give "
        "the same steps; try --rate 10 or a smaller --budget"
    )


def _times(times: Distribution, per_second: float) -> str:
    """Mean, median and 99th percentile."""
    values = (times.mean, times.p50, times.p99)
    return " / ".join(f"{per_second * value:,.2f}" for value in values)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _document(
    model: StepCosts,
    settings: EngineSettings,
    seed: int,
    rate: float,
    results: list[Metrics],
    choices: list[tuple[str, bool]],
) -> dict[str, Any]:
    varied = ("policy", "reads_once")
    shown = {key: value for key, value in asdict(settings).items() if key not in varied}
    return {
        "kind": "modelled",
        "seed": seed,
        "rate": rate,
        "settings": shown,
        "step_costs": {
            "source": model.source,
            "samples": model.samples,
            "median_error": model.median_error,
            "p95_error": model.p95_error,
        },
        "policies": [
            {
                **asdict(metrics),
                "reads_once": reads_once,
                "requests_per_s": metrics.requests_per_s,
                "output_tokens_per_s": metrics.output_tokens_per_s,
            }
            for metrics, (_, reads_once) in zip(results, choices, strict=True)
        ],
    }
