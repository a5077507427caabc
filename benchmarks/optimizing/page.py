"""``docs/results/optimize.md``: whole programs as written, with their best settings, and bundles.

python -m benchmarks page optimize
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render_page
from benchmarks.optimizing import losses
from benchmarks.optimizing.whole_programs import AS_WRITTEN, BEST, BUNDLE, MODES

PAGE = PAGES / "optimize.md"
FILE = results("optimizing") / "programs_h200.json"
FIRST = results("optimizing") / "programs_h200_first.json"
"""The first run, which had half the time."""
SHORT = results("optimizing") / "programs_h200_short.json"
"""Three programs again, with less time."""
LOSSES = results("optimizing") / "losses_h200.json"
VLLM = results("optimizing") / "vllm_h200.json"
_HALVES = {"developed": "developed", "held_out": "held out"}
_TURNS = "all in turns"

Row = Mapping[str, Any]
Ratio = tuple[float, float, float]
"""A ratio and its interval; without one, NaN."""
NAN = float("nan")


def text() -> str:
    """The whole page."""
    rows = load(FILE)["programs"]
    measured = measured_rows(rows)
    halves = [row["split"] for row in rows.values()]
    values = {
        "gpus": "; ".join(sorted({m for row in rows.values() if (m := _machine(row))})),
        "developed": halves.count("developed"), "held_out": halves.count("held_out"),
        "files": FILE, "summary": _summary(measured),
        "rows": [_row(name, row) for name, row in measured.items()],
        "means": list(_means(measured)),
        "modes": [_modes(name, row) for name, row in measured.items()],
        "failures": [
            (f"`{name}`", *one) for name, row in rows.items() for one in row["failures"].items()
        ],
        "tried": [(f"`{name}`", *one) for name, row in rows.items() for one in _tried(row)],
        "untried": _untried(rows), "bounds": _bounds(rows),
        "lines": "5 to 50 steps each", "times": [_times(name, row) for name, row in rows.items()],
        "commands": _commands(rows), "first": FIRST, **_first_means(), "short": SHORT,
        "losses": list(_losses()), "losses_file": LOSSES, "engines": list(_engines()),
        "engines_file": VLLM,
    }  # fmt: skip
    return render_page(__file__, PAGE, values)


def measured_rows(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Programs whose step was measured as written."""
    return {name: row for name, row in rows.items() if row["step_seconds"].get(AS_WRITTEN)}


def both_kinds(row: Row) -> bool:
    """Whether both kinds of best settings were measured, so that the faster one is known."""
    return all(row["step_seconds"].get(f"{BEST}, {mode}") for mode in MODES)


def crashed(row: Row) -> bool:
    """Whether the program ended with an error under its bundle; it counts as written then."""
    return str(row["failures"].get(BUNDLE, "")).startswith("ended")


def in_turns(row: Row) -> bool:
    """Whether what ships was timed in turns with the program as written and its best settings."""
    return not row["bundle"] or crashed(row) or f"{AS_WRITTEN} / {BUNDLE}" in row["ratios"]


def shipped(row: Row, over: str) -> Ratio | None:
    """What ships beside ``AS_WRITTEN`` or ``BEST``: the bundle, or without one the program itself.

    A bundle that took no turns counts with what was proven in the program: the lesser of that
    gain (beside ``BEST`` over the gain of the best settings) and of the steps in turns over the
    proven one, because other programs started meanwhile, which makes the original slower than in
    turns.  None if neither was measured, or not both kinds of best settings.
    """
    found = row["ratios"]
    has_bundle = row["bundle"] and not crashed(row)
    if has_bundle and in_turns(row) and (over == AS_WRITTEN or both_kinds(row)):
        return _ratio(found.get(f"{over} / {BUNDLE}"))
    together = row["optimize"].get("together") if has_bundle else None
    ships = _ratio(together) if has_bundle else (1.0, 1.0, 1.0)
    if ships is None:
        return None
    best = _ratio(found.get(f"{AS_WRITTEN} / {BEST}"))
    if over == BEST and (best is None or not both_kinds(row)):
        return None
    if together is not None:
        arm = AS_WRITTEN if over == AS_WRITTEN else f"{BEST}, {row['best']}"
        beside = median(row["step_seconds"][arm]) / together["step_seconds"][1]
        gain = ships[0] / best[0] if over == BEST and best is not None else ships[0]
        return (min(gain, beside), NAN, NAN)
    if over == AS_WRITTEN or best is None:
        return ships
    return (1 / best[0], 1 / best[2], 1 / best[1])


