"""Every object that the API reference documents exists under the name that it has there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

API = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api"
DIRECTIVE = re.compile(r"^\.\. auto[a-z]+:: (\S+)$", re.MULTILINE)


def documented_names() -> list[str]:
    return sorted(
        {name for page in API.glob("*.md") for name in DIRECTIVE.findall(page.read_text())}
    )


def resolve(name: str) -> object:
    """The object of a dotted name: the longest prefix that is a module, then its attributes.

    Raises ImportError where a module of the name needs a package that is not installed, and
    AttributeError where the object does not exist.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module + ".").startswith(error.name + "."):
                continue
            raise
        for attribute in parts[end:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(name)


def test_the_api_reference_names_objects() -> None:
    assert len(documented_names()) > 100


@pytest.mark.parametrize("name", documented_names())
def test_documented_objects_exist(name: str) -> None:
    try:
        found = resolve(name)
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}, which is not installed")
    assert found is not None


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        resolve("nostall.workload.traces.kineto.no_such_reader")
