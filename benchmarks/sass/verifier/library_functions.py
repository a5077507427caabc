"""Functions of the libraries in wheels as programs, drawn at random, for benchmarks."""

from __future__ import annotations

import tomllib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from tools.mining.archive import source_name
from tools.mining.functions import CodeFunction, read_source
from tools.mining.listing import marked_listings
from tools.typed_file import read_typed, write_typed

from nostall.core.errors import BadBinary, NostallError
from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Listing, disassemble

SEED = 1
BATCH_FUNCTIONS = 24

Row = dict[str, Any]
Drawn = tuple[Row, dict[int, list[CodeFunction]]]
"""Facts of a library, and the sample of its functions by architecture."""


def libraries(part: str) -> list[str]:
    """Names of the libraries in a part of ``libraries.toml``: mined, held_out or blind."""
    text = resources.files("tools.mining").joinpath("libraries.toml").read_text()
    return list(tomllib.loads(text)[part])


def draw(
    wheels: Path, names: Collection[str], state: Path, limit: int, max_size: int
) -> dict[str, Row]:
    """Draw functions of the wheels of libraries ``names`` into the state folder.

    Returns what each wheel contains.
    """
    contents: dict[str, Row] = {}
    for path in sorted(wheels.glob("*.whl")):
        name = source_name(path)
        kept = state / f"{name}.drawn"
        if name not in names:
            continue
        if not kept.exists():
            print(f"reading {name}", flush=True)
            found = read_source(path, SEED, limit, max_size, with_cubins=True)
            row = {
                "different_functions": _by_architecture(found.distinct),
                "unsupported_cubins": _by_architecture(found.unsupported),
                "cubins_without_code": found.without_code,
                "unreadable_cubins": dict(found.unreadable),
            }
            write_typed(kept, (row, found.sample))
        contents[name] = read_typed(kept, Drawn)[0]
    return contents


def batches(
    names: Sequence[str],
    state: Path,
    done: set[bytes],
    wanted: Callable[[CodeFunction], bool] | None = None,
) -> Iterator[tuple[str, Any]]:
    """(library, functions of one architecture) in turn over libraries and architectures.

    Functions with a key in ``done`` and functions that are not ``wanted`` are left out.
    """
    groups: list[tuple[int, str, list[CodeFunction]]] = []
    for name in names:
        _, sample = read_typed(state / f"{name}.drawn", Drawn)
        for _, functions in sorted(sample.items()):
            remaining = [f for f in functions if f.key not in done]
            remaining = [f for f in remaining if wanted is None or wanted(f)]
            groups.append((len(functions) - len(remaining), name, remaining))
    groups.sort(key=lambda group: group[0])  # a run that continues begins where there are fewest
    queue = deque((name, functions) for _, name, functions in groups)
    while queue:
        name, functions = queue.popleft()
        batch = [f for f in functions[:BATCH_FUNCTIONS] if f.flags == functions[0].flags]
        chosen = {f.key for f in batch}
        if batch:
            yield name, batch
            queue.append((name, [f for f in functions if f.key not in chosen]))


def programs(functions: Sequence[CodeFunction]) -> Iterator[Program | NostallError]:
    """The program of each function; one call of nvdisasm for all if possible."""
    try:
        listings = marked_listings(functions)
    except NostallError:
        if len(functions) == 1:
            yield _program(functions[0], None)
            return
        middle = len(functions) // 2
        yield from programs(functions[:middle])
        yield from programs(functions[middle:])
        return
    for function, listing in zip(functions, listings, strict=True):
        yield _program(function, listing)


def _program(function: CodeFunction, listing: Listing | None) -> Program | NostallError:
    """The program of a function.

    nvdisasm reads the function's own cubin if there is no listing, or if the listing, which was
    made from the machine code alone, lacks instructions: it follows jump tables only where they are
    in the file.
    """
    try:
        cubin = Cubin.parse(function.cubin)
        if listing is not None:
            name = cubin.texts[0].name
            with suppress(BadBinary):
                return Program.from_listings(cubin, {name: replace(listing, name=name)})
        return Program.from_listings(cubin, disassemble(cubin))
    except NostallError as error:
        return error


def _by_architecture(counts: Counter[int]) -> dict[str, int]:
    return {f"sm_{sm}": count for sm, count in sorted(counts.items())}
