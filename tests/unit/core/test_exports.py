"""What packages hand on, imported when it is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("core", "fusion", "gpu", "store")


@pytest.mark.parametrize("name", PACKAGES)
def test_all_that_is_promised_is_there(name: str) -> None:
    package = importlib.import_module(f"nostall.{name}")
    assert package.__all__ and all(getattr(package, one) is not None for one in package.__all__)
    with pytest.raises(AttributeError, match=f"module 'nostall.{name}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_by_itself_imports_nothing_of_its_own(name: str) -> None:
    said = f"import sys, nostall.{name}; print(*(m for m in sys.modules if 'nostall.' in m))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == {"nostall.core", "nostall.core.exports", f"nostall.{name}"}


def test_names_come_from_modules_of_the_package() -> None:
    from nostall.core import BadRun, errors
    from nostall.store import folder, home

    assert BadRun is errors.BadRun and home is folder.home
