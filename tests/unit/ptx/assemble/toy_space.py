"""A space of one small kernel: the states exchange two independent multiplications."""

from __future__ import annotations

from dataclasses import dataclass

PTX = """\
.version 8.0
.target sm_80
.address_size 64

.visible .entry scale(
	.param .u64 scale_param_0
)
.reqntid 128
{
	.reg .b32 	%r<3>;
	.reg .f32 	%f<5>;
	.reg .b64 	%rd<4>;
	ld.param.u64 	%rd1, [scale_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 8;
	add.s64 	%rd3, %rd1, %rd2;
	ld.global.f32 	%f1, [%rd3];
	ld.global.f32 	%f2, [%rd3+4];
	mul.f32 	%f3, %f1, 0f40400000;
	mul.f32 	%f4, %f2, 0f40A00000;
	st.global.f32 	[%rd3], %f3;
	st.global.f32 	[%rd3+4], %f4;
	ret;
}
"""
FIRST = "	mul.f32 	%f3, %f1, 0f40400000;\n"
SECOND = "	mul.f32 	%f4, %f2, 0f40A00000;\n"


@dataclass(frozen=True)
class ToyState:
    """A state: the text of the two lines, and the options of ptxas."""

    exchanged: bool = False
    options: tuple[str, ...] = ()
    assembler: str = ""
    kernel_name: str = ""
    extra: str = ""
    """A line before the multiplications."""


class ToySpace:
    """Renders states; has what a build needs."""

    def text(self, state: ToyState) -> str:
        lines = SECOND + FIRST if state.exchanged else FIRST + SECOND
        return PTX.replace(FIRST + SECOND, state.extra + lines)


def make_space(ptx: str, kernel: str) -> ToySpace:
    assert (ptx, kernel) == (PTX, "scale")
    return ToySpace()


class ToyCheck:
    """Accepts what has the lines of the original in any order."""

    def __init__(self, original: str) -> None:
        self.lines = sorted(original.splitlines())

    def __call__(self, candidate: str) -> str:
        return "" if sorted(candidate.splitlines()) == self.lines else "other lines"
