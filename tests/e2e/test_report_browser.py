"""The report page in Chromium: the script runs without errors and loads nothing."""

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks.sass.robustness.kill_resume import Synthetic, kernel

from nostall.core import Run
from nostall.report.tune.page import write_report
from nostall.report.tune.run_data import load_run
from nostall.search import make
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.triton_source import compile_triton

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "gemm_leakyrelu.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1400,1000",
    "--virtual-time-budget=5000",
)


@pytest.fixture(scope="module")
def browser() -> str:
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        if os.environ.get("NOSTALL_REQUIRE_BROWSER") == "1":
            pytest.fail(f"NOSTALL_REQUIRE_BROWSER=1 but none of {BROWSERS} is installed")
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton", reason="the run is made from a Triton example")
    path = tmp_path_factory.mktemp("browser") / "run"
    source = compile_triton(EXAMPLE, "gemm_leakyrelu@mma32", None, "sm_90")
    settings = Settings("anneal", evaluations=300)
    with Run.create(path, "nostall tune gemm.py:gemm_leakyrelu", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run)
    return write_report(path)


def dom(browser: str, page: Path, tmp_path: Path, fragment: str = "", *flags: str) -> str:
    """The HTML of the page after its script ran, without script elements."""
    profile = tmp_path / "profile"
    command = [browser, *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri() + fragment], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)


def body(text: str) -> str:
    """The opening tag of the body; it has the flags that the script sets."""
    match = re.search(r"<body[^>]*>", text)
    assert match, text[:500]
    return match[0]


def test_the_script_runs_and_draws_the_changed_blocks(
    browser: str, report: Path, tmp_path: Path
) -> None:
    text = dom(browser, report, tmp_path)
    assert 'data-ready="1"' in body(text)
    assert "data-errors" not in body(text)
    loaded = load_run(report.parent)
    num_blocks = text.count('<details class="block" data-n=')
    assert num_blocks == len(loaded.original.blocks)
    assert len(re.findall(r'class="row[^"]*" role="option"', text)) > 100
    assert re.search(r'<aside id="panel" hidden', text)


def test_a_fragment_selects_an_instruction_and_fills_the_panel(
    browser: str, report: Path, tmp_path: Path
) -> None:
    function = load_run(report.parent).original
    index = next(i.index for i in function.instructions if i.base == "HMMA")
    text = dom(browser, report, tmp_path, f"#i={index}")
    assert "data-errors" not in body(text)
    panel = text[text.index('<aside id="panel"') :]
    panel_text = html.unescape(panel)
    assert function.instructions[index].text.replace(".reuse", "") in panel_text
    assert "reads the results of" in panel_text
    assert "its results are read by" in panel_text
    assert re.search(r"SB\d</b>", panel_text)
    assert "cycles apart" in panel_text
    assert "no protection found" not in panel_text
    assert text.count('aria-selected="true"') == 2


def test_clicks_keys_and_filter_work(browser: str, report: Path, tmp_path: Path) -> None:
    """A script in a copy of the page clicks a row, presses keys and filters."""
    script = """<script>{
    const log = {};
    const selected = () => document.querySelector('.row.sel').dataset.i;
    const key = (k) => document.activeElement.dispatchEvent(
      new KeyboardEvent('keydown', { key: k, bubbles: true }));
    const row = document.querySelectorAll('.row[data-side="1"]')[3];
    const isPanelOpen = () => !document.getElementById('panel').hidden;
    row.click(); log.clicked = selected() === row.dataset.i && isPanelOpen();
    key('ArrowDown'); log.stepped = selected() !== row.dataset.i;
    key('Escape'); log.closed = !isPanelOpen();
    const box = document.getElementById('filter');
    box.value = 'HMMA'; box.dispatchEvent(new Event('input'));
    setTimeout(() => {
      const rows = [...document.querySelectorAll('.block:not([hidden]) .row:not(.dim) .txt')];
      log.filtered = rows.length > 0 && rows.every((r) => r.textContent.includes('HMMA'));
      document.body.dataset.log = Object.entries(log).map(([k, v]) => k + '=' + v).join(' ');
    }, 500);
    }</script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(report.read_text().replace("</body>", script))
    text = body(dom(browser, copy, tmp_path))
    assert "data-errors" not in text
    assert 'data-log="clicked=true stepped=true closed=true filtered=true"' in text


def test_the_page_loads_nothing(browser: str, report: Path, tmp_path: Path) -> None:
    text = dom(browser, report, tmp_path, "#i=5")
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert "http://" not in text and "https://" not in text


@pytest.mark.parametrize("flags", [(), ("--blink-settings=preferredColorScheme=0",)])
def test_a_screenshot_in_both_colour_schemes(
    browser: str, report: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    target = tmp_path / "page.png"
    dom(browser, report, tmp_path, "", *flags, f"--screenshot={target}")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 30_000


def test_measured_samples_are_drawn(browser: str, tmp_path: Path) -> None:
    source, path = kernel(), tmp_path / "run"
    settings = Settings(evaluations=20, objective="gpu", rounds=60, checks=2)
    with Run.create(path, "nostall tune k.cubin", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run, device=Synthetic(source.cubin))
    script = """<script>{
    const wide = (name) => document.querySelector('.spread .violin.' + name).getBBox().width > 5;
    const names = ['original', 'candidate', 'null'];
    const frame = document.querySelector('.spread').viewBox.baseVal;
    const inside = [...document.querySelectorAll('.spread text')].every((t) => {
      const box = t.getBBox();
      return box.x >= 0 && box.y >= 0 && box.x + box.width <= frame.width
        && box.y + box.height <= frame.height;
    });
    document.body.dataset.spread = names.map(wide).join() + ' ' + inside;
    }</script></body>"""
    page = write_report(path)
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", script))
    target = tmp_path / "page.png"
    text = body(dom(browser, copy, tmp_path, "", f"--screenshot={target}"))
    assert "data-errors" not in text
    assert 'data-spread="true,true,true true"' in text
    assert target.stat().st_size > 30_000
