"""Launch specifications of stitched kernels, for SASS tuning and measurements."""

from __future__ import annotations

from nostall.core.launch import Buffer, DType, LaunchSpec, Scalar
from nostall.fusion.codegen.emit.program import Launch, Program

# PyTorch dtype -> launch dtype.  A bool in memory is a byte that kernels compare with 0.
SPEC_DTYPES: dict[str, DType] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "u8",
}


DEFAULT_STAGES = 3
"""Triton's default."""


def launch_specs(program: Program) -> dict[str, LaunchSpec]:
    """The launch specification of each kernel of a program, by kernel name."""
    return {launch.name: _spec(program, launch) for launch in program.launches}


def _spec(program: Program, launch: Launch) -> LaunchSpec:
    spaces = {space.name: space for space in program.workspaces}
    tensors = program.nodes_by_argument
    buffers = []
    for name in launch.arguments:
        if name in spaces:
            shape: tuple[int, ...] = (spaces[name].elements,)
            dtype, role = SPEC_DTYPES[spaces[name].dtype], "scratch"
        else:
            node = program.graph[tensors[name]]
            elements = sum((n - 1) * s for n, s in zip(node.shape, node.strides, strict=True)) + 1
            shape, dtype = (elements,), SPEC_DTYPES[node.dtype]
            role = "out" if node.index in program.outputs else "in"
        bound = 2 if dtype[0] in "iu" else None
        buffers.append(
            Buffer.model_validate(
                {"name": name, "dtype": dtype, "shape": shape, "role": role, "bound": bound}
            )
        )
    counts = [
        Scalar(name=name, dtype="i32", value=value)
        for name, value in zip(launch.count_names, launch.counts, strict=False)
    ]
    return LaunchSpec(
        grid=(*launch.grid, 1),
        args=(*buffers, *counts),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages or DEFAULT_STAGES,
    )
