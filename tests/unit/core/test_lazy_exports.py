"""Lazy exports: every exported name exists, and importing a package imports none of its modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("core", "fusion", "gpu", "store")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_can_be_accessed(name: str) -> None:
    package = importlib.import_module(f"nostall.{name}")
    assert package.__all__ and all(getattr(package, key) is not None for key in package.__all__)
    with pytest.raises(AttributeError, match=f"module 'nostall.{name}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_a_package_imports_none_of_its_modules(name: str) -> None:
    code = f"import sys, nostall.{name}; print(*(m for m in sys.modules if 'nostall.' in m))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*run.stdout.split()} == {"nostall.core", "nostall.core.lazy_exports", f"nostall.{name}"}


def test_exported_names_are_the_objects_of_the_modules() -> None:
    from nostall.core import BadRun, errors
    from nostall.store import folder, home

    assert BadRun is errors.BadRun and home is folder.home
