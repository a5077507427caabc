"""Bundles in programs of their own: which steps they wait for, and what they say."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.shadow import VERSIONS  # noqa: E402
from nostall.optimizing.program import program_environment  # noqa: E402
from tests.unit.fusion.codegen.interpreter_process import run_watched  # noqa: E402

FUSED = {"name": "fused", "kind": "optimizer", "value": "fused", "result_class": "bit-equal"}
IN_A_METHOD = """
class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
    def training_step(self, x):
        return self.net(x)
all = Module()
net, m = all.net, all.training_step
"""
EVALUATED_FIRST = """
import torch
torch.set_num_threads(1)
m = torch.nn.Linear(8, 8)
x = torch.ones(4, 8)
with torch.no_grad():
    for _ in range(12):
        m(x)
"""
TRAINED = """
opt = torch.optim.AdamW(m.parameters())
for _ in range(8):
    opt.zero_grad()
    m(x).sum().backward()
    opt.step()
print("fused:", opt.param_groups[0]["fused"])
"""


def run(
    folder: Path, program: str, *changes: dict[str, str], in_fork: bool = True, **settings: Any
) -> tuple[str, str]:
    """Output and errors of the program with a bundle of these changes."""
    script = folder / "train.py"
    script.write_text(program)
    given = {
        "folder": os.devnull, "director": 0, "step": None, "bundle": "b.json", "changes": changes,
        "machine": {"torch": torch.__version__, "driver": None}, **settings,
    }  # fmt: skip
    variables = program_environment(os.environ, given)
    if in_fork:
        return run_watched(script, variables)
    ended = subprocess.run(
        [sys.executable, str(script)], env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def test_an_evaluation_before_the_training_is_no_step(tmp_path: Path) -> None:
    out, err = run(tmp_path, EVALUATED_FIRST + TRAINED, FUSED, in_fork=False)
    assert "fused: True" in out and "applied fused" in err


def test_a_module_that_only_its_method_calls_is_compiled(tmp_path: Path) -> None:
    change = {"name": "inductor", "kind": "compile", "value": "eager", "result_class": "bit-equal"}
    program = (EVALUATED_FIRST + TRAINED).replace("m = torch.nn.Linear(8, 8)", IN_A_METHOD)
    program += "print('compiled:', net._compiled_call_impl is not None)"
    out, err = run(tmp_path, program.replace("AdamW(m.", "AdamW(all."), change, FUSED)
    assert "compiled: True" in out and "applied inductor, fused" in err, err


def test_as_many_versions_are_compiled_as_when_it_was_proven(tmp_path: Path) -> None:
    change = {"name": "inductor", "kind": "compile", "value": "eager", "result_class": "bit-equal"}
    program = EVALUATED_FIRST + TRAINED
    program += "import torch._dynamo\nprint('versions:', torch._dynamo.config.recompile_limit)"
    out, err = run(tmp_path, program, change)
    assert f"versions: {VERSIONS}" in out and "applied inductor" in err, err


def test_steps_of_another_kind_are_named(tmp_path: Path) -> None:
    out, err = run(tmp_path, EVALUATED_FIRST + TRAINED, FUSED, step_is="each call of Sequential")
    assert "fused: None" in out and "applied fused" not in err
    reason = "and it was measured on each call of Sequential"
    assert "not applied: a step is" in err and reason in err


def test_a_bundle_of_calls_is_applied_at_such_calls(tmp_path: Path) -> None:
    change = {"name": "inductor", "kind": "compile", "value": "eager", "result_class": "bit-equal"}
    program = EVALUATED_FIRST + "print('compiled:', m._compiled_call_impl is not None)"
    out, err = run(tmp_path, program, change, step_is="each call of Linear")
    assert "compiled: True" in out and "applied inductor" in err


def test_another_program_is_refused(tmp_path: Path) -> None:
    identity = {"model": "0" * 64, "sources": {}}
    out, err = run(tmp_path, EVALUATED_FIRST + TRAINED, FUSED, identity=identity)
    assert "fused: None" in out
    assert "not applied: the parameters have other names, shapes or dtypes" in err


@pytest.mark.parametrize(
    ("change", "before", "reason"),
    [
        (FUSED, "opt = torch.optim.AdamW(m.parameters(), foreach=True)", "takes fused=True"),
        ({**FUSED, "kind": "compile", "value": "inductor"}, "m.compile(backend='eager')",
         "runs under torch.compile already"),
        ({**FUSED, "kind": "memory_format", "value": "channels_last"}, "",
         "no module has convolutions of images"),
    ],
)  # fmt: skip
def test_what_would_change_nothing_is_named(
    change: dict[str, str], before: str, reason: str, tmp_path: Path
) -> None:
    trained = TRAINED if "opt =" not in before else TRAINED[TRAINED.index("for") :]
    _, err = run(tmp_path, f"{EVALUATED_FIRST}{before}\n{trained}", change)
    assert "not applied: fused: " in err and reason in err
    assert "run `nostall optimize` again" in err and "applied fused" not in err


def test_another_version_of_transformers_is_refused(tmp_path: Path) -> None:
    here = importlib.metadata.version("transformers")
    machine = {"torch": torch.__version__, "driver": None, "transformers": "4.0.0"}
    script = "import torch.optim\nprint('runs')\n"
    variables = {"machine": machine, "script": script}
    ended = start(tmp_path, **variables)
    assert ended.returncode == 2 and "runs" not in ended.stdout
    assert f"measured with transformers 4.0.0, and here it is {here}" in ended.stderr
    machine["transformers"] = here
    assert start(tmp_path, **variables).returncode == 0


GENERATES = """
import torch, transformers
torch.set_num_threads(1)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
             num_attention_heads=1, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
