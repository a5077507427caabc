"""One vLLM engine that is given its tokens, and tells their log probabilities; a file of its own.

    python forced_tokens_child.py JOB.json

Imports nothing of this repository but the plug-in, which comes from the first source tree in
PYTHONPATH. ``JOB.json`` has ``model`` (folder), ``engine`` (options of vLLM's ``LLM``),
``workload`` (see :func:`workload`), ``plug_in`` (whether to register nostall) and ``out`` (file).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def workload(kind: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests: the step at which each arrives, its prompt, and the tokens that it must give.

    ``first`` requests arrive at once; ``later`` ones with short prompts follow from step ``from``
    on, ``beside`` at a time every third step, so that steps hold prompts beside decodes. With
    ``shared`` tokens the requests, but for every other later one, are samples of ``prompts``
    prompts; these have half of the shared tokens in common, and each request up to ``short`` of its
    own.
    """
    draw = random.Random(kind["seed"])
    words = kind["vocabulary"]
    shared = kind.get("shared", 0)
    system = draw.choices(range(3, words), k=shared // 2) if shared else []
    bases = [
        system + draw.choices(range(3, words), k=shared - len(system))
        for _ in range(kind.get("prompts", 0))
    ]

    def request(step: int, longest: int) -> dict[str, Any]:
        length = draw.randint(longest // 10 + 1, longest)
        return {
            "step": step,
            "prompt": [draw.randrange(3, words) for _ in range(length)],
            "tokens": [draw.randrange(3, words) for _ in range(kind["tokens"])],
        }

    first = [request(0, kind["short"] if bases else kind["longest"]) for _ in range(kind["first"])]
    later = [
        request(
            kind["from"] + 3 * (number // kind["beside"]),
            kind["longest"] if bases and number % 2 else kind["short"],
        )
        for number in range(kind["later"])
    ]
    for number, sample in enumerate([*first, *later[::2]] if bases else []):
        sample["prompt"] = bases[number % len(bases)] + sample["prompt"]
    return first + later


def processor_class() -> type:
    """vLLM's logits processor that lets only the next of a request's given tokens through."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class ForcedTokens(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
            self.rows: dict[int, tuple[list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                self.rows.pop(index, None)
            for index, params, _, given in batch_update.added:
                self.rows[index] = (params.extra_args["forced"], given)
            for source, target, direction in batch_update.moved:
                old, new = self.rows.pop(source, None), self.rows.pop(target, None)
                if old is not None:
                    self.rows[target] = old
                if new is not None and direction == MoveDirectionality.SWAP:
                    self.rows[source] = new

        def apply(self, logits: Any) -> Any:
            for index, (forced, given) in self.rows.items():
                token = forced[min(len(given), len(forced) - 1)]
                value = logits[index, token].clone()
                logits[index] = float("-inf")
                logits[index, token] = value
            return logits

    return ForcedTokens


def run(engine: Any, requests: list[dict[str, Any]]) -> tuple[list[list[float]], list[list[int]]]:
    """Log probability of each given token, and the most probable token in its place."""
    from vllm import SamplingParams

    outputs: dict[int, Any] = {}
    waiting = list(enumerate(requests))
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1]["step"] <= step or not engine.has_unfinished_requests()):
            number, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=len(request["tokens"]),
                ignore_eos=True,
                detokenize=False,
                logprobs=1,
                extra_args={"forced": request["tokens"]},
            )
            engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, sampling)
        for output in engine.step():
            outputs[int(output.request_id.split("-")[0])] = output.outputs[0]
        step += 1
    chosen, best = [], []
    for number, request in enumerate(requests):
        output = outputs[number]
        if list(output.token_ids) != request["tokens"]:
            raise RuntimeError(f"request {number} gave other tokens than it was told to")
        pairs = list(zip(request["tokens"], output.logprobs, strict=True))
        chosen.append([round(float(row[token].logprob), 6) for token, row in pairs])
        best.append([max(row, key=lambda t, row=row: row[t].logprob) for _, row in pairs])
    return chosen, best


def counts_of(worker: Any) -> dict[str, Any]:
    """The plug-in's counts in the process of a rank."""
    from nostall.attach.vllm.counts import counts

    return counts()


def driver() -> str:
    """Version of the GPU's driver; empty without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except OSError:
        return ""


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    if job["plug_in"]:
        from nostall.attach.vllm.plugin import register

        register()
    import torch

    import vllm
    from vllm import LLM

    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        seed=0,
        async_scheduling=False,
        logits_processors=[processor_class()],
        **{"enable_prefix_caching": False, **job["engine"]},
    )
    engine = llm.llm_engine
    started = time.perf_counter()
    chosen, best = run(engine, workload(job["workload"]))
    result: dict[str, Any] = {
        "logprobs": chosen,
        "best": best,
        "start_s": round(started - began, 1),
        "run_s": round(time.perf_counter() - started, 1),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cudagraph_mode": str(engine.vllm_config.compilation_config.cudagraph_mode),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "driver": driver(),
    }
    if job["plug_in"]:
        import nostall

        in_ranks = llm.collective_rpc(counts_of)
        result |= {"counts": in_ranks[0], "nostall": str(Path(nostall.__file__).parent)}
        result["counts_of_ranks"] = in_ranks
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
