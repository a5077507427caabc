"""``docs/results/learners.md``: the learners beside their baselines and their goals.

python -m benchmarks page learners
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render_page, source
from benchmarks.learners.pages.digits import digits
from benchmarks.learners.pages.parts import goal
from benchmarks.learners.pages.samplers import calibration, errors, kernels

PAGE = PAGES / "learners.md"
FOLDER = results("learners")
Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    operators, topics = source(FOLDER / "operators.json"), source(FOLDER / "topics.json")
    values = {
        "operators": operators,
        "hungarian_goal": goal(operators["pipeline_mean"]["hungarian_accuracy"], 0.85),
        "number_goal": goal(operators["pipeline_mean"]["number_within_1"], 0.8),
        "k_means": [
            f"{row['hungarian_accuracy']:.3f} with {factor} times the true number"
            for factor, row in operators["k_means_test"].items()
        ],
        "kernels": kernels(),
        "topics": topics,
        "rand_index": fmean(row["rand_index"] for row in topics["inferred"]),
        "topic_figures": _topic_figures(topics),
        "digits": digits(),
        "errors": errors(),
        "calibration": calibration(),
    }
    return render_page(__file__, PAGE, values)


def _topic_figures(result: Row) -> list[tuple[str, str]]:
    """Figures of the topic model on synthetic documents, with their goals."""
    speed, baselines = result["speed"], result["baselines"]
    us_a_token = speed["1"]["microseconds_per_token_and_sweep"]
    novelty = baselines.get("topics_novelty_auroc")
    if novelty is None:
        novelty = fmean(row["novelty_auroc"] for row in result["inferred"])
    figures = [
        ("seeds with the exact number of new kinds", _exact(result)),
        ("least adjusted Rand index", goal(result["least_rand_index"], 0.95)),
        ("µs a token and sweep", goal(us_a_token, 0.3, at_most=True)),
        ("CPU time for 16 times the data", goal(speed["ratio"], 19, at_most=True)),
        ("novelty AUROC of the topic model", f"{novelty:.3f}"),
        ("novelty AUROC of a random forest", f"{baselines['forest_novelty_auroc']:.3f}"),
    ]
    if isinstance(result["perplexity"], list):
        name = "held-out perplexity over that of tomotopy (goal: within 2 %)"
        figures.append((name, ", ".join(f"{row['ratio']:.3f}" for row in result["perplexity"])))
    return figures


def _exact(result: Row) -> str:
    """The number of seeds with the exact number of new kinds, beside the goal."""
    exact, seeds = (int(part) for part in result["exact_number_of_new_kinds"].split(" of "))
    missed = ", missed" if exact < 0.9 * seeds else ""
    return f"{exact} of {seeds} (goal ≥ 9 of 10{missed})"
