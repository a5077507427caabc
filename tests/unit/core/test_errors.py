"""Error classes: documentation, exit codes and base classes; errors in one line."""

import inspect

import pytest

from nostall.core import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.NostallError)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_documented_cause_and_an_exit_code(cls):
    assert cls.__doc__
    assert cls.exit_code == 130 if cls is errors.Interrupted else cls.exit_code in (1, 2, 3)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.BadInput, 2),
        (errors.BadBinary, 2),
        (errors.UnsupportedArchitecture, 2),
        (errors.BadLaunch, 2),
        (errors.BadRun, 2),
        (errors.MissingPart, 3),
        (errors.IllegalMove, 1),
        (errors.ContractBroken, 1),
        (errors.Interrupted, 130),
    ],
)
def test_exit_codes(cls, code):
    assert cls.exit_code == code


def test_bad_input_is_the_base_of_all_errors_in_user_input():
    for cls in (errors.BadBinary, errors.BadLaunch, errors.BadRun):
        assert issubclass(cls, errors.BadInput)
    assert not issubclass(errors.MissingPart, errors.BadInput)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n  first\nsecond"), "ValueError: first"),
        (KeyError(), "KeyError: "),
        (OSError(2, "No such file"), "FileNotFoundError: [Errno 2] No such file"),
        (RuntimeError("x" * 300), "RuntimeError: " + "x" * errors.MAX_LINE),
    ],
)
def test_an_error_in_one_line(error, line):
    assert errors.one_line(error) == line
