"""Options of the backend: parsing, validation, and the old keys."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.options import Options, parse_options
from nostall.attach.torch_compile.rewrite.compilers import inductor_patches
from nostall.core.errors import BadInput


def test_options_with_the_prefix_are_nostalls_and_all_others_inductors() -> None:
    given = {"nostall.fuse": "all", "nostall.seconds": 2, "max_autotune": True}
    options, inductor = parse_options(given)
    assert (options.fuse, options.seconds) == ("all", 2)
    assert inductor == {"max_autotune": True}
    assert inductor_patches("max-autotune-no-cudagraphs", inductor)["max_autotune"] is True


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nostall.fuse", "some", "'reductions' or 'all'"),
        ("nostall.background", 1, "True or False"),
        ("nostall.seconds", 0, "above 0"),
        ("nostall.tuned_plans", -1, "at least 0"),
        ("nostall.speed", 1, "known are nostall.fuse"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_what_is_allowed(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        parse_options({name: value})


def test_old_keys_are_accepted() -> None:
    options, _ = parse_options({"nostall.extent": "all", "nostall.rest": "eager"})
    assert options == Options(fuse="all", fallback="eager")
    assert parse_options({"nostall.race": 0})[0] == Options(tuned_plans=0)


def test_an_option_by_its_old_and_its_new_key_is_an_error() -> None:
    with pytest.raises(BadInput, match=r"nostall\.fuse is set twice"):
        parse_options({"nostall.extent": "all", "nostall.fuse": "all"})


def test_a_loss_is_chunked_in_all_versions_if_that_is_asked_for() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from nostall.attach.torch_compile.backend import Backend

    functional = torch.nn.functional
    weight = torch.randn(9, 4, requires_grad=True)
    hidden, labels = torch.randn(20, 4, requires_grad=True), torch.randint(9, (20,))

    def program(hidden: object, labels: object) -> object:
        return functional.cross_entropy(functional.linear(hidden, weight), labels)

    backend = Backend()
    options = {"nostall.loss": "chunked", "nostall.fallback": "eager"}
    torch._dynamo.reset()
    loss = torch.compile(program, backend=backend, options=options)(hidden, labels)
    expected = program(hidden, labels)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, (hidden, weight)) for each in (loss, expected)]
    torch.testing.assert_close(*gradients)
    (report,) = backend.reports
    (line,) = report.chunked
    assert line.startswith("1 x loss: its logits (20 x 9 float32, ") and line in report.explain()
    # No candidate differs from Inductor's version by it.
    assert not report.is_rewritten
