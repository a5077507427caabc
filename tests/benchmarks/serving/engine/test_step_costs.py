"""The recorder of engine steps, on a stand-in with the parts of vLLM's engine that it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.serving.engine import step_costs


class StandIn:
    """An engine with vLLM's names: running requests first, prompts cut to the token budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: dict[str, SimpleNamespace] = {}
        self.started: set[str] = set()
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def add_request(self, name: str, prompt: dict[str, Any], outputs: int) -> None:
        self.requests[name] = SimpleNamespace(
            num_prompt_tokens=len(prompt["prompt_token_ids"]), computed=0, left=outputs
        )

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SimpleNamespace:
        left, tokens = self.budget, {}
        for name, request in self.requests.items():
            needed = max(request.num_prompt_tokens - request.computed, 1)
            if min(needed, left):
                tokens[name] = min(needed, left)
                left -= tokens[name]
        new = [name for name in tokens if name not in self.started]
        old = [name for name in tokens if name in self.started]
        self.started |= set(new)
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, num_computed_tokens=[self.requests[name].computed for name in old]
            ),
            num_scheduled_tokens=tokens,
        )

    def step(self) -> None:
        self.update_from_output(self.schedule())

    def update_from_output(self, output: SimpleNamespace) -> None:
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            request.computed += count
            if request.computed >= request.num_prompt_tokens:
                request.left -= 1
            if not request.left:
                del self.requests[name]


def test_each_step_is_recorded_with_what_it_computed() -> None:
    engine = StandIn(step_costs.MAX_TOKENS)
    recorder = step_costs.StepRecorder(engine)
    step_costs.run_point(recorder, lambda outputs: outputs, 16, 1024, seed=1, records=True)
    samples = recorder.samples
    assert not engine.has_unfinished_requests()
    assert sum(s["prefill_tokens"] for s in samples) == 16 * 1024 + sum(step_costs.PROMPTS)
    lengths = [*[1024] * 16, *step_costs.PROMPTS]
    assert sum(s["prefill_pairs"] for s in samples) == sum(n * (n + 1) // 2 for n in lengths)
    decodes = [s for s in samples if not s["prefill_tokens"]]
    assert len(decodes) >= 2 * step_costs.DECODE_STEPS
    for sample in decodes:
        assert sample["decode_tokens"] == 16
        assert 16 * 1024 < sample["decode_keys"] < 16 * 1224
    full = [s["prefill_tokens"] for s in samples if s["decode_tokens"] == 16]
    assert max(full) == step_costs.MAX_TOKENS - 16
    assert all(s["seconds"] > 0 for s in samples)


def test_a_point_without_decodes_has_prefills_only() -> None:
    recorder = step_costs.StepRecorder(StandIn(step_costs.MAX_TOKENS))
    step_costs.run_point(recorder, lambda outputs: outputs, 0, 256, seed=1, records=True)
    assert {s["decode_tokens"] for s in recorder.samples} == {0}
    assert sum(s["prefill_tokens"] for s in recorder.samples) == sum(step_costs.PROMPTS)
