"""Tests of the command group: help page, version, shell completion and lazy imports."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nostall import __version__
from nostall.cli import app
from nostall.cli.options.help_panels import DAILY
from nostall.cli.verbs import LEVELS, VERBS, load_command

MAX_SUMMARY_LENGTH = 62
"""Characters of a summary that fit on one line of the help page at 80 columns."""
SLOW_MODULES = {"numba", "networkx", "nostall.sass", "nostall.parallel", "nostall.tuning"}


def run_main(*args: str, **variables: str) -> tuple[str, set[str]]:
    """Standard output of ``nostall`` in a new process, and the modules it has imported."""
    code = (
        "import sys\n"
        "from nostall.cli import main\n"
        f"sys.argv = ['nostall', *{args!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", **variables},
    )
    return done.stdout, set(done.stderr.split())


def complete(words: str) -> tuple[list[str], set[str]]:
    """Completions of a command line in bash, and the imported modules."""
    position = str(len(words.split(" ")) - 1)
    output, modules = run_main(
        _NOSTALL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position
    )
    return output.split(), modules


def test_the_help_page_has_one_line_per_command() -> None:
    page, modules = run_main("--help")
    lines = page.splitlines()
    for name, verb in VERBS.items():
        assert [line for line in lines if f" {name} " in line and verb.summary in line]
    assert "--install-completion" in page and "--version" in page
    text = " ".join(page.split())
    assert "nostall optimize tries changes on a whole program" in text
    assert "fuse PyTorch functions" in text and "pipeline" in text and "traces" in text
    assert "nostall.cli.verbs" in modules and not modules & SLOW_MODULES


@pytest.mark.parametrize("name", VERBS)
def test_the_summary_of_a_command_is_the_first_line_of_its_help(name: str) -> None:
    command, summary = load_command(name), VERBS[name].summary
    assert inspect.cleandoc(command.help).splitlines()[0] == summary
    assert len(summary) <= MAX_SUMMARY_LENGTH


@pytest.mark.parametrize("name", VERBS)
def test_the_example_of_a_command_is_one_of_its_calls(name: str) -> None:
    command, words = load_command(name), VERBS[name].example.split()
    assert f"nostall {name}" in command.epilog
    if hasattr(command, "commands"):
        assert words[0] in command.commands
    else:
        command.make_context(name, words)


@pytest.mark.parametrize("name", VERBS)
def test_each_option_has_a_panel_and_the_daily_ones_come_first(name: str) -> None:
    commands = {name: load_command(name)}
    commands |= {f"{name} {k}": c for k, c in getattr(commands[name], "commands", {}).items()}
    for title, command in commands.items():
        options = {p.name: p for p in command.params if p.param_type_name == "option"}
        assert set(DAILY.get(title, ())) <= set(options)
        panels = {key: option.rich_help_panel for key, option in options.items()}
        assert "Other" not in panels.values()
        first = [key for key, panel in panels.items() if panel is None]
        assert len(first) <= 3 if title in DAILY else len(first) == len(options) <= 12


def test_each_command_belongs_to_one_level() -> None:
    verbs = [verb for level in LEVELS for verb in level.verbs]
    assert sorted(verbs) == sorted(set(verbs)) == sorted(VERBS)
    page, _ = run_main("--help")
    assert [page.index(level.title) for level in LEVELS] == sorted(
        page.index(level.title) for level in LEVELS
    )


def test_version() -> None:
    output, modules = run_main("--version")
    assert output == f"nostall {__version__}\n"
    assert not modules & SLOW_MODULES


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["tunes"])
    assert result.exit_code == 2
    assert "No such command 'tunes'" in result.output


def test_a_file_instead_of_a_command_is_told_its_command(tmp_path: Path) -> None:
    file = tmp_path / "my trace.json.gz"
    file.touch()
    result = CliRunner().invoke(app, [str(file)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert f"try nostall characterize '{file}'" in result.output


def test_no_module_of_a_command_is_imported_at_the_start() -> None:
    code = "import sys, nostall.cli; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "nostall.cli.verbs" in modules and not modules & SLOW_MODULES


def test_completion_of_command_names_imports_no_command() -> None:
    names, modules = complete("nostall t")
    assert names == ["tune", "train"] and not modules & SLOW_MODULES
    names, _ = complete("nostall ")
    assert names == list(VERBS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nostall --ver", ["--version"]),
        ("nostall doctor --f", ["--format"]),
        ("nostall verify --ar", ["--arch"]),
        ("nostall store v", ["verify"]),
    ],
)
def test_completion_of_options_and_subcommands(words: str, expected: list[str]) -> None:
    assert complete(words)[0] == expected


def test_only_the_top_level_installs_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "--install-completion" not in CliRunner().invoke(app, ["store", "--help"]).output
    assert "--install-completion" not in CliRunner().invoke(app, ["doctor", "--help"]).output


def test_the_script_of_the_completion() -> None:
    script, modules = run_main(
        "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert "_NOSTALL_COMPLETE=complete_bash" in script and not modules & SLOW_MODULES


@pytest.mark.parametrize("name", ["tune", "train", "fuse"])
def test_the_help_page_shows_the_names_of_extras(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square brackets are not interpreted as markup."""
    monkeypatch.setenv("COLUMNS", "200")
    extra = "fusion" if name == "fuse" else "rl"
    output = CliRunner().invoke(app, [name, "--help"]).output
    assert f"pip install 'nostall[{extra}]'" in output
    assert "``" not in output


def test_the_generated_reference_has_no_markup_of_docstrings() -> None:
    command = [sys.executable, "-m", "typer", "nostall.cli", "utils", "docs", "--name", "nostall"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout.replace("```", "")
    assert "``" not in text and ":class:" not in text and "&#" not in text
    assert "pip install 'nostall[rl]'" in text
    for name, verb in VERBS.items():
        assert f"* `{name}`: {verb.summary}" in text and f"## `nostall {name}`" in text
