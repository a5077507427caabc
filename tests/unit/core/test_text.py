"""Text for terminals, and suggestions of names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core.text.suggest import did_you_mean, unknown
from nostall.core.text.terminal import escape_controls, is_printable


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_escaped_text_is_printable(text):
    escaped = escape_controls(text)
    assert is_printable(escaped)
    assert (escaped == text) == is_printable(text)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\udcff.cubin", "\\udcff.cubin"),
        ("µs → 3 x", "µs → 3 x"),
    ],
)
def test_examples(text, escaped):
    assert escape_controls(text) == escaped


def test_kept_characters():
    assert escape_controls("a\tb\nc\r", keep="\n\t") == "a\tb\nc\\r"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("aneal", "anneal"), ("PPO", "ppo"), ("zzz", None), ("", None)],
)
def test_suggestions(name, suggestion):
    text = did_you_mean(name, ("anneal", "ppo", "sip"))
    assert text == (f"; did you mean {suggestion!r}?" if suggestion else "")


def test_unknown_names():
    assert unknown("planner", "dappel", ("dapple", "spp")) == (
        "planner 'dappel' is unknown; allowed are dapple, spp; did you mean 'dapple'?"
    )
