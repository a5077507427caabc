"""Tests of the report of a learning run: its episodes and the annealing that precedes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nostall.core import BadRun, Run, Trial
from nostall.report.tune.page import write_report
from nostall.report.tune.search_curve import (
    MAX_POINTS,
    MIN_EPISODES,
    count_annealing_trials,
    draw_returns,
    draw_search_curve,
    group_episodes,
)
from nostall.report.units import Scale
from nostall.search import make
from nostall.search.episodes import ANNEALING_MOVE, NAME, Episode, EpisodeLog, read_episodes
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import load_cubin
from nostall.tuning.strategies import LOG_FOLDER
from tests.unit.papers.game.kernels import NVCC, launch


def make_episodes(num_rollouts: int, size: int) -> list[Episode]:
    """``size`` episodes per rollout; the return of episode n of a rollout is n per cent."""
    return [
        Episode(rollout, 10 * (rollout + 1), 4, float(n))
        for rollout in range(num_rollouts)
        for n in range(size)
    ]


def make_trials(moves: list[str]) -> list[Trial]:
    return [Trial(n, 1.0 - n / 100, True, 1.0, move, 0, 0.1) for n, move in enumerate(moves)]


def test_episode_log_round_trips_and_rejects_invalid_files(tmp_path: Path) -> None:
    assert read_episodes(tmp_path) == []
    log, episodes = EpisodeLog(tmp_path / LOG_FOLDER), make_episodes(2, 2)
    for episode in episodes:
        log.add(episode)
    path = tmp_path / LOG_FOLDER / NAME
    assert read_episodes(tmp_path / LOG_FOLDER) == episodes
    path.write_text(path.read_text() + "3,99")
    assert read_episodes(tmp_path / LOG_FOLDER) == episodes
    header = path.read_text().splitlines()[0]
    for text in (
        "a,b\n1,2\n",
        f"{header}\n1,2,3\n",
        f"{header}\n1,2,3,nan\n",
        f"{header}\nx,2,3,4\n",
    ):
        path.write_text(text)
        with pytest.raises(BadRun, match="run the tuning again"):
            read_episodes(tmp_path / LOG_FOLDER)
    EpisodeLog(tmp_path / LOG_FOLDER)
    assert read_episodes(tmp_path / LOG_FOLDER) == []
    EpisodeLog(None).add(episodes[0])


@pytest.mark.parametrize(("num_rollouts", "size"), [(1, 4), (3, 1), (9, 2), (500, 3), (77, 5)])
def test_each_point_covers_full_rollouts(num_rollouts: int, size: int) -> None:
    episodes = make_episodes(num_rollouts, size)
    points = group_episodes(episodes)
    assert 1 <= len(points) <= MAX_POINTS
    assert len(points) == 1 or num_rollouts * size / len(points) >= MIN_EPISODES
    assert points[-1].evaluations == episodes[-1].evaluations
    mean = (size - 1) / 2
    for point in points:
        assert point.mean == pytest.approx(mean) and point.low <= mean <= point.high
    assert group_episodes([]) == []


def test_figure_has_mean_and_quartiles() -> None:
    text = draw_returns(make_episodes(20, 4), "modelled")
    assert "modelled return" in text and text.count('class="quartiles"') == 1
    heights = [float(y) for y in re.findall(r" ([\d.]+)", text.split('class="mean" d="M')[1][:200])]
    assert len(set(heights)) == 1
    assert draw_returns(make_episodes(1, 4), "modelled") == "" == draw_returns([], "modelled")


def test_annealing_is_counted_and_shaded() -> None:
    trials = make_trials(["start", ANNEALING_MOVE, ANNEALING_MOVE, "a", "b"])
    assert count_annealing_trials(trials) == 2
    text = draw_search_curve(trials, Scale("s", 1.0), "modelled", 2)
    shade = re.search(r'class="seeding" x="([\d.]+)" y="14" width="([\d.]+)"', text)
    assert shade and float(shade[1]) == 76 and float(shade[2]) == pytest.approx(1188 / 2, abs=0.1)
    assert "seeding" not in draw_search_curve(trials, Scale("s", 1.0), "modelled")


def test_page_of_a_learning_run(tmp_path: Path) -> None:
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch())
    settings = Settings("anneal", evaluations=30)
    with Run.create(tmp_path / "run", "test", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run)
    page = write_report(tmp_path / "run").read_text()
    assert "Learning" not in page and "by annealing" not in page
    log = EpisodeLog(tmp_path / "run" / LOG_FOLDER)
    for episode in make_episodes(3, 4):
        log.add(episode)
    rows = (tmp_path / "run" / "trials.csv").read_text().splitlines()
    move_column = rows[0].split(",").index("move")
    changed = [row.split(",") for row in rows[1:9]]
    for row in changed[1:]:
        row[move_column] = ANNEALING_MOVE
    text = "\n".join([rows[0], *(",".join(row) for row in changed), *rows[9:]]) + "\n"
    (tmp_path / "run" / "trials.csv").write_text(text)
    page = write_report(tmp_path / "run").read_text()
    assert "12 episodes in 3 rollouts" in page and 'class="quartiles"' in page
    assert "<dt>by annealing</dt><dd>7</dd>" in page and "<dt>in episodes</dt><dd>22</dd>" in page
    (tmp_path / "run" / LOG_FOLDER / NAME).write_text("nonsense\n1\n")
    page = write_report(tmp_path / "run").read_text()
    assert "cannot be used" in page and "Learning" not in page


@pytest.mark.parametrize("num_points", [2, 3])
def test_few_last_episodes_are_merged_into_the_point_before(num_points: int) -> None:
    full = [Episode(n, n, 4, float(n)) for n in range(num_points - 1) for _ in range(MIN_EPISODES)]
    last = Episode(num_points, 99, 4, 50.0)
    points = group_episodes([*full, last])
    assert [point.evaluations for point in points] == [*range(num_points - 2), 99]
