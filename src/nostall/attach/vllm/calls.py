"""Programs around vLLM's ``LLM``: their calls of ``generate`` and ``chat``, measured and repeated.

A change of engine arguments needs a new engine, so one start of the program measures one set of
arguments: a call that the program made is repeated, each time with an empty prefix cache.  Then its
greedy tokens are generated once more with their probabilities, for a comparison between starts.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from nostall.attach.import_hooks import quietly
from nostall.attach.program.machine import cpu_name, driver_version, vllm_version
from nostall.attach.program.sources import has_optimizer

if TYPE_CHECKING:
    from nostall.attach.program.session import Session

ENOUGH_SECONDS = 1.0
"""Seconds of all calls after which the longest so far is repeated."""
REPEATED_SECONDS, LEAST_REPEATS, MOST_REPEATS = 8.0, 3, 8
CHECKED, CHECKED_TOKENS, TOP = 64, 16, 5
"""Sequences whose probabilities are kept, their generated tokens, and tokens of each place."""
MOST_BATCHED = 1024
"""Sequences that are generated beside the kept ones, so that the batch is the program's."""
PAGE = 16
ARGUMENTS = ("enforce_eager", "enable_prefix_caching", "async_scheduling", "max_num_seqs",
             "max_num_batched_tokens", "max_cudagraph_capture_size", "cudagraph_capture_sizes",
             "attention_backend")  # fmt: skip
"""Engine arguments whose given values are told."""
_PROBLEM = "the calls of vLLM are not measured"
_clock = time.perf_counter


class _Made(NamedTuple):
    """A call that the program made."""

    number: int
    llm: Any
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    seconds: float


