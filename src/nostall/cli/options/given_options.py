"""Options that the user gave, and refusal of those that a command cannot honour."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from enum import Enum
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


def repeated_command(context: Any, changed: Mapping[str, str | None]) -> str:
    """The command line of a call with the parameters that the user gave, to be pasted.

    ``changed``: parameter -> its new value, or None to leave it out.
    """
    words = ["nostall", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        if parameter.name not in changed:
            words += given_words(context, (parameter.name,))
        elif (value := changed[parameter.name]) is not None:
            words += _words(parameter, value)
    return shlex.join(words)


def given_words(context: Any, names: Collection[str]) -> tuple[str, ...]:
    """The words by which the user gave those of the parameters ``names`` that were given."""
    given = given_options(context)
    parameters = [] if context is None else context.command.params
    return tuple(
        word
        for parameter in parameters
        if parameter.name in names and parameter.name in given
        for word in _words(parameter, context.params[parameter.name])
    )


def _words(parameter: Any, value: Any) -> list[str]:
    """The words that give a parameter a value."""
    if parameter.param_type_name == "argument":
        return [str(value)]
    if getattr(parameter, "is_flag", False):
        names = parameter.opts if value else parameter.secondary_opts
        return [max(names, key=len)]
    values = value if isinstance(value, list | tuple) else [value]
    texts = [_text(v) for v in values]
    option = _written(parameter)
    return [
        word
        for text in texts
        for word in ([f"{option}={text}"] if text.startswith("-") else [option, text])
    ]


def _text(value: Any) -> str:
    """A value as the command line has it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)


def _written(parameter: Any) -> str:
    """The longest option name of a parameter; the name in capitals for an argument."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.opts, key=len))
