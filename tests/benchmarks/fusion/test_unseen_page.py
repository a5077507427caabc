"""The page of unseen chains: what counts as deployed, and what the summary says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from benchmarks.fusion.unseen import page as unseen_page
from benchmarks.fusion.unseen.page import PAGE, by_kind, deployed, slow_chains, summary, text
from benchmarks.harness.result_file import results


def chain(stitched: float, *, wrong: bool = False) -> dict[str, Any]:
    """A chain that takes torch.compile 10 us, and the stitched kernels this many."""
    noise = [1.0, 1.001, 0.999, 1.0005, 0.9995] * 2
    times = {"torch.compile": 10.0, "torch.compile again": 10.0, "explorer": stitched}
    return {
        "us": times,
        "samples_us": {name: [time * n for n in noise] for name, time in times.items()},
        "wrong": {"explorer": "off"} if wrong else {},
        "versions": {"explorer": {"plans": ["block 1x1024, 4 warps"]}},
    }


def test_a_slower_or_wrong_version_is_not_deployed() -> None:
    assert deployed(chain(5.0)) == pytest.approx(2.0)
    assert deployed(chain(20.0)) == 1.0
    assert deployed(chain(5.0, wrong=True)) == 1.0


def test_the_summary_judges_each_target() -> None:
    chains = {"rms norm 1x1": chain(5.0), "rms norm 2x2": chain(20.0)}
    rows = {name: (value, met) for name, value, met in summary(chains)}
    assert rows["what runs over torch.compile, geometric mean, at least 1.5"] == ("1.414", "no")
    assert rows["modelled best plans: slowest chain, at least 0.9"] == ("0.50", "no")
    assert rows["chains with a wrong result that torch.compile has right"] == ("0", "yes")
    assert "| rms norm | 2 | 1.00 (0.50) | – | 1.41 |" in by_kind(chains)
    assert "rms norm 2x2" in slow_chains(chains) and "rms norm 1x1" not in slow_chains(chains)


def test_the_page_is_that_of_the_committed_results() -> None:
    page = text()
    assert all(f"## The {half} half" in page for half in ("train", "test"))
    assert PAGE.read_text() == page, "run `python -m benchmarks page fusion-unseen`"


def test_the_mode_with_more_tuning_is_a_baseline_of_its_own() -> None:
    tuned = chain(5.0)
    for name, time in (("max-autotune", 8.0), ("measured plans", 4.0)):
        tuned["us"][name] = time
        tuned["samples_us"][name] = [time * n for n in (1.0, 1.001, 0.999, 1.0005, 0.9995)] * 2
    tuned["versions"]["measured plans"] = {"plans": ["warp 1x128, 1 warps"]}
    tuned |= {"gpu": "a GPU", "torch": "2", "failures": {}}
    failed = chain(5.0) | {"gpu": "a GPU", "torch": "2", "failures": {"max-autotune": "no file"}}
    assert deployed(tuned, "max-autotune") == pytest.approx(2.0)
    path = results("fusion") / "never_stored.json"
    record = {"date": "2026-11-27", "chains": {"a chain": tuned, "another": failed}}
    with mock.patch.object(unseen_page, "load", lambda _: record):
        rows = "\n".join(unseen_page.autotuned_section(path))
    assert "| a chain | 8.0 | 1.25 | 2.00 | warp 1x128, 1 warps |" in rows
    assert "| another | – | – | – | no file |" in rows
    assert "2.00 in the geometric mean of 1 chains (target 1.3: yes)" in " ".join(rows.split())
    assert "the time for the others ended" in " ".join(rows.split())
    all_measured = record | {
        "chains": {str(at): tuned for at in range(unseen_page.AUTOTUNED_COUNT)}
    }
    with mock.patch.object(unseen_page, "load", lambda _: all_measured):
        assert "ended" not in " ".join(unseen_page.autotuned_section(path))
