"""A candidate with one changed kernel beside another kernel that the verifier rejects."""

from tests.corpus.catalogue import NVCC

from nostall.sass import Program, verify
from nostall.sass.program import Function
from nostall.sass.schedule import ScheduleSpace

DATA = (NVCC / "linked.sm_80.cubin").read_bytes()


def _without_waits(function: Function) -> Function:
    """The function with no wait at all, which the verifier rejects."""
    order = [i.with_control(i.control.with_(wait=0)) for i in function.instructions]
    return function.reordered(order)


def _original() -> Program:
    program = Program.from_cubin(DATA)
    return program.with_function(_without_waits(program.kernel("second")))


def _moved(program: Program, name: str) -> bytes:
    space = ScheduleSpace(program, program.kernel(name))
    state = space.start()
    return space.impose(space.apply(state, next(iter(space.moves(state))))).to_cubin()


def test_the_unchanged_kernel_is_a_remark() -> None:
    data = _original().to_cubin()
    verdict = verify(data, _moved(Program.from_cubin(data), "first"))
    assert verdict.safe
    assert {remark.function for remark in verdict.remarks} == {"second"}


def test_it_is_a_finding_if_nothing_changed() -> None:
    data = _original().to_cubin()
    assert {finding.function for finding in verify(data, data).findings} == {"second"}


def test_a_change_of_it_is_rejected() -> None:
    program = Program.from_cubin(DATA)
    changed = program.with_function(_without_waits(program.kernel("second"))).to_cubin()
    assert not verify(DATA, changed).safe
