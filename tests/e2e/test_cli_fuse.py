"""`nostall fuse` where PyTorch is missing: one line, the right exit code, nothing written."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cli import EXAMPLES, ROOT, nostall, refused

EXAMPLE = EXAMPLES / "fusion" / "layernorm_gelu.py"


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "torch"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text('raise ImportError("not here")\n')
    path = f"{missing.parent}:{ROOT / 'src'}"
    done = nostall("fuse", f"{EXAMPLE}:layernorm_gelu", cwd=tmp_path, PYTHONPATH=path)
    said = refused(done, 3)
    assert "torch cannot be imported" in said and "pip install 'nostall[torch]'" in said
    assert not (tmp_path / "runs").exists()