def _ratio(found: Row | None) -> Ratio | None:
    return None if found is None else (found["ratio"], *found["interval"])


def _losses() -> Iterator[tuple[str, ...]]:
    """Programs, their changes, and their losses beside those of moved originals."""
    rows = load(LOSSES)["programs"] if LOSSES.exists() else {}
    for name, row in rows.items():
        changes = ", ".join(change["name"] for change in row.get("changes", ())) or "–"
        repeats = {True: "yes", False: "no", None: "–"}[row.get("original_repeats")]
        yield f"`{name}`", changes, losses.line(row), repeats


def _engines() -> Iterator[tuple[str, ...]]:
    """Workloads of vLLM and what was tried on each."""
    rows = load(VLLM)["programs"] if VLLM.exists() else {}
    for name, row in rows.items():
        attempts = row["optimize"].get("attempts", [])
        for attempt in attempts:
            yield f"`{name}`", attempt["change"]["name"], attempt["outcome"], attempt["reason"]
        if not attempts:
            seconds = row["optimize"]["seconds"]
            yield f"`{name}`", "–", "not measured", f"no change was compared in {seconds:.0f} s"


def _shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    if isnan(ratio[1]):
        return f"{ratio[0]:.2f} ‡"
    return f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"


def _machine(row: Row) -> str:
    found = row["optimize"]
    if "device" not in found:
        return ""
    return f"{found['device']}, driver {found['driver']}, PyTorch {found['torch']}"


def _summary(rows: Mapping[str, Row]) -> str:
    kept = sum(row["bundle"] for row in rows.values())
    seconds = max(row["optimize"]["seconds"] for row in rows.values())
    late = sum(not in_turns(row) for row in rows.values())
    marked = (
        f" Of {late} programs (‡) the bundle had not started when the time of the benchmark was "
        "over: shown is the lesser of what was proven inside of the program (beside the best "
        "settings over their gain) and of the step in turns over the proven step, because other "
        "programs started while it was proven. This rule was chosen after the run was seen; it "
        "lowers both means."
    )
    ended = [f"`{name}`" for name, row in rows.items() if crashed(row)]
    failed = f" With its bundle {', '.join(ended)} ended with an error, and counts as written."
    failed = failed if ended else ""
    return wrapped(
        f"Of {len(rows)} measured programs, nostall proved a gain of {kept}. The longest run of "
        f"`nostall optimize` took {seconds / 60:.1f} minutes.{marked if late else ''}{failed}"
    )


def _row(name: str, row: Row) -> dict[str, Any]:
    null: Row = row["ratios"].get(f"{AS_WRITTEN} / {BUNDLE}") or next(
        iter(row["ratios"].values()), {}
    )
    interval = null.get("null_interval")
    return {
        "name": name, "kind": row["kind"], "half": _HALVES[row["split"]],
        "as_written": median(row["step_seconds"][AS_WRITTEN]),
        "best": row["best"] if both_kinds(row) else f"{row['best']} alone",
        "over_best_settings": _shown(_ratio(row["ratios"].get(f"{AS_WRITTEN} / {BEST}"))),
        "over_bundle": "failed" if crashed(row)
        else _shown(shipped(row, AS_WRITTEN) if row["bundle"] else None),
        "proven": _shown(_ratio(row["optimize"].get("together"))),
        "best_over_bundle": _shown(shipped(row, BEST)),
        "null": interval and f"{interval[0]:.3f} to {interval[1]:.3f}",
        "kept": ", ".join(row["optimize"].get("kept", [])) or "nothing",
    }  # fmt: skip


