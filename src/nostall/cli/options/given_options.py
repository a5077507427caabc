"""Options that the user gave, and refusal of those that a command cannot honour."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import typer

from nostall.core.errors import BadInput

GivenContext = typer.Context
"""Type of the parameter by which a command gets the context of its call."""
NO_CONTEXT: GivenContext = cast(typer.Context, None)
"""Default of that parameter, for calls from Python: no option counts as given."""
_FROM_USER = ("COMMANDLINE", "ENVIRONMENT", "PROMPT")
"""Sources of a parameter's value other than its default."""


def given_options(context: Any) -> dict[str, str]:
    """Names of the parameters that the user gave, and how they are written, such as ``--seed``."""
    if context is None:
        return {}
    return {
        parameter.name: _written(parameter)
        for parameter in context.command.params
        if getattr(context.get_parameter_source(parameter.name), "name", "") in _FROM_USER
    }


def refuse_options(context: Any, names: Collection[str], reason: str) -> None:
    """Raise :class:`BadInput` if the user gave one of the parameters ``names``.

    ``reason`` says why the option cannot be honoured and what to do; it follows the option.
    """
    given = given_options(context)
    for name in names:
        if name in given:
            raise BadInput(f"{given[name]} {reason}")


def refuse_all_but(context: Any, names: Collection[str], reason: str) -> None:
    """Raise :class:`BadInput` if the user gave a parameter that is not among ``names``."""
    refuse_options(context, [name for name in given_options(context) if name not in names], reason)


def _written(parameter: Any) -> str:
    """The longest option name of a parameter; the name in capitals for an argument."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.opts, key=len))
