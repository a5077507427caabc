"""Check that the candidate computes the same results and gradients as the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.call import (
    AccuracyError,
    Call,
    clone_with_strides,
    distinct_elements,
    with_history,
)
from nostall.attach.torch_compile.measure.reference import NoReference, Reference, wide_reference
from nostall.attach.torch_compile.measure.rounding import Errors, errors, excess, has_same_axes

GraphFunction = Callable[..., Any]

MIN_TOLERANCE = 1e-4
"""Smallest relative tolerance: sums in fp32 may differ by that much."""
ROUNDING_ERRORS = 8.0
"""Relative tolerance of a result, in rounding errors of its dtype."""
ROUNDING_ERRORS_8_BIT = 0.5
"""The same for dtypes of one byte.  Such results are rounded from a wider dtype, so a few elements
may be rounded the other way, but eight rounding errors would be as large as the number itself."""
ELEMENT_FACTOR = 4.0
"""Tolerance of a single element, as a multiple of the tolerance for the whole tensor, relative to
the larger of the element and the RMS.  In a norm over all elements one wrong element disappears."""
MIN_GRADIENT_SHARE = 0.1
"""Gradients whose RMS is below this share of the largest gradient's are compared relative to that
share."""
GRADIENT_NOISE_FACTOR = 3.0
"""Tolerance for gradients near zero, as a multiple of how much Inductor's own gradient changes when
the inputs change by one rounding error.  Such gradients are sums that cancel, so only rounding
error is left."""


@dataclass(frozen=True)
class RunResults:
    """Tensors of one forward and backward pass."""

    results: list[Tensor]
    # Gradients of the arguments that require one; None if an argument has no influence.
    gradients: list[Tensor | None]
    # Gradients of the results, from which the backward pass started.
    seeds: list[Tensor]


def run_graph(
    function: GraphFunction, args: Sequence[Any], seeds: list[Tensor] | None = None
) -> RunResults:
    """Run the forward pass, and the backward pass if there is one.

    ``seeds``: gradients of the results; random by default.  With equal numbers instead the
    gradients of softmax and of norms would be pure rounding error.

    Raises :class:`AccuracyError` if other results have gradients than ``seeds`` says.
    """
    # Inductor's CUDA graphs may then reuse the memory of earlier results.
    if torch.cuda.is_available():
        torch.compiler.cudagraph_mark_step_begin()
    # Those that the function changes in place have another history behind it.
    leaves = [
        x if x.is_leaf else torch.autograd.graph.get_gradient_edge(x)
        for x in args
        if isinstance(x, Tensor) and x.requires_grad
    ]
    value = function(*args)
    values = value if isinstance(value, (tuple, list)) else (value,)
    results = [x for x in values if isinstance(x, Tensor)]
    differentiable = [x for x in results if x.grad_fn is not None]
    gradients: list[Tensor | None] = []
    if seeds and not differentiable:
        raise AccuracyError("no result has a gradient")
    if differentiable and leaves:
        seeds = [torch.randn_like(x) for x in differentiable] if seeds is None else seeds
        if [x.shape for x in seeds] != [x.shape for x in differentiable]:
            raise AccuracyError("other results have gradients than in Inductor's version")
        gradients = list(torch.autograd.grad(differentiable, leaves, seeds, allow_unused=True))
    return RunResults(results, gradients, seeds or [])


def max_error(
    baseline: GraphFunction,
    candidate: GraphFunction,
    call: Call,
    seeds: list[Tensor],
    program: GraphFunction | None = None,
) -> float:
    """The largest relative difference (RMS) of any result, mutated argument or gradient.

    With ``program``, the graph as PyTorch runs it operator by operator, both versions are compared
    with its results in higher precision (:mod:`~nostall.attach.torch_compile.measure.rounding`).
    Without it, or if it cannot run so, they are compared with each other: a few rounding errors of
    the dtype are allowed. Gradients that are small beside the others are then compared by their
    absolute error (see :data:`MIN_GRADIENT_SHARE`), and if that fails by the noise of Inductor's
    own gradients.

    Raises :class:`AccuracyError` if an error is larger than rounding explains.
    """
    state = _random_state(call)
    versions = []
    for version in (baseline, candidate):
        _restore_random_state(call, state)
        args = call.fresh_args()
        outcome = run_graph(version, args, seeds or None)
        results = _copies([*outcome.results, *(args[i] for i in sorted(call.mutated))])
        versions.append((results, _copies(outcome.gradients)))
    (expected, gradients), (tested, tested_gradients) = versions
    _check_layouts(expected, tested)
    leaves = [x for x in call.fresh_args() if isinstance(x, Tensor) and x.requires_grad]
    _check_layouts(gradients, tested_gradients, leaves)
    both = [*expected, *gradients], [*tested, *tested_gradients]
    exact, no_reference = None, ""
    try:
        exact = _reference(program, call, seeds, len(both[0]))
    except NoReference as reason:  # not kept: its traceback holds the tensors of the wide run
        no_reference = str(reason)
    _restore_random_state(call, state)
    if exact is not None:
        perturbed = partial(_perturbed_run, baseline, call, seeds)
        return _check_against_reference(exact, *both, perturbed)
    try:
        worst = _check_results(expected, tested)
        noise = partial(_gradient_noise, baseline, call, seeds, gradients)
        return max(worst, _check_gradients(gradients, tested_gradients, noise))
    except AccuracyError as error:
        raise AccuracyError(f"{error} (there is no reference: {no_reference})") from error


def _reference(
    program: GraphFunction | None, call: Call, seeds: list[Tensor], count: int
) -> Reference:
    """The reference of a call; raises :class:`NoReference` if none has ``count`` values."""
    if program is None:
        raise NoReference("the program is not known")
    exact = wide_reference(run_graph, program, call, seeds)
    if len(exact.values) != count:
        raise NoReference("the program has other results in higher precision")
    return exact


def _check_results(expected: Sequence[Tensor | None], tested: Sequence[Tensor | None]) -> float:
    """Compare results of both versions; returns the largest relative error (RMS)."""
    pairs = zip(expected, tested, strict=True)
    return max((_relative_error(a, b, 0.0) for a, b in pairs), default=0.0)


def _check_gradients(
    expected: Sequence[Tensor | None],
    tested: Sequence[Tensor | None],
    find_noise: Callable[[], Sequence[float]],
) -> float:
    """Compare gradients of both versions; returns the largest relative error (RMS).

    ``find_noise``: as :func:`_gradient_noise`; called if a gradient near zero fails.
    """
    worst, noise = 0.0, list[float]()
    floor = MIN_GRADIENT_SHARE * max((_rms(x) for x in expected if x is not None), default=0.0)
    for index, (a, b) in enumerate(zip(expected, tested, strict=True)):
        try:
            worst = max(worst, _relative_error(a, b, floor))
        except AccuracyError:
            if a is None or b is None or max(_rms(a), _rms(b)) > floor:
                raise
            noise = noise or list(find_noise())
            limit = GRADIENT_NOISE_FACTOR * noise[index] / _tolerance(a.dtype)
            worst = max(worst, _relative_error(a, b, limit))
    return worst


def _check_against_reference(
    reference: Reference,
    expected: Sequence[Tensor | None],
    tested: Sequence[Tensor | None],
    perturbed_run: Callable[[], Sequence[Tensor | None]],
) -> float:
    """Check all tensors; ``perturbed_run`` gives those of Inductor's version for inputs that differ
    by one rounding error, which shows how much such errors grow."""
    worst, perturbed, terms = 0.0, list[Tensor | None](), reference.longest_sum
    largest = max((_rms(x) for x in reference.gradients if x is not None), default=0.0)
    values = reference.values
    first_gradient = len(values) - len(reference.gradients)
    for place, (exact, a, b) in enumerate(zip(values, expected, tested, strict=True)):
        if exact is None or a is None or b is None:
            worst = max(worst, _relative_error(a, b, 0.0))
            continue
        # Where Inductor's version overflows and the reference does not, nothing is judged.
        known, found = errors(exact, a, a), errors(exact, b, a)
        if excess(b, found, known, terms):
            perturbed = perturbed or list(perturbed_run())
            other = perturbed[place]
            noise = known if other is None else errors(exact, other, other)
            known = Errors(max(known.worst, noise.worst), max(known.rms, noise.rms))
            reason = excess(b, found, known, terms)
            is_gradient = place >= first_gradient
            if reason and not (is_gradient and _is_rounding_alone(exact, a, b, largest)):
                raise AccuracyError(reason)
        if b.dtype.is_floating_point:
            worst = max(worst, _relative_errors(a.double(), b.double(), 0.0)[0])
    return worst


def _is_rounding_alone(exact: Tensor, known: Tensor, tested: Tensor, largest: float) -> bool:
    """Whether a value that is 0 but for rounding is as small as rounding makes it in both versions.

    Such is the gradient of a bias of attention's keys, which softmax cancels. It has no correct
    digit in Inductor's version either (``known``), so its own size judges nothing: it may be off by
    one rounding error of the largest gradient, of whose size the cancelled terms are.
    """
    if not tested.dtype.is_floating_point or not _rms(known.double() - exact) >= _rms(exact):
        return False
    return _rms_of_all(tested.double() - exact) <= float(torch.finfo(tested.dtype).eps) * largest


def _check_layouts(
    expected: Sequence[Tensor | None],
    tested: Sequence[Tensor | None],
    leaves: Sequence[Tensor] | None = None,
) -> None:
    """Raises :class:`AccuracyError` for other layouts than those of Inductor's version.

    A gradient may have the layout of its leaf instead, as PyTorch's own gradients of leaves do.
    """
    if len(expected) != len(tested):
        raise AccuracyError(
            f"there are {len(tested)} results; Inductor's version has {len(expected)}"
        )
    for at, (a, b) in enumerate(zip(expected, tested, strict=True)):
        if a is None or b is None or has_same_axes(a, b):
            continue
        if leaves is None or at >= len(leaves) or not has_same_axes(leaves[at], b):
            raise AccuracyError(f"a result has {_layout_text(b)}; Inductor's has {_layout_text(a)}")


def _gradient_noise(
    baseline: GraphFunction, call: Call, seeds: list[Tensor], gradients: Sequence[Tensor | None]
) -> list[float]:
    """RMS change of each gradient if inputs and seeds change by about one rounding error."""
    outcome = _perturbed_run(baseline, call, seeds)
    perturbed = outcome[len(outcome) - len(gradients) :]
    return [
        0.0 if a is None or b is None else _rms(a.double() - b.double())
        for a, b in zip(gradients, perturbed, strict=True)
    ]


def _perturbed_run(baseline: GraphFunction, call: Call, seeds: list[Tensor]) -> list[Tensor | None]:
    """Results, mutated arguments and gradients for inputs that differ by about one rounding error.

    Parameters are not changed.
    """
    state, args = _random_state(call), call.fresh_args()
    for index, value in enumerate(args):
        fixed = not isinstance(value, Tensor) or isinstance(call.args[index], torch.nn.Parameter)
        if not fixed and value.is_floating_point():
            leaf = _perturbed(value).requires_grad_(value.requires_grad)
            args[index] = leaf if value.is_leaf else with_history(leaf)
    seeds = [_perturbed(seed) for seed in seeds]
    _restore_random_state(call, state)
    outcome = run_graph(baseline, args, seeds or None)
    return [*outcome.results, *(args[i] for i in sorted(call.mutated)), *outcome.gradients]


def _perturbed(x: Tensor) -> Tensor:
    """A copy with the same strides whose memory differs by about one rounding error."""
    copy = clone_with_strides(x)
    elements = distinct_elements(copy)
    step = torch.finfo(x.dtype).eps * (2 * torch.rand_like(elements) - 1)
    elements.copy_(elements.double() * (1 + step.double()))
    return copy


def _tolerance(dtype: torch.dtype) -> float:
    """Relative tolerance for results of this dtype."""
    rounding_errors = ROUNDING_ERRORS if dtype.itemsize > 1 else ROUNDING_ERRORS_8_BIT
    return max(MIN_TOLERANCE, rounding_errors * float(torch.finfo(dtype).eps))


def _relative_error(expected: Tensor | None, result: Tensor | None, floor: float) -> float:
    """RMS error relative to the RMS of ``expected``, or to ``floor`` if that is larger.

    Raises :class:`AccuracyError` if that or the error of one element is not allowed.
    """
    if expected is None or result is None:
        if expected is not None or result is not None:
            raise AccuracyError("a gradient is missing")
        return 0.0
    a, b = expected.detach(), result.detach()
    if not a.dtype.is_floating_point:
        error, element_error, tolerance = float((a != b).double().sum()), 0.0, 0.0
    else:
        tolerance = _tolerance(a.dtype)
        error, element_error = _relative_errors(a.double(), b.double(), floor)
    if not error <= tolerance:
        raise AccuracyError(
            f"a result is off by {error:.3g} of its size; {tolerance:.3g} is allowed"
        )
    if not element_error <= ELEMENT_FACTOR * tolerance:
        what = f"{element_error:.3g} of its size or the RMS"
        raise AccuracyError(
            f"an element is off by {what}; {ELEMENT_FACTOR * tolerance:.3g} is allowed"
        )
    return error


def _relative_errors(x: Tensor, y: Tensor, floor: float) -> tuple[float, float]:
    """Relative errors of the whole tensor (RMS) and of the worst element."""
    # NaN equals NaN, and infinities of one sign are equal.
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, x - y)
    if not bool(gap.isfinite().all()):
        return math.inf, math.inf
    scale = max(_rms(x), floor, torch.finfo(torch.float32).tiny)
    elements = gap.abs() / x.abs().nan_to_num(0.0).clamp(min=scale)
    return _rms(gap) / scale, float(elements.max()) if elements.numel() else 0.0


def _rms(x: Tensor) -> float:
    """Root mean square, with 0 for elements that are not finite; 0 for other than float tensors."""
    if not x.dtype.is_floating_point or not x.numel():
        return 0.0
    wide = x.detach().double()
    return float(torch.where(wide.isfinite(), wide, 0.0).square().mean().sqrt())


def _rms_of_all(x: Tensor) -> float:
    """Root mean square; infinite if an element is not finite."""
    return _rms(x) if bool(x.isfinite().all()) else math.inf


def _copies(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    # With CUDA graphs the next run writes to the same memory.
    return [None if x is None else x.detach().clone() for x in values]


def _layout_text(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}"


def _random_state(call: Call) -> Any:
    """States of the random generators of the CPU and of the call's GPUs."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in _gpus(call)]


def _restore_random_state(call: Call, state: Any) -> None:
    cpu, gpus = state
    torch.set_rng_state(cpu)
    for device, gpu in zip(_gpus(call), gpus, strict=True):
        torch.cuda.set_rng_state(gpu, device)


def _gpus(call: Call) -> list[int]:
    return sorted({x.device.index for x in call.args if isinstance(x, Tensor) and x.is_cuda})
