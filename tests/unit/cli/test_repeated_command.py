"""Printed next commands have the options that the user gave."""

import shlex
from typing import Any

import pytest
import typer

from nostall.cli import app
from nostall.cli.options.given_options import given_words, repeated_command

GROUP: Any = typer.main.get_command(app)
TUNE = GROUP.get_command(GROUP.make_context("nostall", ["tune"]), "tune")
CALLS = [
    "k.ptx --kernel saxpy --launch l.toml --seconds 3 --out p",
    "'a b.py:k' --arch sm_80 --seed 7 --evaluations 50 --checks 4 --timing graph --cold",
    "k.ptx --launch l.toml --ptxas-options=-v --ptxas-options='-v -O2' --recording r.json",
    "k.ptx --objective recorded --no-store --strategy assembler --native sip --quiet",
    "k.ptx --store --tolerance 1e-3,1e-2 --measured-latencies --sanitizer --pdl wait",
    "k.ptx --workers 2 --scheduler tcp://host:1 --format json --policy p.safetensors",
]
CHANGED = {"objective": "gpu", "out_dir": None, "recording": None}


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of a command line of ``nostall tune``."""
    context = TUNE.make_context("tune", list(words), parent=None, resilient_parsing=True)
    return dict(context.params)


def context_of(words: list[str]) -> Any:
    return TUNE.make_context("nostall tune", list(words), resilient_parsing=True)


@pytest.mark.parametrize("call", CALLS)
def test_the_repeated_command_parses_to_the_same_options(call: str) -> None:
    words = shlex.split(call)
    line = repeated_command(context_of(words), CHANGED)
    first, verb, *rest = shlex.split(line)
    assert (first, verb) == ("nostall", "tune")
    expected, found = parsed(words), parsed(rest)
    assert found == {**expected, **CHANGED}


def test_only_given_options_are_repeated() -> None:
    context = context_of(shlex.split("--resume r --workers 2 --scheduler tcp://h:1 --no-store"))
    names = ("workers", "scheduler", "store")
    assert given_words(context, names) == (
        *("--no-store", "--workers", "2", "--scheduler", "tcp://h:1"),
    )
    assert given_words(None, names) == ()
