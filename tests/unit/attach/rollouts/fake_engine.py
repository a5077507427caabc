"""An engine of rollouts that takes no time: it counts tokens, and says how long they took."""

from __future__ import annotations

from typing import Any

from benchmarks.serving.engine.rollout_workloads import parse_workload

from nostall.attach.rollouts.workload import distinct_tokens


class FakeEngine:
    """Answers the commands of the process of an engine.

    A step takes ``fixed_s``, and ``token_s`` for each request that runs in it.
    """

    def __init__(self, name: str, fixed_s: float, token_s: float, fails_at: int = -1) -> None:
        """``fails_at``: the command with this number gets no answer; -1: all get one."""
        self.name, self.problem = name, ""
        self.record: dict[str, Any] = {"rounds": [], "gpu": "no GPU", "vllm": "0.25.1"}
        self.fixed_s, self.token_s, self.fails_at = fixed_s, token_s, fails_at
        self.asked: list[dict[str, Any]] = []
        self._left: list[int] = []
        self._count = 0

    def ask(self, command: dict[str, Any], seconds: float = 0.0) -> Any:
        if self.problem:
            return None
        self.asked.append(command)
        if len(self.asked) - 1 == self.fails_at:
            self.problem = "the process ended with exit code 1"
            return None
        return getattr(self, f"_{command['do']}")(command)

    def end(self) -> None:
        """Nothing has to end."""

    def _prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        assert not any(self._left), "requests of an earlier generation have not ended"
        requests = parse_workload(command["workload"]).requests(command["generation"])
        outputs = [min(output, command.get("most") or output) for output in requests.outputs]
        self._left = [output - 1 for output in outputs]
        self._count = len(outputs)
        about = {"cache_prompts_s": 1.0, "first_tokens_s": 0.5, "first_tokens": len(outputs)}
        keys = distinct_tokens(requests.prompts)
        return {
            **about, "requests": len(outputs), "generation": command["generation"],
            "distinct_tokens": keys,
        }  # fmt: skip

    def _decode(self, command: dict[str, Any]) -> dict[str, Any]:
        tokens, seconds, done = 0, 0.0, 0
        while done < command["steps"] and any(self._left):
            running = sum(left > 0 for left in self._left)
            self._left = [max(0, left - 1) for left in self._left]
            tokens, done = tokens + running, done + 1
            seconds += self.fixed_s + self.token_s * running
        self._count += tokens
        return {
            "seconds": seconds, "steps": done, "tokens": tokens, "step_p50_ms": 1.0,
            "is_done": not any(self._left),
        }  # fmt: skip

    def _finish(self, command: dict[str, Any]) -> dict[str, Any]:
        taken = self._decode({"steps": 10_000})
        return {
            "finish_s": taken["seconds"], "all_tokens": self._count, "build_us": 100.0,
            "compared": [[1, 2]],
        }  # fmt: skip

    def _profile(self, command: dict[str, Any]) -> dict[str, Any]:
        taken = self._decode(command)
        busy = 1e6 * taken["seconds"]
        return {"steps": command["steps"], "busy_us": busy, "attention_us": busy / 2}

    def _counts(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"served": {"decode": 3}, "left to vLLM": {"prefill steps": 2}}
