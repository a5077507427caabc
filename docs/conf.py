"""Sphinx configuration. ``make docs`` builds the pages with warnings as errors."""

from __future__ import annotations

import builtins
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "src"))

project = "nostall"
author = "the nostall developers"
release = version = installed_version("nostall")
copyright = "the nostall developers, Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"nostall {release}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist", "attrs_inline"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "

# Optional packages are not needed to read docstrings.
autodoc_mock_imports = [
    "cuda", "cupy", "dask", "distributed", "functorch", "gymnasium", "ortools", "pyarrow",
    "safetensors", "sb3_contrib", "stable_baselines3", "tensorboard", "torch", "triton", "vllm",
]  # fmt: skip
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
# The build needs no network: no inventories of other projects are loaded.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
nitpicky = False


def write_cli_reference(_: Sphinx) -> None:
    """Write ``reference/cli.md`` with Typer's own generator."""
    page = DOCS / "reference" / "cli.md"
    text = subprocess.run(
        [sys.executable, "-m", "typer", "nostall.cli", "utils", "docs", "--name", "nostall",
         "--title", "Command line"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    page.write_text(text.replace("&#x27;", "'"))


def unlink_builtins(_: Sphinx, page: nodes.document) -> None:
    """Remove links from built-in types, which Sphinx resolves to attributes of the same name."""
    for link in list(page.findall(pending_xref)):
        if link["refdomain"] == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", unlink_builtins)
    app.connect("builder-inited", write_cli_reference)
