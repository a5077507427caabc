"""Start of the half of ``nostall optimize`` and ``apply --bundle`` inside the user's program."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nostall.attach.import_hooks import AfterImport, quietly
from nostall.attach.program.applied import Applied
from nostall.attach.program.changing.loader import Loaders
from nostall.attach.program.session import Session
from nostall.attach.program.sources import PROFILER_STEP, Sources

if TYPE_CHECKING:
    from nostall.attach.vllm.calls import Engines

VARIABLE = "NOSTALL_PROGRAM"
"""Environment variable: settings as JSON, set by ``nostall optimize`` and ``nostall apply``."""
_PROBLEM = "the program is not watched"


def install() -> None:
    """Watch the modules of PyTorch when the program imports them."""
    from nostall.attach.vllm.calls import Engines  # lazy: commands read only VARIABLE

    settings = json.loads(os.environ[VARIABLE])
    session = Applied(settings) if "changes" in settings else Session(settings)
    sources = Sources(session)
    engines = Engines(session, settings.get("engine", {}))
    if not isinstance(session, Applied):
        session.channel.emit("start")
        os.register_at_fork(after_in_child=session.forget)
        atexit.register(quietly, _PROBLEM, _tell_no_step, session, sources, engines)
    os.register_at_fork(after_in_child=sources.modules.remove)
    atexit.register(quietly, _PROBLEM, session.at_exit)
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "torch.optim.optimizer": lambda module: _watch_optimizers(module, session, sources),
        "torch.amp.grad_scaler": lambda module: _watch_scaler(module, session, sources),
        "torch.utils.data.dataloader": lambda module: _watch_loaders(module, session, settings),
        # Workers of vLLM call modules in an engine's steps, which are none of the program.
        "vllm.v1.worker.worker_base": lambda _: sources.modules.remove(),
        "vllm.engine.arg_utils": engines.change_arguments,
    }
    if any(change["kind"] == "native" for change in settings.get("changes", [{"kind": "native"}])):
        hooks["triton.runtime.jit"] = session.kernels.install
        hooks["triton.runtime.autotuner"] = session.kernels.skip_trials
    if target := settings.get("step"):
        name, _, path = target.partition(":")
        hooks[name] = lambda module: _watch_function(module, path, session)
    else:
        if not isinstance(session, Applied):
            hooks["vllm.entrypoints.llm"] = engines.watch
        hooks["torch.profiler.profiler"] = lambda module: _watch_profiler(module, sources)
        hooks["torch.nn.modules.module"] = sources.modules.install
        # A bundle of other steps needs none of these calls, which stay as they are.
        if not ("changes" in settings and settings.get("step_is", "") in ("", PROFILER_STEP)):
            hooks["transformers.generation.utils"] = sources.modules.watch_generate
    sys.meta_path.insert(0, AfterImport(hooks, _PROBLEM))


def _watch_loaders(module: ModuleType, session: Session, settings: Mapping[str, Any]) -> None:
    if value := settings.get("loader"):
        Loaders(value).install(module)
    session.segments.watch_loader(module)


def _tell_no_step(session: Session, sources: Sources, engines: Engines) -> None:
    reason = engines.why_none() or (sources.why_none() if "torch" in sys.modules else "")
    if reason and not session.channel.is_abandoned():
        session.channel.emit("no step", reason=reason)


def _watch_optimizers(module: ModuleType, session: Session, sources: Sources) -> None:
    if isinstance(session, Applied) and (refusal := session.refusal()):
        print(f"nostall: --bundle: {refusal}", file=sys.stderr)
        raise SystemExit(2)

    # Dynamo traces the hooks of a compiled step; there, they are to do nothing.
    def begins(*_: Any) -> None:
        if not module.torch.compiler.is_compiling():
            session.segments.optimizer_begins()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not module.torch.compiler.is_compiling():
            session.segments.watch_backward()
            quietly(_PROBLEM, sources.optimizer_stepped, optimizer)

    module.register_optimizer_step_pre_hook(begins)
    module.register_optimizer_step_post_hook(stepped)


def _watch_profiler(module: ModuleType, sources: Sources) -> None:
    """A step can end with ``step()`` of a profiler of the program."""
    step = module.profile.step

    @functools.wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        quietly(_PROBLEM, sources.profiler_stepped)
        return result

    module.profile.step = noted


def _watch_scaler(module: ModuleType, session: Session, sources: Sources) -> None:
    """Note the steps that a GradScaler leaves out, which no optimiser shows."""
    scaler = module.GradScaler
    step = scaler._maybe_opt_step

    @functools.wraps(step)
    def noted(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = session.optimizer_steps
        result = step(self, optimizer, *args, **kwargs)
        if session.optimizer_steps == before:
            quietly(_PROBLEM, sources.optimizer_stepped, optimizer, True)
        return result

    scaler._maybe_opt_step = noted


def _watch_function(module: ModuleType, path: str, session: Session) -> None:
    """A step ends when the function ``path`` of ``module`` returns."""
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        session.segments.watch_backward()
        result = function(*args, **kwargs)
        session.on_border()
        return result

    setattr(owner, name, noted)