m, x = make(), torch.ones(2, 3, dtype=torch.long)
for _ in range(14):
    m.generate(x, max_new_tokens=2, do_sample=False)
other = make()
for i in range(20):
    for model in (m, other):
        model.generate(x, max_new_tokens=2 + i % 3, do_sample=False)
print("cache:", m.generation_config.cache_implementation, torch.nn.Module._compiled_call_impl)
"""


def test_calls_after_the_bundle_was_applied_are_not_noted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    change = {**FUSED, "name": "static cache", "kind": "generation", "value": "static"}
    out, err = run(tmp_path, GENERATES, change, step_is="each call of LlamaForCausalLM.generate")
    assert "cache: static None" in out
    assert "applied static cache" in err and "not applied" not in err


def test_what_cannot_be_applied_leaves_the_program_as_it_was(tmp_path: Path) -> None:
    unknown = {**FUSED, "name": "new", "kind": "new"}
    program = EVALUATED_FIRST + TRAINED + "print('switch:', m._compiled_call_impl)"
    out, err = run(tmp_path, program, FUSED, unknown)
    assert "fused: None" in out and "switch: None" in out
    assert "the bundle is not applied: ValueError: the change 'new' is unknown" in err


FAILING_STORE = """
import nostall.attach.program.kernels as kernels
def broken(*_):
    raise OSError("no store")
kernels.NativeKernels.on = broken
kernels.NativeKernels.missing = lambda self: ""
"""


def test_a_change_that_fails_takes_the_others_back(tmp_path: Path) -> None:
    native = {**FUSED, "name": "native", "kind": "native", "value": "store"}
    program = FAILING_STORE + EVALUATED_FIRST + TRAINED + "print('switch:', m._compiled_call_impl)"
    out, err = run(tmp_path, program, FUSED, native)
    assert "fused: None" in out and "switch: None" in out
    assert "the bundle is not applied: OSError: no store" in err


def start(folder: Path, script: str, machine: dict[str, str | None]) -> Any:
    (folder / "train.py").write_text(script)
    given = {
        "folder": os.devnull, "director": 0, "step": None, "bundle": "b.json", "changes": [FUSED],
        "machine": machine,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "train.py"], env=program_environment(os.environ, given), cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
