"""Which strategy and objective a kernel gets, and which combinations are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from nostall.core import BadInput
from nostall.search.orders.random_orders import RandomOrders
from nostall.tuning.strategies import check_choice, complete_choice, make_strategy


@pytest.mark.parametrize(
    ("given", "has_ptx", "more", "expected"),
    [
        ((None, "gpu"), True, {}, ("assembler", "gpu")),
        ((None, "gpu"), False, {}, ("anneal", "gpu")),
        ((None, None), True, {}, ("assembler", "recorded")),
        ((None, None), False, {}, ("anneal", "model")),
        ((None, "model"), True, {}, ("anneal", "model")),
        (("sip", None), True, {}, ("sip", "model")),
        (("assembler", None), True, {}, ("assembler", "recorded")),
        ((None, "gpu"), True, {"has_policy": True}, ("ppo", "gpu")),
        ((None, "gpu"), True, {"is_distributed": True}, ("anneal", "gpu")),
    ],
)
def test_ptx_is_searched_where_there_is_some(
    given: tuple[Any, Any], has_ptx: bool, more: dict[str, bool], expected: tuple[str, str]
) -> None:
    assert complete_choice(*given, has_ptx=has_ptx, **more) == expected


@pytest.mark.parametrize(
    ("strategy", "objective", "has_ptx", "is_distributed", "message"),
    [
        ("assembler", "gpu", False, False, "k.cubin has no PTX"),
        ("assembler", "model", True, False, "has no model"),
        ("assembler", "gpu", True, True, "measures on one GPU"),
        ("anneal", "recorded", True, False, "the strategy is anneal"),
        ("anneal", "guess", True, False, "allowed are gpu, recorded, model"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(
    strategy: str, objective: str, has_ptx: bool, is_distributed: bool, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_choice(
            strategy, objective, has_ptx=has_ptx, is_distributed=is_distributed, origin="k.cubin"
        )


def test_the_strategy_is_made_by_its_name() -> None:
    assert isinstance(make_strategy("assembler"), RandomOrders)
    with pytest.raises(BadInput, match="allowed are anneal, assembler"):
        make_strategy("nothing")


@pytest.mark.parametrize("package", ["nostall.papers", "nostall.cli.tuning.tune"])
def test_strategies_that_learn_are_registered_by_the_papers(package: str) -> None:
    """The command imports them; another program imports ``nostall.papers``."""
    program = (
        "from nostall.tuning import strategies as s\n"
        "assert not s.LEARNING_STRATEGIES\n"
        "try: s.make_strategy('ppo')\n"
        "except Exception as error: assert 'import nostall.papers' in str(error)\n"
        f"import {package}\n"
        "print(*sorted(s.LEARNING_STRATEGIES))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["cuasmrl", "ppo"], ran.stderr
