"""What stitched chains are measured beside: eager, torch.compile in several ways, Liger.

*Best Inductor* is the fastest of torch.compile, its mode max-autotune-no-cudagraphs, and Inductor's
own options of this version, each alone and those that were a gain together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from time import monotonic
from typing import Any

import torch
from torch._inductor import config, list_mode_options

from benchmarks.fusion.chains.accuracy import Judge
from benchmarks.fusion.chains.liger import NoLiger, liger
from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method, Run, quickly
from nostall.core.errors import one_line

Options = dict[str, Any]
TUNED: Options = list_mode_options("max-autotune-no-cudagraphs")
GAIN = 1.01
"""An option counts as a gain beyond this."""

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


def known_options(settings: Any = config) -> dict[str, Options]:
    """Those of :data:`OPTIONS` that this version has and that change something."""
    return {
        name: options
        for name, options in OPTIONS.items()
        if any(_value(settings, key) != wanted for key, wanted in options.items())
        and all(_value(settings, key) is not None for key in options)
    }


def _value(settings: Any, key: str) -> Any:
    """None where this version does not know the option."""
    return reduce(lambda holder, part: getattr(holder, part, None), key.split("."), settings)


def compiled(chain: Chain, options: Options | None = None) -> Run:
    """The chain by torch.compile; each one has its own cache of compiled code.

    Versions of one code object would share PyTorch's limit, beyond which it runs eagerly and says
    nothing.
    """

    def program(*given: torch.Tensor) -> object:
        return chain.function(*given)

    program.__code__ = program.__code__.replace(co_name="chain")
    found = torch.compile(program, dynamic=False, fullgraph=True, options=options)
    return lambda given: found(*given)


def eager(chain: Chain) -> Run:
    return lambda given: chain.function(*given)


Timed = Callable[[Run, Sequence[Inputs]], float]


def best_inductor(
    chain: Chain,
    sets: Sequence[Inputs],
    begun: Mapping[str, Run],
    seconds: float,
    timed: Timed = quickly,
    built: Callable[[Chain, Options], Run] = compiled,
) -> tuple[Run, dict[str, Any]]:
    """The fastest way and what every way took (microseconds, or why it failed).

    ``begun``: what is compiled already, ``compile`` first.  No option is begun after ``seconds``.
    """
    until = monotonic() + seconds
    runs: dict[str, Run] = {}
    told: dict[str, Any] = {}

    def ask(name: str, make: Callable[[], Run]) -> None:
        if monotonic() > until:
            told[name] = {"failure": f"not tried: {seconds:.0f} s were over"}
            return
        try:
            run = make()
            told[name] = {"us": round(timed(run, sets), 3)}
            runs[name] = run
        except Exception as error:  # whatever a compiler says about an option that few use
            told[name] = {"failure": one_line(error)}

    for name, run in begun.items():
        ask(name, lambda run=run: run)  # type: ignore[misc]
    options = known_options()
    for name, one in options.items():
        ask(name, lambda one=one: built(chain, one))  # type: ignore[misc]
    plain = told.get("compile", {}).get("us", 0.0)
    gains = [name for name in options if told[name].get("us", plain) * GAIN < plain]
    if gains:
        # Where two of them say something else of one option the faster one is heard.
        slowest_first = sorted(gains, key=lambda name: -told[name]["us"])
        together = reduce(lambda a, b: {**a, **options[b]}, slowest_first, dict(TUNED))
        ask(" + ".join(["max-autotune", *gains]), lambda: built(chain, together))
    if not runs:
        raise RuntimeError("no way of torch.compile works for this chain")
    best = min(runs, key=lambda name: float(told[name]["us"]))
    return runs[best], {"taken": best, "ways": told}


def others(
    chain: Chain, sets: Sequence[Inputs], judge: Judge, seconds: float
) -> tuple[dict[str, Method], dict[str, Any]]:
    """Every method that works, by name, and what there is to say: errors, failures, how long each
    of Inductor's ways took (no way is begun after ``seconds``)."""
    found = {"eager": Method(eager(chain)), "eager again": Method(eager(chain))}
    told: dict[str, Any] = {"largest_errors": {"eager": judge.eager}, "failures": {}}

    def ask(name: str, make: Callable[[], Method]) -> None:
        try:
            made = make()
            told["largest_errors"][name] = errors = judge.errors(made)
            if reason := judge.wrong(errors):
                told["failures"][name] = reason
            else:
                found[name] = made
        except NoLiger as error:
            told["failures"][name] = str(error)
        except Exception as error:  # a method that fails is left out, the others count
            told["failures"][name] = one_line(error)

    ask("compile", lambda: Method(compiled(chain)))
    ask("max-autotune", lambda: Method(compiled(chain, dict(TUNED))))

    def best() -> Method:
        begun = {name: found[name].run for name in ("compile", "max-autotune") if name in found}
        run, told["inductor"] = best_inductor(chain, sets, begun, seconds)
        return Method(run)

    ask("best Inductor", best)
    ask("liger", lambda: liger(chain))
    return found, told
