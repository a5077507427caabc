"""Baselines for stitched chains: eager PyTorch, torch.compile with several options, Liger.

*Best Inductor* is the fastest of torch.compile, its mode max-autotune-no-cudagraphs, each of
Inductor's own options alone, and all options that gained time together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from time import monotonic
from typing import Any

import torch
from torch._inductor import config, list_mode_options

from benchmarks.fusion.chains.accuracy import AccuracyCheck
from benchmarks.fusion.chains.liger import NoLigerKernel, liger_method
from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method, Run, time_quickly
from nostall.core.errors import one_line

Options = dict[str, Any]
MAX_AUTOTUNE: Options = list_mode_options("max-autotune-no-cudagraphs")
MIN_GAIN = 1.01
"""An option gains time if torch.compile without it takes more than this many times as long."""

OPTIONS: dict[str, Options] = {
    "programmatic dependent launch": {"triton.enable_pdl": True},
    "combo kernels": {"combo_kernels": True, "benchmark_combo_kernel": True},
    "multi-kernel": {"triton.multi_kernel": 1},
    "cooperative reductions": {"triton.cooperative_reductions": True},
    "cooperative reductions forced": {"triton.force_cooperative_reductions": True},
    "mixed-order reductions": {"triton.mix_order_reduction": True},
    "mixed-order reductions, not strict": {
        "triton.mix_order_reduction": True,
        "triton.mix_order_reduction_non_strict_mode": True,
    },
    "no mixed-order reductions": {"triton.mix_order_reduction": False},
}


def available_options(settings: Any = config) -> dict[str, Options]:
    """Those of :data:`OPTIONS` that this PyTorch version has and that differ from its defaults."""
    return {
        name: options
        for name, options in OPTIONS.items()
        if any(_option_value(settings, key) != value for key, value in options.items())
        and all(_option_value(settings, key) is not None for key in options)
    }


def _option_value(settings: Any, key: str) -> Any:
    """Value of a dotted option; None if this PyTorch version does not have it."""
    return reduce(lambda value, part: getattr(value, part, None), key.split("."), settings)


def compile_chain(chain: Chain, options: Options | None = None) -> Run:
    """Compile the chain with torch.compile, from a code object of its own.

    Dynamo limits recompilations for each code object and silently runs eagerly beyond the limit, so
    several compilations of a chain must not share one.
    """

    def chain_function(*inputs: torch.Tensor) -> object:
        return chain.function(*inputs)

    chain_function.__code__ = chain_function.__code__.replace(co_name="chain")
    compiled_function = torch.compile(
        chain_function, dynamic=False, fullgraph=True, options=options
    )
    return lambda inputs: compiled_function(*inputs)


def eager_run(chain: Chain) -> Run:
    return lambda inputs: chain.function(*inputs)


TimeRun = Callable[[Run, Sequence[Inputs]], float]


def best_inductor(
    chain: Chain,
    sets: Sequence[Inputs],
    compiled_runs: Mapping[str, Run],
    limit_s: float,
    time_run: TimeRun = time_quickly,
    compile_run: Callable[[Chain, Options], Run] = compile_chain,
) -> tuple[Run, dict[str, Any]]:
    """The fastest torch.compile variant, and the microseconds or the failure of every variant.

    ``compiled_runs``: variants that are compiled already, ``compile`` first.  No variant starts
    after ``limit_s`` seconds.
    """
    deadline = monotonic() + limit_s
    runs: dict[str, Run] = {}
    results: dict[str, Any] = {}

    def time_variant(name: str, make_run: Callable[[], Run]) -> None:
        if monotonic() > deadline:
            results[name] = {"failure": f"not tried: the {limit_s:.0f} s were over"}
            return
        try:
            run = make_run()
            results[name] = {"us": round(time_run(run, sets), 3)}
            runs[name] = run
        except Exception as error:  # a rarely used option may fail in any way; record it
            results[name] = {"failure": one_line(error)}

    for name, run in compiled_runs.items():
        time_variant(name, lambda run=run: run)  # type: ignore[misc]
    options = available_options()
    for name, variant_options in options.items():
        time_variant(name, partial(compile_run, chain, variant_options))
    plain = results.get("compile", {}).get("us", 0.0)
    gains = [name for name in options if results[name].get("us", plain) * MIN_GAIN < plain]
    if gains:
        # If two variants set one option differently, the faster one takes precedence.
        slowest_first = sorted(gains, key=lambda name: -results[name]["us"])
        combined = reduce(lambda a, b: {**a, **options[b]}, slowest_first, dict(MAX_AUTOTUNE))
        time_variant(" + ".join(["max-autotune", *gains]), lambda: compile_run(chain, combined))
    if not runs:
        raise RuntimeError(
            f"{chain.name}: no torch.compile variant works; see the failures: {results}"
        )
    best = min(runs, key=lambda name: float(results[name]["us"]))
    return runs[best], {"taken": best, "ways": results}


def baseline_methods(
    chain: Chain, sets: Sequence[Inputs], accuracy: AccuracyCheck, seconds: float
) -> tuple[dict[str, Method], dict[str, Any]]:
    """The baselines that work and are correct, by name, and details of all of them.

    The details hold the largest errors, failures, and the times of Inductor's variants.  No variant
    starts after ``seconds``.
    """
    methods = {"eager": Method(eager_run(chain)), "eager again": Method(eager_run(chain))}
    details: dict[str, Any] = {"largest_errors": {"eager": accuracy.eager_errors}, "failures": {}}

    def add(name: str, make_method: Callable[[], Method]) -> None:
        try:
            method = make_method()
            details["largest_errors"][name] = errors = accuracy.errors(method)
            if reason := accuracy.failure(errors):
                details["failures"][name] = reason
            else:
                methods[name] = method
        except NoLigerKernel as error:
            details["failures"][name] = str(error)
        except Exception as error:  # leave out a method that fails for any reason, time the others
            details["failures"][name] = one_line(error)

    add("compile", lambda: Method(compile_chain(chain)))
    add("max-autotune", lambda: Method(compile_chain(chain, dict(MAX_AUTOTUNE))))

    def make_best() -> Method:
        compiled_runs = {
            name: methods[name].run for name in ("compile", "max-autotune") if name in methods
        }
        run, details["inductor"] = best_inductor(chain, sets, compiled_runs, seconds)
        return Method(run)

    add("best Inductor", make_best)
    add("liger", lambda: liger_method(chain))
    return methods, details
