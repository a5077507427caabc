"""Training kernels of ``nostall train``: cubins with launch files, or Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nostall.core import BadInput
from nostall.core.launch import LaunchSpec
from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.tuning.launches.template import check_launch
from nostall.tuning.sources.source import Source, load_cubin
from nostall.tuning.sources.triton_source import compile_triton


def load_corpus(corpus: Sequence[str], arch: str | None) -> Iterator[tuple[str, Source]]:
    """Yield (name, source) of each kernel of a corpus.

    An entry is a directory with pairs of ``NAME[.ARCH].cubin`` and ``NAME.toml`` (its launch), or
    ``path.py:kernel``.  ``arch`` limits a directory to cubins of that architecture, and is the
    target of Triton kernels (None: all cubins, sm_90).  Raises :class:`BadInput` if an entry holds
    no kernel.
    """
    for entry in corpus:
        path = Path(entry)
        is_empty = True
        if path.is_dir():
            for cubin in sorted(path.glob("*.cubin")):
                launch_file = path / f"{cubin.name.partition('.')[0]}.toml"
                if launch_file.exists() and (arch is None or f".{arch}." in cubin.name):
                    is_empty = False
                    launch = LaunchSpec.from_toml(launch_file)
                    source = load_cubin(cubin, None, launch)
                    check_launch(Cubin.parse(source.cubin), source.kernel, launch, str(cubin))
                    yield cubin.stem, source
        elif ".py:" in entry:
            file, _, kernel = entry.rpartition(":")
            is_empty = False
            yield kernel, compile_triton(Path(file), kernel, None, arch or "sm_90")
        if is_empty:
            raise BadInput(
                f"--corpus {entry} holds no kernel; give a directory with pairs of NAME.cubin and "
                "NAME.toml (its launch), or path.py:kernel"
            )


def modelled_problem(source: Source) -> tuple[ScheduleSpace, SmModel]:
    """The schedule space of a kernel and the SM model of its launch.

    Raises :class:`BadInput` if the launch is unknown.
    """
    if source.launch is None:
        raise BadInput(
            f"{source.origin}: the SM model needs the launch of {source.kernel!r}; add an entry "
            "to LAUNCHES in its file, or a TOML file beside the cubin"
        )
    program = Program.from_cubin(source.cubin)
    function = program.kernel(source.kernel)
    return ScheduleSpace(program, function), SmModel(program, function, source.launch)
