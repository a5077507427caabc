"""The static cache of ``generate``: logits beside those of the original, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from nostall.attach.program.changing.generation import (  # noqa: E402
    GenerateCall,
    StaticCache,
    can_be_static,
    check_generation,
    generated,
)
from nostall.attach.program.roots import Switch  # noqa: E402


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def call(change: Callable[[Any, Any], None] | None = None, **options: Any) -> GenerateCall:
    """A call of generate; ``change`` of what a run with the static cache gives."""

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = type(model).generate(model, *args, **kwargs)
        if change is not None and model.generation_config.cache_implementation == "static":
            change(model, result)
        return result

    tokens = torch.randint(1, 64, (3, 5), generator=torch.Generator().manual_seed(1))
    return GenerateCall(generate, (tokens,), {"max_new_tokens": 6, "do_sample": False, **options})


def test_the_static_cache_computes_the_same_logits() -> None:
    root = model()
    found = check_generation(root, [call()], "static")
    assert found.refusal == "" and found.result_class == "within rounding"
    assert root.generation_config.cache_implementation is None  # a copy was changed


def off(_: Any, result: Any) -> None:
    result.logits = tuple(logits * 1.001 for logits in result.logits)


def last_step_off(_: Any, result: Any) -> None:
    result.logits[-1][0, :] = 0.0


def cached(model: Any, result: Any) -> None:
    """The first result for all prompts."""
    first = model.__dict__.setdefault("first", result)
    result.sequences, result.logits = first.sequences, first.logits


def shorter(_: Any, result: Any) -> None:
    result.sequences = result.sequences[:, :-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(off, "off by"), (last_step_off, "off by"), (cached, "off by"), (shorter, "another shape")],
)
def test_other_results_are_refused(change: Callable[[Any, Any], None], reason: str) -> None:
    assert reason in check_generation(model(), [call(change)], "static").refusal


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"num_beams": 2}, {"return_dict_in_generate": True}]
)
def test_only_greedy_generation_is_compared(options: dict[str, Any]) -> None:
    found = check_generation(model(), [call(**options)], "static")
    assert "only greedy generation" in found.refusal


def test_the_change_is_switched() -> None:
    root = model()
    change = StaticCache([Switch(root, [], lambda *_: None)], "static")
    assert change.missing() == ""
    assert change.check({}).refusal.startswith("LlamaForCausalLM: no call of generate")
    assert change.check({generated(root): [call()]}).refusal == ""
    change.on()
    assert root.generation_config.cache_implementation == "static"
    change.off()
    assert root.generation_config.cache_implementation is None
    other = torch.nn.Linear(2, 2)
    assert "no model" in StaticCache([Switch(other, [], lambda *_: None)], "static").missing()


def test_a_setting_of_the_program_is_not_changed() -> None:
    root = model()
    root.generation_config.cache_implementation = "static"
    assert not can_be_static(root)
    change = StaticCache([Switch(root, [], lambda *_: None)], "static")
    change.on()
    change.off()
    assert root.generation_config.cache_implementation == "static"
    root.generation_config.cache_implementation = "dynamic"
    change = StaticCache([Switch(root, [], lambda *_: None)], "static")
    change.on()
    change.off()
    assert root.generation_config.cache_implementation == "dynamic"


def test_what_transformers_keeps_in_the_model_goes_with_the_change() -> None:
    root = model()
    change = StaticCache([Switch(root, [], lambda *_: None)], "static")
    change.on()
    root._compiled_call = root._cache = "of the static cache"
    change.off()
    assert "_compiled_call" not in root.__dict__ and "_cache" not in root.__dict__
    change.on()
    assert root._compiled_call == "of the static cache"
    change.off()


def test_calls_that_were_not_compared_run_as_they_were() -> None:
    """With a static cache transformers refuses a cache of the program, and an assistant."""
    root = model()
    tokens = call().args[0]
    change = StaticCache([Switch(root, [], lambda *_: None)], "static")
    generate = transformers.GenerationMixin.generate
    change.on()
    try:
        own = transformers.DynamicCache(config=root.config)
        root.generate(tokens, max_new_tokens=2, do_sample=False, past_key_values=own)
        assert own.get_seq_length() == tokens.shape[1] + 1
        root.generate(tokens[:1], max_new_tokens=2, do_sample=False, assistant_model=model())
        kept = root.generate(
            tokens, max_new_tokens=2, do_sample=False, return_dict_in_generate=True
        )
        assert type(kept.past_key_values) is transformers.DynamicCache
        assert root.generation_config.cache_implementation == "static"
    finally:
        change.off()
    assert transformers.GenerationMixin.generate is generate


def test_options_are_found_wherever_they_are_given() -> None:
    config = transformers.GenerationConfig(do_sample=True, max_new_tokens=6, pad_token_id=0)
    tokens = call().args[0]
    given = GenerateCall(transformers.GenerationMixin.generate, (tokens, config), {})
    assert "do_sample is True" in check_generation(model(), [given], "static").refusal
    config.do_sample = None
    root = model()
    root.generation_config.do_sample = True
    assert "do_sample is True" in check_generation(root, [given], "static").refusal
    root.generation_config.do_sample = False
    assert check_generation(root, [given], "static").refusal == ""


def test_a_check_streams_no_tokens() -> None:
    class Streamer:
        seen: list[Any] = []  # noqa: RUF012

        def put(self, value: Any) -> None:
            self.seen.append(value)

        def end(self) -> None:
            self.seen.append("end")

    given = call(streamer=Streamer())
    given = given._replace(args=(given.args[0][:1],))
    assert check_generation(model(), [given], "static").refusal == ""
    assert Streamer.seen == []
