"""`nostall fuse` where parts are missing: one line, the right exit code, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cli import EXAMPLES, ROOT, nostall, refused

EXAMPLE = EXAMPLES / "fusion" / "layernorm_gelu.py"


def test_a_file_or_a_function_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no file nowhere.py" in refused(nostall("fuse", "nowhere.py:f", cwd=tmp_path))
    assert "write path.py:FUNCTION" in refused(nostall("fuse", EXAMPLE, cwd=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package_is_named_with_its_remedy(package: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for name in ("torch", "triton"):
        (missing / name).mkdir(parents=True)
        text = "" if name != package else 'raise ImportError("not here")\n'
        (missing / name / "__init__.py").write_text(text)
    path = f"{missing}:{ROOT / 'src'}"
    done = nostall("fuse", f"{EXAMPLE}:layernorm_gelu", cwd=tmp_path, PYTHONPATH=path)
    said = refused(done, 3)
    assert f"{package} cannot be imported" in said and f"nostall[{package}]" in said
    assert not (tmp_path / "runs").exists()
