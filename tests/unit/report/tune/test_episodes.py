"""What the report says of a learning run: its episodes, and the annealing that it began with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nostall.core import BadRun, Run, Trial
from nostall.report import write_report
from nostall.report.tune.episodes import LEAST_EPISODES, MOST_POINTS, points, returns, seeded
from nostall.report.tune.search_curve import curve
from nostall.report.units import Scale
from nostall.search import make
from nostall.search.episodes import ANNEALING_MOVE, NAME, Episode, EpisodeLog, read_episodes
from nostall.tuning.job import Settings, describe, tune
from nostall.tuning.source import load_cubin
from nostall.tuning.strategies import LOGS
from tests.unit.sass.game.kernels import NVCC, launch


def rollouts(count: int, each: int) -> list[Episode]:
    """Episode n of each rollout earns n per cent."""
    return [Episode(r, 10 * (r + 1), 4, float(n)) for r in range(count) for n in range(each)]


def trials(moves: list[str]) -> list[Trial]:
    return [Trial(n, 1.0 - n / 100, True, 1.0, move, 0, 0.1) for n, move in enumerate(moves)]


def test_episodes_come_back_and_other_files_are_refused(tmp_path: Path) -> None:
    assert read_episodes(tmp_path) == []
    log, wanted = EpisodeLog(tmp_path / LOGS), rollouts(2, 2)
    for episode in wanted:
        log.add(episode)
    path = tmp_path / LOGS / NAME
    assert read_episodes(tmp_path / LOGS) == wanted
    path.write_text(path.read_text() + "3,99")
    assert read_episodes(tmp_path / LOGS) == wanted
    head = path.read_text().splitlines()[0]
    for wrong in ("a,b\n1,2\n", f"{head}\n1,2,3\n", f"{head}\n1,2,3,nan\n", f"{head}\nx,2,3,4\n"):
        path.write_text(wrong)
        with pytest.raises(BadRun, match="run the tuning again"):
            read_episodes(tmp_path / LOGS)
    EpisodeLog(tmp_path / LOGS)
    assert read_episodes(tmp_path / LOGS) == []
    EpisodeLog(None).add(wanted[0])


@pytest.mark.parametrize("count, each", [(1, 4), (3, 1), (9, 2), (500, 3), (77, 5)])
def test_points_are_whole_rollouts(count: int, each: int) -> None:
    episodes = rollouts(count, each)
    found = points(episodes)
    assert 1 <= len(found) <= MOST_POINTS
    assert len(found) == 1 or count * each / len(found) >= LEAST_EPISODES
    assert found[-1].evaluations == episodes[-1].evaluations
    middle = (each - 1) / 2
    for point in found:
        assert point.mean == pytest.approx(middle) and point.low <= middle <= point.high
    assert points([]) == []


def test_the_figure_has_the_mean_between_the_quartiles() -> None:
    text = returns(rollouts(20, 4), "modelled")
    assert "modelled return" in text and text.count('class="quartiles"') == 1
    mean = [float(y) for y in re.findall(r" ([\d.]+)", text.split('class="mean" d="M')[1][:200])]
    assert len(set(mean)) == 1
    assert returns(rollouts(1, 4), "modelled") == "" == returns([], "modelled")


def test_annealing_is_told_from_play() -> None:
    tried = trials(["start", ANNEALING_MOVE, ANNEALING_MOVE, "a", "b"])
    assert seeded(tried) == 2
    text = curve(tried, Scale("s", 1.0), "modelled", 2)
    shade = re.search(r'class="seeding" x="([\d.]+)" y="14" width="([\d.]+)"', text)
    assert shade and float(shade[1]) == 76 and float(shade[2]) == pytest.approx(1188 / 2, abs=0.1)
    assert "seeding" not in curve(tried, Scale("s", 1.0), "modelled")


def test_the_page_of_a_learning_run(tmp_path: Path) -> None:
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch())
    settings = Settings("anneal", 0, None, 30)
    with Run.create(tmp_path / "run", "test", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run)
    plain = write_report(tmp_path / "run").read_text()
    assert "Learning" not in plain and "by annealing" not in plain
    log = EpisodeLog(tmp_path / "run" / LOGS)
    for episode in rollouts(3, 4):
        log.add(episode)
    rows = (tmp_path / "run" / "trials.csv").read_text().splitlines()
    head = rows[0].split(",").index("move")
    changed = [row.split(",") for row in rows[1:9]]
    for row in changed[1:]:
        row[head] = ANNEALING_MOVE
    text = "\n".join([rows[0], *(",".join(row) for row in changed), *rows[9:]]) + "\n"
    (tmp_path / "run" / "trials.csv").write_text(text)
    page = write_report(tmp_path / "run").read_text()
    assert "12 episodes in 3 rollouts" in page and 'class="quartiles"' in page
    assert "<dt>by annealing</dt><dd>7</dd>" in page and "<dt>by play</dt><dd>22</dd>" in page
    (tmp_path / "run" / LOGS / NAME).write_text("nonsense\n1\n")
    page = write_report(tmp_path / "run").read_text()
    assert "cannot be used" in page and "Learning" not in page
