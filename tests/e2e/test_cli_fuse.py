"""`nostall fuse` without PyTorch: one error line, the exit code, and no files."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cli import EXAMPLES, ROOT, error_line, nostall

EXAMPLE = EXAMPLES / "fusion" / "layernorm_gelu.py"


def test_a_missing_package_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "torch"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text('raise ImportError("not here")\n')
    path = f"{missing.parent}:{ROOT / 'src'}"
    done = nostall("fuse", f"{EXAMPLE}:layernorm_gelu", cwd=tmp_path, PYTHONPATH=path)
    line = error_line(done, 3)
    assert "torch cannot be imported" in line and "pip install 'nostall[torch]'" in line
    assert not (tmp_path / "runs").exists()