class Engines:
    """The program's engines: their arguments are changed, and one of their calls is repeated."""

    def __init__(self, session: Session, settings: Mapping[str, Any]) -> None:
        """``settings``: ``arguments`` to set, and ``call`` and ``repeats`` of an earlier start.

        ``batches``: in how many batches tokens get their probabilities, 2 unless given.

        ``runs_on``: the program goes on after it was measured.  ``applied``: names of the changes
        of a bundle, which are told when they are made; ``vllm`` and ``model``: what it is of.
        """
        self.session, self.settings = session, settings
        self.calls, self.seconds, self.given = 0, 0.0, dict[str, Any]()
        self._inside = self._is_over = False
        self._began, self.ready_seconds = _clock(), 0.0
        """Until the first call: imports, the model, compilation."""
        self._longest: _Made | None = None

    def change_arguments(self, module: ModuleType) -> None:
        """Set arguments in each engine (``module``: ``vllm.engine.arg_utils``)."""
        owner, arguments = module.EngineArgs, dict(self.settings.get("arguments", {}))
        create = owner.create_engine_config

        @functools.wraps(create)
        def changed(engine: Any, *args: Any, **kwargs: Any) -> Any:
            given = {name: getattr(engine, name, None) for name in ARGUMENTS}
            self.given = {name: _plain(value) for name, value in given.items()}
            before = dict(vars(engine))
            for name, value in arguments.items():
                setattr(engine, name, _backend(value) if name == "attention_backend" else value)
            if not self.settings.get("applied"):
                return create(engine, *args, **kwargs)
            self._check_version()
            config = create(engine, *args, **kwargs)
            self.session.is_done = True  # type: ignore[attr-defined]
            if (found := model_digest(config)) == self.settings["model"]:
                names = ", ".join(self.settings["applied"])
                print(f"nostall: applied {names}", file=sys.stderr)
                return config
            print("nostall: the bundle is not applied: its model has the configuration "
                  f"{self.settings['model'][:12]}, and this one has {found[:12]}; run `nostall "
                  "optimize` here", file=sys.stderr)  # fmt: skip
            vars(engine).clear()  # vLLM has derived others from these arguments
            vars(engine).update(before)
            return create(engine, *args, **kwargs)

        owner.create_engine_config = changed

    def _check_version(self) -> None:
        """End the program if a bundle was measured with another vLLM."""
        wanted, found = self.settings["vllm"], vllm_version()
        if wanted != found:
            print(f"nostall: --bundle: it was measured with vllm {wanted}, and here it is {found}; "
                  "run `nostall optimize` here", file=sys.stderr)  # fmt: skip
            raise SystemExit(2)

    def watch(self, module: ModuleType) -> None:
        """See the calls of ``LLM`` (``module``: ``vllm.entrypoints.llm``)."""
        for name in ("generate", "chat"):
            setattr(module.LLM, name, self._noted(getattr(module.LLM, name)))

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(llm: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._is_over:
                return function(llm, *args, **kwargs)
            self._inside, began = True, _clock()
            self.ready_seconds = self.ready_seconds or began - self._began
            try:
                result = function(llm, *args, **kwargs)
                seconds = _clock() - began
                made = _Made(
                    self.calls, llm, function, _copied(args), _copied(kwargs), result, seconds
                )
                quietly(_PROBLEM, self._ended, made)
            finally:
                self._inside = False
            return result

        return call

    def _ended(self, made: _Made) -> None:
        """A call has ended: measure it, or an earlier one, if it is time."""
        self.calls, self.seconds = self.calls + 1, self.seconds + made.seconds
        if self._longest is None or made.seconds > self._longest.seconds:
            self._longest = made
        wanted = self.settings.get("call")
        if self.session.steps or has_optimizer():  # a step is one of the training around it
            self._is_over = True
        elif made.number == wanted or (wanted is None and self.seconds >= ENOUGH_SECONDS):
            self._is_over = True
            self._measure(made if wanted is not None else self._longest)

    def why_none(self) -> str:
        """Why no call was measured; empty without an engine."""
        if self._is_over or not (self.calls or self.given):
            return ""
        if not self.calls:
            return (
                "vLLM's engine was made, and neither LLM.generate nor LLM.chat was called: servers "
                "and engines that are stepped by hand are not measured"
            )
        return (
            f"{self.calls} calls of vLLM's generate took {self.seconds:.2g} s in all, and "
            f"{ENOUGH_SECONDS:g} s are needed: give the program more prompts"
        )

    def _measure(self, made: _Made) -> None:
        facts = {
            **_engine_facts(made.llm), "given": self.given, "call": made.number,
            "ready_seconds": self.ready_seconds, "call_seconds": made.seconds,
            **_call_facts(made.result),
        }  # fmt: skip
        samples: list[tuple[float, int]] = []
        check, problem = None, _obstacle(made)
        if not (problem or self.session.settings["trace"]):  # which is set by --dry-run
            try:
                samples, check = self._repeat(made)
            except Exception as error:  # any error of vLLM
                problem = f"a repeated call fails: {type(error).__name__}: {str(error)[:200]}"
        self.session.channel.emit(
            "watched", **_as_program(facts, [s for s, _ in samples] or [made.seconds]),
            engine={**facts, "samples": samples, "check": check, "problem": problem},
        )  # fmt: skip
        self._end()

    def _end(self) -> None:
        """The program ends here, or goes on as it was."""
        self.session.forget()
        if not self.settings.get("runs_on"):
            self.session.channel.emit("ended", steps=0, exits=True)
            sys.stdout.flush()
            raise SystemExit(0)

    def _repeat(self, made: _Made) -> tuple[list[tuple[float, int]], Any]:
        """Seconds and generated tokens of each repeated call, and the probabilities of tokens."""
        wanted = round(REPEATED_SECONDS / made.seconds)
        wanted = self.settings.get("repeats") or min(MOST_REPEATS, max(LEAST_REPEATS, wanted))
        samples: list[tuple[float, int]] = []
        result = made.result
        for _ in range(wanted):
            _reset(made.llm)
            began = _clock()
            result = made.function(made.llm, *made.args, **made.kwargs)
            samples.append((_clock() - began, _generated(result)))
        batches = self.settings.get("batches", 2)
        return samples, {**_probabilities(made, batches), "repeated": _digests(result)}


def _copied(value: Any) -> Any:
    """Arguments as they are now: a program may add to its lists of prompts or messages."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {k: _copied(v) for k, v in value.items()} if type(value) is dict else value


def _reset(llm: Any) -> None:
    """Empty the prefix cache; blocks of the last requests can be free a little later."""
    for _ in range(40):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.05)
    raise RuntimeError("vLLM does not empty its prefix cache")


def _probabilities(made: _Made, batches: int) -> dict[str, Any]:
    """Greedy tokens of a whole batch, and of some sequences in another batch, with logarithms.

    ``batches``: 2; 1: of the whole batch alone; 0: of none.

    For each kept sequence the tokens, and for each of them the :data:`TOP` tokens of most
    probability there.
    """
    params = sys.modules["vllm"].SamplingParams
    generate = getattr(type(made.llm).generate, "__wrapped__", type(made.llm).generate)
    longest = made.llm.llm_engine.model_config.max_model_len - CHECKED_TOKENS - 1
    # Samples of one prompt are sequences of their own here, too.
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)[:longest]}
               for r in made.result for _ in r.outputs][:MOST_BATCHED]  # fmt: skip
    step = math.ceil(len(prompts) / CHECKED)
    chosen = range(0, len(prompts), step)
    options = params(
        temperature=0, max_tokens=CHECKED_TOKENS, logprobs=TOP, ignore_eos=True, detokenize=False
    )

    def run(order: Sequence[int], kept: Sequence[int]) -> list[Any]:
        _reset(made.llm)
        given = [prompts[at] for at in order]
        found = dict(zip(order, generate(made.llm, given, options, use_tqdm=False), strict=True))
        return [_places(found[at].outputs[0]) for at in kept]

    orders = {"batch": range(len(prompts)), "other batch": list(reversed(chosen))}
    found = {name: run(order, chosen) for name, order in [*orders.items()][:batches]}
    return {**found, "eps": _rounding(made.llm)}


def _places(output: Any) -> list[Any]:
    return [
        [int(token), {str(other): round(float(p.logprob), 6) for other, p in places.items()}]
        for token, places in zip(output.token_ids, output.logprobs, strict=True)
    ]


def _rounding(llm: Any) -> float:
    torch = sys.modules["torch"]
    return float(torch.finfo(llm.llm_engine.model_config.dtype).eps)


def _obstacle(made: _Made) -> str:
    """Why a call cannot be repeated as it was; empty if it can."""
    if not all(getattr(r, "outputs", None) and r.prompt_token_ids for r in made.result):
        return "its results are no generated tokens of token prompts"
    if made.kwargs.get("lora_request") is not None:
        return "adapters (lora_request) are not compared"
    if any(getattr(r, "multi_modal_placeholders", None) for r in made.result):
        return "prompts with images or sound are not compared: vLLM caches what it encoded"
    return ""


def _digests(result: Any) -> list[int]:
    """A number for the tokens of each sequence."""
    return [zlib.crc32(repr(list(o.token_ids)).encode()) for r in result for o in r.outputs]


def _generated(result: Any) -> int:
    return sum(len(output.token_ids) for request in result for output in request.outputs)


def _engine_facts(llm: Any) -> dict[str, Any]:
    """What an engine is."""
    config = llm.llm_engine.vllm_config
    scheduler, cache, graphs = config.scheduler_config, config.cache_config, (
        config.compilation_config
    )  # fmt: skip
    platform = sys.modules["vllm.platforms"].current_platform
    is_gpu = bool(platform.is_cuda())
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return {
        "vllm": vllm_version(),
        "device": platform.get_device_name() if is_gpu else cpu_name(),
        "cuda": is_gpu,
        "model": list(getattr(config.model_config, "architectures", None) or ["a model"]),
        "model_digest": model_digest(config),
        "world": int(config.parallel_config.world_size),
        "backend": getattr(backend, "name", None),
        "eager": bool(config.model_config.enforce_eager),
        "async_scheduling": bool(scheduler.async_scheduling),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "most_sequences": int(scheduler.max_num_seqs),
        "most_batched": int(scheduler.max_num_batched_tokens),
        "largest_graph": max(graphs.cudagraph_capture_sizes or [0]),
        "cache_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0),
        "speculates": config.speculative_config is not None,
    }


def model_digest(config: Any) -> str:
    """sha256 of a model's configuration, dtype and quantisation."""
    model = config.model_config
    shape = {k: v for k, v in model.hf_config.to_dict().items()
             if k not in ("_name_or_path", "transformers_version")}  # fmt: skip
    text = f"{sorted(shape.items(), key=str)} {model.dtype} {model.quantization}"
    return hashlib.sha256(text.encode()).hexdigest()


def _call_facts(result: Any) -> dict[str, Any]:
    """What a call did: its tokens, and how much of what its decodes read is shared."""
    prompts = [list(r.prompt_token_ids or ()) for r in result for _ in r.outputs]
    outputs = [len(o.token_ids) for r in result for o in r.outputs]
    total, once = decode_reads(prompts, outputs)
    return {
        "sequences": len(prompts), "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(outputs), "tokens": _digests(result), "reads": total,
        "reads_once": once,
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
    }  # fmt: skip


def decode_reads(
    prompts: Sequence[Sequence[int]], outputs: Sequence[int]
) -> tuple[float, float]:  # fmt: skip
    """Tokens of keys and values that decodes read, and that remain if shared pages are read once.

    All sequences run at the same time; ``outputs``: generated tokens of each.
    """
    own = sum(count * count / 2 for count in outputs)
    total = own + sum(len(p) * count for p, count in zip(prompts, outputs, strict=True))
    readers: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for prompt, count in zip(prompts, outputs, strict=True):
        key = 0
        for at in range(0, len(prompt) // PAGE * PAGE, PAGE):
            key = hash((key, tuple(prompt[at : at + PAGE])))
            every = readers[key]
            every[0], every[1] = every[0] + count, max(every[1], count)
    return total, total - PAGE * sum(every - most for every, most in readers.values())


def _as_program(facts: Mapping[str, Any], seconds: Sequence[float]) -> dict[str, Any]:
    """The facts that are told of any program; a step is a call."""
    torch = sys.modules["torch"]
    nothing = dict.fromkeys(("forward", "backward", "optimizer", "loader"), [0.0] * len(seconds))
    return {
        "rank": 0, "world": 1, "device": facts["device"], "cuda": facts["cuda"],
        "driver": driver_version() if facts["cuda"] else None, "torch": torch.__version__,
        "transformers": None, "threads": torch.get_num_threads(),
        "steps": [(0, each) for each in seconds], "mean_seconds": sum(seconds) / len(seconds),
        "calls": 0, "parts": nothing, "period": (), "step_is": "one call of LLM.generate of vLLM",
        "matmul_precision": None, "optimizers": [], "flags": [], "roots": facts["model"],
        "identity": {"model": facts["model_digest"], "sources": {}}, "in_torch": False,
        "images": False, "generates": False, "kernels": (), "obstacle": "", "loader": {},
        "peak_bytes": 0, "main_thread": True, "checksum": [], "trace_file": None,
        "trace_obstacle": "engines of vLLM are not traced", "padded": [],
    }  # fmt: skip


def _backend(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def _plain(value: Any) -> Any:
    """A value for JSON: numbers, texts and lists of them as they are, others by name."""
    is_plain = value is None or isinstance(value, bool | int | str | list)
    return value if is_plain else getattr(value, "name", str(value))
