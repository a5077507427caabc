"""Write ``docs/results/sass-modelled.md``: results of the SASS level that need no GPU.

python -m benchmarks page sass-modelled
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from nostall.core.files.atomic import write_atomically
from nostall.sass.model.agreement import RANKING_WORTH

PAGE = PAGES / "sass-modelled.md"
FOLDER = results("sass")
_STRATEGIES = ("anneal", "sip", "random")


def text() -> str:
    """The whole page."""
    return page(
        "SASS schedules, without a GPU",
        "python -m benchmarks page sass-modelled",
        [_strategies(), _speed(), _mobility(), _walks(), _robustness()],
    )


def write() -> None:
    write_atomically(PAGE, text().encode())


def _strategies() -> str:
    record = load(FOLDER / "strategies_on_model.json")
    evaluations = {r["evaluations"] for r in record["records"]}
    intro = wrapped(
        "*Modelled* time of the original divided by that of the best schedule, mean over the "
        f"seeds with its standard error, sm_90, {max(evaluations):,} evaluations (`python -m "
        f"benchmarks run sass.strategies_on_model`, {link(FOLDER / 'strategies_on_model.json')}). "
        f"The SM model {RANKING_WORTH}: these figures compare strategies, they are "
        "not speed-ups. `sip` restarts when its one published run ends, which can only help it. "
        "It accepts moves by TFLOPS, so it has no value for a kernel without floating-point work."
    )
    return f"## Strategies at equal evaluations\n\n{intro}\n\n{search(record['records'])}"


def _speed() -> str:
    path = FOLDER / "static_speed.json"
    record = load(path)
    intro = wrapped(
        "Seconds of processor time of nostall's own code on one core; the time of nvdisasm is in "
        f"the file (`python -m benchmarks run sass.static_speed`, {link(path)})."
    )
    second = wrapped(
        "One kernel in three sizes. A step is compared with n log n: 1 or less grows no faster."
    )
    parts = ["## Speed", intro, speed(record["kernels"]), second]
    return "\n\n".join([*parts, growth(record["grown"], record["growth"])])


def _mobility() -> str:
    path = FOLDER / "mobility.json"
    intro = wrapped(
        "Instructions with at least one legal move, sm_90 (`python -m benchmarks run "
        f"sass.mobility`, {link(path)})."
    )
    cost = load(path)["cost_of_read_order"]
    reads = wrapped(
        "Loads that may read one shared location keep their order. Over all kernels, sm_80 "
        f"included, this forbids {cost['slides']:.2%} of the slides and keeps "
        f"{cost['movable']:.2%} of the movable instructions from moving."
    )
    return f"## Mobility\n\n{intro}\n\n{mobility(load(path)['records'])}\n\n{reads}"


def _walks() -> str:
    path = FOLDER / "random_walks.json"
    total = load(path)["summary"]
    return "## Random walks\n\n" + wrapped(
        f"{total['functions']} functions of {total['cubins']} cubins of the corpus, "
        f"{total['moves'] // total['functions']:,} random legal moves each: the verifier accepts "
        f"{total['passed']} of the {total['functions']} ends (`python -m benchmarks run "
        f"sass.random_walks`, {link(path)})."
    )


def _robustness() -> str:
    fuzz, kills = FOLDER / "fuzz.json", FOLDER / "kill_resume.json"
    hazards = FOLDER / "seeded_hazards.json"
    own, killed, seeded = load(fuzz)["own"], load(kills), load(hazards)["total"]
    rows = [
        ["seeded hazards that the verifier refuses (`python -m tests.mutations.report`)",
         f"{seeded['refused']:,} of {seeded['mutants']:,}", link(hazards)],
        ["damaged cubins that end in a crash or a hang (`sass.fuzz`)",
         f"{own['failures_count']} of {own['mutants']:,}", link(fuzz)],
        ["searches killed by SIGKILL that resume to another result (`sass.kill_resume`)",
         f"{killed['different']} of {sum(killed['kills'].values())}", link(kills)],
    ]  # fmt: skip
    return "## Robustness\n\n" + table(("experiment", "result", "file"), rows)


def search(records: Sequence[Mapping[str, Any]]) -> str:
    """Table of original / best time by kernel and strategy: mean over seeds, standard error."""
    rows = []
    for kernel in dict.fromkeys(r["kernel"] for r in records):
        kernel_records = [r for r in records if r["kernel"] == kernel]
        ratios = ([r["ratio"] for r in kernel_records if r["strategy"] == s] for s in _STRATEGIES)
        rows.append((kernel, *map(_mean, ratios)))
    seeds = len({r["seed"] for r in records})
    head = (f"kernel, {seeds} seeds", *(f"`{s}`" for s in _STRATEGIES))
    return table(head, rows)


def speed(kernels: Iterable[Mapping[str, Any]]) -> str:
    """Table of seconds and rates by kernel (medians)."""
    rows = []
    for kernel in kernels:
        medians = kernel["median"]
        times = (
            medians[name] for name in ("parse_s", "space_s", "parse_and_analyse_s", "verify_s")
        )
        rates = (medians[name] for name in ("proposals_per_s", "model_per_s"))
        cells = [f"{value:.2f} s" for value in times] + [f"{value:,.0f}" for value in rates]
        rows.append((kernel["kernel"], f"{kernel['instructions']:,}", *cells))
    head = ("kernel", "instructions", "parse", "space", "both", "full verify", "proposals/s")
    return table((*head, "model evaluations/s"), rows)


def growth(kernels: Sequence[Mapping[str, Any]], against: Mapping[str, Any]) -> str:
    """Table of the seconds of one kernel in several sizes, and the growth against n log n."""
    rows = []
    for at, kernel in enumerate(kernels):
        medians = kernel["median"]
        cells = [f"{kernel['instructions']:,}"]
        for name in ("parse_and_analyse_s", "verify_s"):
            step = f"{against[name][at - 1]['against_n_log_n']:.2f}" if at else ""
            cells += [f"{medians[name]:.2f} s", step]
        rows.append(cells)
    head = ("instructions", "parse and space", "against n log n", "full verify", "against n log n")
    return table(head, rows)


def mobility(records: Iterable[Mapping[str, Any]], arch: str = "sm_90") -> str:
    """Table of instructions with at least one legal slide."""
    arch_records = [r for r in records if r["arch"] == arch]
    rows = [(r["kernel"], str(r["instructions"]), f"{r['share']:.1%}") for r in arch_records]
    return table(("kernel", "instructions", "movable"), rows)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"