def _means(rows: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    for over in (AS_WRITTEN, BEST):
        for half in ("all", *_HALVES, _TURNS):
            chosen = [
                row for row in rows.values()
                if half in ("all", row["split"]) or (half == _TURNS and in_turns(row))
            ]  # fmt: skip
            found = [ratio for row in chosen if (ratio := shipped(row, over)) is not None]
            if found:
                yield {
                    "over": over, "half": f"{len(found)}, {_HALVES.get(half, half)}",
                    "ratios": [ratio for ratio, _, _ in found],
                    "faster": sum(low > 1 for _, low, _ in found),
                    "slower": sum(high < 1 for _, _, high in found),
                }  # fmt: skip


def _modes(name: str, row: Row) -> dict[str, Any]:
    found = {m: _shown(_ratio(row["ratios"].get(f"{AS_WRITTEN} / {BEST}, {m}"))) for m in MODES}
    return {**_row(name, row), **found}


def _tried(row: Row) -> Iterator[tuple[str, str, str]]:
    """What was not kept: attempts, then changes that this program cannot take."""
    found = row["optimize"]
    if failure := found.get("failure"):
        yield "–", "no answer", failure
    for attempt in found.get("attempts", []):
        if attempt["outcome"] != "kept":
            yield attempt["change"]["name"], attempt["outcome"], attempt["reason"]
    for level in found.get("levels", []):
        if not level["change"] and not level["reason"].startswith("advice"):
            yield level["name"], "not possible", level["reason"]
    for note in found.get("notes", []):
        if match := re.match(r"not tried in (--minutes \S+): (.+), which takes", note):
            yield match[2], "not tried", f"too little of {match[1]} was left"
        elif match := re.match(r"not tried: (.+), because (.+)", note):
            yield match[1], "not needed", match[2]
        elif "are over" in note or note.startswith("the program ended"):
            yield "–", "ended", note
        elif note.startswith("interrupted"):
            yield "–", "ended", "the benchmark's limit of seconds was over"


def _untried(rows: Mapping[str, Row]) -> str:
    answers = [row["optimize"] for row in rows.values()]
    certificates = sum(bool(answer.get("certificate_of_no_gain")) for answer in answers)
    silent = sum("levels" not in answer for answer in answers)
    return wrapped(
        f"Programs without an answer of `nostall optimize`: {silent}. Certificates of no gain: "
        f"{certificates}; they need a bound."
    )


def _bounds(rows: Mapping[str, Row]) -> str:
    tried = [
        level for row in rows.values() for level in row["optimize"].get("levels", [])
        if level["change"]
    ]  # fmt: skip
    bounded = sum(level["bound"] is not None for level in tried)
    broken = [
        f"`{name}`: {note}" for name, row in rows.items()
        for note in row["optimize"].get("notes", []) if "above its bound" in note
    ]  # fmt: skip
    text = f"{bounded} of {len(tried)} changes had a bound of their gain. On GPUs a bound comes "
    text += "from a trace of the original after all attempts. "
    if not bounded:
        text += "The programs were not traced in these runs, so no bound could be held or broken."
    else:
        text += f"Kept gains above their bound: {'; '.join(broken) or 'none'}."
    return wrapped(text)


def _times(name: str, row: Row) -> dict[str, Any]:
    starts: Mapping[str, float] = row["seconds_until_warm"]
    return {
        "name": name, "minutes": _option(row["command"], "--minutes"),
        "at_once": f"{_option(row['command'], '--at-once'):g}",
        "seconds": row["optimize"]["seconds"],
        "as_written": starts.get(AS_WRITTEN), "best": starts.get(f"{BEST}, {row['best']}"),
        "bundle": starts.get(BUNDLE),
    }  # fmt: skip


def _option(command: str, name: str) -> float:
    """A number in a command; 1 without it."""
    found = re.search(rf"{name} (\S+)", command)
    return 1.0 if found is None else float(found[1])


def _commands(rows: Mapping[str, Row]) -> str:
    lines = sorted({f"{row['date'][:10]}  {row['command']}" for row in rows.values()})
    return "```\n" + "\n".join(lines) + "\n```"


def _first_means() -> dict[str, float]:
    """Geometric means of the first run."""
    rows = load(FIRST)["programs"]
    names = {"first_written": AS_WRITTEN, "first_best": BEST}
    return {name: geometric_mean(ratios_over(over, rows)) for name, over in names.items()}


def ratios_over(over: str, rows: Mapping[str, Row]) -> Sequence[float]:
    """Ratio of what ships for each measured program; see :func:`shipped`."""
    found = (shipped(row, over) for row in measured_rows(rows).values())
    return [ratio[0] for ratio in found if ratio is not None]
