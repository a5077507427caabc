"""Kernels to learn on: cubins with their launch beside them, or Triton kernels in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nostall.core import BadInput
from nostall.core.launch import LaunchSpec
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.tuning.source import Source, compile_triton, load_cubin


def sources(corpus: Sequence[str], arch: str | None) -> Iterator[tuple[str, Source]]:
    """(name, source) of each kernel.

    An entry is a directory (each of its ``NAME[.ARCH].cubin`` with ``NAME.toml`` beside it) or
    ``path.py:kernel``.  Raises :class:`BadInput` for an entry that is neither, or gives nothing.
    """
    for entry in corpus:
        path = Path(entry)
        found = False
        if path.is_dir():
            for cubin in sorted(path.glob("*.cubin")):
                spec = path / f"{cubin.name.partition('.')[0]}.toml"
                if spec.exists() and (arch is None or f".{arch}." in cubin.name):
                    found = True
                    yield cubin.stem, load_cubin(cubin, None, LaunchSpec.from_toml(spec))
        elif ".py:" in entry:
            file, _, kernel = entry.rpartition(":")
            found = True
            yield kernel, compile_triton(Path(file), kernel, None, arch or "sm_90")
        if not found:
            raise BadInput(
                f"--corpus {entry} has no kernel to learn on; give a directory with NAME.cubin and "
                "NAME.toml (its launch), or path.py:kernel"
            )


def modelled(source: Source) -> tuple[ScheduleSpace, SmModel]:
    """The space of a source's kernel and the SM model of its launch; :class:`BadInput` without."""
    if source.launch is None:
        raise BadInput(
            f"{source.origin}: the SM model needs to know how {source.kernel!r} is launched; give "
            "its file an entry in LAUNCHES, or a TOML beside the cubin"
        )
    program = Program.from_cubin(source.cubin)
    function = program.kernel(source.kernel)
    return ScheduleSpace(program, function), SmModel(program, function, source.launch)
