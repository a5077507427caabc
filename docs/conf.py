"""Sphinx configuration. ``make docs`` builds the pages with warnings as errors."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import tempfile
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
html_static_path = ["static"]
html_css_files = ["nostall.css"]
html_js_files = ["scrolling.js"]
html_extra_path = ["_build/extra"]  # Sphinx wants it to exist before the reports are written
(DOCS / "_build" / "extra").mkdir(parents=True, exist_ok=True)

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
    page.write_text(_with_index(text.replace("&#x27;", "'")))


def _with_index(text: str) -> str:
    """The page with an index entry for each option, which makes the search find options."""
    parts = re.split(r"^(?=#+ `)", text, flags=re.MULTILINE)
    for number, part in enumerate(parts[1:], 1):
        names = re.findall(r"^\* `.*?(--[\w-]+)", part, re.MULTILINE)
        entries = "\n".join(f"   ! single: {name}" for name in names if name != "--help")
        if entries:
            parts[number] = f"```{{eval-rst}}\n.. index::\n{entries}\n```\n\n{part}"
    return "".join(parts)


def _profile_program() -> str:
    """The program of the pipeline tutorial that writes a profile."""
    page = (DOCS / "tutorials" / "first-pipeline.md").read_text("utf-8")
    found = re.search(r":caption: make_profile.py\n(.*?)```", page, re.DOTALL)
    if found is None:
        raise ValueError("docs/tutorials/first-pipeline.md has no file make_profile.py")
    return found[1]


def write_reports(_: Sphinx) -> None:
    """Write the report pages that tutorials show, with the commands that a reader would run."""
    folder = DOCS / "_build" / "extra" / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    traces = [f"tests/unit/workload/h200/ddp_rank{rank}.json.gz" for rank in (0, 1)]
    commands = (
        ["characterize", *traces, "--report", str(folder / "trace.html")],
        ["plan", "encoder-pbs-16.txt", "--cluster",
         "examples/clusters/dapple-a-2x8.toml", "--global-batch", "256", "--planner", "dapple",
         "--seconds", "60", "--gantt", str(folder / "plan.html")],
        ["tune", "examples/batched_gemm.py:batched_gemm", "--arch", "sm_90", "--objective",
         "recorded", "--out", "runs/recorded"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        for part in ("docs", "examples", "tests"):
            (Path(name) / part).symlink_to(DOCS.parent / part)
        subprocess.run([sys.executable, "-c", _profile_program()], cwd=name, check=True)
        for command in commands:
            subprocess.run(
                [sys.executable, "-m", "nostall", *command], cwd=name, check=True,
                capture_output=True, text=True,
            )  # fmt: skip
        page = Path(name) / "runs" / "recorded" / "report.html"
        (folder / "search.html").write_bytes(page.read_bytes())


def unlink_builtins(_: Sphinx, page: nodes.document) -> None:
    """Remove links from built-in types, which Sphinx resolves to attributes of the same name."""
    for link in list(page.findall(pending_xref)):
        if link["refdomain"] == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", unlink_builtins)
    app.connect("builder-inited", write_cli_reference)
    app.connect("builder-inited", write_reports)
