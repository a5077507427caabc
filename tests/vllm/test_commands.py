"""vLLM's own parser takes the commands that nostall prints and documents: ``make test-vllm``."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from nostall.cli.serving.app import serve_command

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "docs").glob("how-to/*.md")),
    *sorted((ROOT / "src" / "nostall" / "attach").rglob("*.py")),
    ROOT / "docs" / "index.md",
    ROOT / "README.md",
]
WRITTEN = sorted(
    {found for f in FILES for found in re.findall(r"vllm serve MODEL[^`\"|\n]*", f.read_text())}
)


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser of ``vllm serve``; the module differs between 0.25.1 and 0.32."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


def parsed(parser: Any, command: list[str]) -> Namespace:
    assert command[:2] == ["vllm", "serve"]
    arguments: Namespace = parser.parse_args(command[2:])
    return arguments


@pytest.mark.parametrize(
    ("verdict", "backend"), [("faster", "CUSTOM"), ("slower", "FLASH_ATTN"), ("same", "FLASH_ATTN")]
)
def test_the_next_command_of_a_measurement_names_a_back_end(
    verdict: str, backend: str, parser: Any
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    arguments = parsed(parser, serve_command(Path("folder/a model"), verdict))
    assert arguments.model_tag == "folder/a model"
    chosen = AsyncEngineArgs.from_cli_args(arguments).attention_backend
    assert getattr(chosen, "name", chosen) == backend
    assert backend in AttentionBackendEnum.__members__


@pytest.mark.parametrize("written", WRITTEN)
def test_documented_commands_parse(written: str, parser: Any) -> None:
    assert parsed(parser, shlex.split(written)).model_tag == "MODEL"


def test_an_option_that_vllm_lacks_is_noticed(parser: Any) -> None:
    with pytest.raises(SystemExit):
        parsed(parser, ["vllm", "serve", "MODEL", "--no-such-option"])
