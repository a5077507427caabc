"""Write the archive that a GPU machine without nvcc needs: the template cubin and the plan.

    python -m benchmarks.sass.distances.archive --out build/distances.zip

The plan has, for each pair, its names in the latency tables and what compilers were seen to leave.
Needs nvcc and nvdisasm.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sass.distances.microkernels.kernel import replace_code
from benchmarks.sass.distances.microkernels.lines import SM, Line, assemble
from benchmarks.sass.distances.microkernels.overwrites import overwrite_pairs
from benchmarks.sass.distances.microkernels.pairs import Pair, all_pairs
from benchmarks.sass.distances.microkernels.windows import (
    consumer_word,
    producer_word,
    target_register,
)
from nostall.core.errors import BadInput, MissingPart
from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Program
from nostall.sass.safety import latency, pairing
from nostall.sass.safety.latency import LatencyTable, Row

SOURCE = Path(__file__).with_name("microkernels") / "template.cu"
TEMPLATE, PLAN = "template.cubin", "plan.json"
_DECODED_AT_ONCE = 5000
_LEAST_TOP, _LARGEST_TOP = 4, 40


@dataclass(frozen=True)
class Archive:
    """The contents of an archive."""

    template: bytes
    plan: list[dict[str, Any]]
    """One row for each pair: its name, names in the tables, and compilers' distances."""

    @classmethod
    def read(cls, path: Path) -> Archive:
        """Read an archive; raises :class:`MissingPart` if there is none."""
        if not path.is_file():
            raise MissingPart(
                f"there is no archive {path}; write it where nvcc is installed, with "
                "`python -m benchmarks.sass.distances.archive --out FILE`"
            )
        with zipfile.ZipFile(path) as content:
            return cls(content.read(TEMPLATE), json.loads(content.read(PLAN)))

    def write(self, path: Path) -> None:
        """Write the archive; equal contents give equal bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as content:
            for name, data in ((TEMPLATE, self.template), (PLAN, json.dumps(self.plan).encode())):
                content.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def compile_template() -> bytes:
    """The template's cubin, with NOPs as code; raises :class:`MissingPart` without nvcc."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise MissingPart("nvcc was not found on PATH; install the CUDA toolkit 13")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "template.cubin")
        command = [compiler, f"-arch=sm_{SM}", "-cubin", "-o", str(cubin), str(SOURCE)]
        subprocess.run(command, check=True, timeout=300)
        return replace_code(cubin.read_bytes(), b"")


def decode(template: bytes, words: Sequence[int]) -> Iterator[Instruction]:
    """The words as nostall decodes them with nvdisasm, in their order."""
    for start in range(0, len(words), _DECODED_AT_ONCE):
        part = words[start : start + _DECODED_AT_ONCE]
        code, _ = assemble([Line(word) for word in part])
        instructions = Program.from_cubin(replace_code(template, code)).functions[0].instructions
        yield from instructions[: len(part)]


def plan_rows(template: bytes, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The plan: names of each pair, and the distances that compilers left."""
    pairs_words = [(producer_word(pair), consumer_word(pair)) for pair in pairs]
    words = sorted({word for both in pairs_words for word in both})
    decoded = dict(zip(words, decode(template, words), strict=True))
    table = LatencyTable.mined(SM)
    tables = latency.load(SM)
    attested = tables.attested if tables is not None else {}
    rows: list[dict[str, Any]] = []
    for pair, (first, second) in zip(pairs, pairs_words, strict=True):
        issued = (decoded[first], decoded[second])
        if pair.kind == "WAR":
            issued = (issued[1], issued[0])
        rows.append(_plan_row(pair, issued, table, attested.get(pair.kind, {})))
    return rows


def _plan_row(
    pair: Pair,
    issued: tuple[Instruction, Instruction],
    table: LatencyTable,
    attested: Mapping[str, Row],
) -> dict[str, Any]:
    """The row of one pair; ``issued``: its instructions in their order."""
    first, second = issued
    tested = tested_registers(pair)
    for register in tested:
        accesses = {"RAW": (first.defs, second.uses), "WAW": (first.defs, second.defs),
                    "WAR": (first.uses, second.defs)}[pair.kind]  # fmt: skip
        if not all(register in accessed for accessed in accesses):
            raise BadInput(
                f"{pair.name}: {first.text!r} and {second.text!r} do not both access "
                f"{registers.name(register)}; correct the tables of producers and consumers"
            )
    keys = [(first, second, register, pair.kind) for register in tested]
    names = [name for key in keys for name in pairing.exact_names(*key)]
    seen = [attested[name].distance for name in names if name in attested]
    floor = max(table.min_distance(*key) for key in keys)
    return {
        "pair": pair.name,
        "kind": pair.kind,
        "first": first.text,
        "second": second.text,
        "names": names,
        "joint": len(tested) > 1,
        "coarse": pairing.coarse_names(*keys[0])[1],
        "sighting": max(seen, default=None) if len(seen) == len(names) else None,
        "floor": floor,
        "safe": max(table.safe_distance(*key) for key in keys),
        "top": min(_LARGEST_TOP, max(_LEAST_TOP, 1 + min([floor, *seen]))),
    }


def tested_registers(pair: Pair) -> list[int]:
    """The numbers of the registers that both instructions access."""
    file = pair.producer.file
    start = target_register(pair) + (pair.part if pair.producer.words > 1 else 0)
    return [registers.number(file, start + k) for k in range(pair.joint_words)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--template", type=Path, help="write the template's cubin here, too (.gz)")
    options = parser.parse_args(arguments)
    template = compile_template()
    if options.template is not None:
        options.template.write_bytes(gzip.compress(template, mtime=0))
    archive = Archive(template, plan_rows(template, [*all_pairs(), *overwrite_pairs()]))
    archive.write(options.out)
    print(f"{options.out}: {len(archive.plan)} pairs, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
