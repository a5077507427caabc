"""Count the sightings in the functions of one architecture."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b

from nostall.core.errors import BadBinary
from nostall.sass.binary import encoding
from nostall.sass.binary.encoding import WORD_BYTES, Control
from nostall.sass.binary.listing import Row
from nostall.sass.program.defuse import def_use
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.program.opcodes import Effect
from nostall.sass.safety import pairing
from tools.mining.floors import find_sightings
from tools.mining.functions import CodeFunction
from tools.mining.listing import Texts, marked_listings
from tools.mining.marks import Marks
from tools.mining.tallies import Key, Tallies
from tools.mining.words import WordTexts

_MAX_KEPT_TEXTS = 200_000
"""Instructions that are kept by their text; the store is emptied when it is full."""
_MAX_KEPT_RUNS = 60_000
"""Pieces of straight-line code whose sightings are kept."""
_NO_CONTROL = Control(1, False)
_CHECKED_SHARE = 64
"""One of this many functions is listed with marks, to check the shapes that were learnt."""
_LESSONS = 3
"""Instructions of one shape that are listed with marks at a time."""
_MAX_LESSONS = 60
"""Instructions of one shape after which a shape that was not learnt is given up."""
_EXIT = bytes.fromhex("4d790000000000000000800300ea0f00")
"""``EXIT``, which ends a function."""

_HIGH = encoding.CONTROL_MASK >> 64

Names = tuple[tuple[str, str, str, str], ...]
"""(kind, exact name, name of the form, name of the class) of a pair, one for each operand."""


@dataclass(slots=True)
class SightingCounter:
    """Counts sightings; keeps the instructions, shapes and names that it has seen."""

    sm: int
    marks: Marks = field(default_factory=Marks)
    tallies: Tallies = field(default_factory=Tallies)
    _words: WordTexts = field(init=False)
    _instructions: dict[str, Instruction] = field(default_factory=dict[str, Instruction])
    _lessons: Counter[str] = field(default_factory=Counter[str])
    """Shape -> instructions of it that were listed with marks."""
    _runs: dict[bytes, tuple[tuple[Key, int], ...]] = field(
        default_factory=dict[bytes, tuple[tuple[Key, int], ...]]
    )
    """Digest of straight-line code -> its sightings."""
    _names: dict[tuple[object, ...], Names] = field(default_factory=dict[tuple[object, ...], Names])

    def __post_init__(self) -> None:
        self._words = WordTexts(self.sm)

    def add(self, functions: Sequence[CodeFunction]) -> None:
        """Count the sightings in functions of one architecture and one variant of it."""
        listed = self._words.texts(functions)
        self._learn(functions, listed)
        for function, texts in zip(functions, listed, strict=True):
            self._count(function, texts)

    def _learn(self, functions: Sequence[CodeFunction], listed: Sequence[Texts]) -> None:
        """List instructions of unknown shapes with marks, in one function made of them alone.

        Marks do not depend on the instructions around.  Some functions are also listed whole, to
        check what was learnt.
        """
        lesson: dict[str, list[bytes]] = {}
        for function, texts in zip(functions, listed, strict=True):
            for at, text in enumerate(texts.texts):
                if not text or text in self._instructions or self._instruction(text) is not None:
                    continue
                shape, is_clear = self.marks.lesson(text)
                if not is_clear or self._lessons[shape] >= _MAX_LESSONS:
                    continue
                if len(words := lesson.setdefault(shape, [])) < _LESSONS:
                    self._lessons[shape] += 1
                    words.append(function.code[WORD_BYTES * at : WORD_BYTES * (at + 1)])
        self._teach(functions[0], [word for words in lesson.values() for word in words])
        for function, texts in zip(functions, listed, strict=True):
            has_jump_table = any("BRX" in text or "JMX" in text for text in texts.texts)
            if function.key[-1] % _CHECKED_SHARE == 0 and not has_jump_table:
                self._learn_from(function)

    def _teach(self, example: CodeFunction, words: list[bytes]) -> None:
        """Learn from instruction words of the architecture of ``example``.

        nvdisasm rejects some sequences of arbitrary instructions; a rejected list is halved.
        """
        if not words or self._learn_from(replace(example, code=b"".join(words) + _EXIT)):
            return
        if len(words) > 1:
            middle = len(words) // 2
            self._teach(example, words[:middle])
            self._teach(example, words[middle:])

    def _learn_from(self, function: CodeFunction) -> bool:
        """List one function with marks and learn from each instruction; False if rejected."""
        try:
            (listing,) = marked_listings((function,))
        except BadBinary:
            return False
        for row in listing.rows:
            self.marks.learn(row)
        return True

    def _count(self, function: CodeFunction, texts: Texts) -> None:
        """Add the sightings in one function."""
        code = function.code[: WORD_BYTES * len(texts.texts)]
        controls = [_control(high & _HIGH) for _, high in struct.iter_unpack("<QQ", code)]
        instructions = [self._instruction(text) for text in texts.texts]
        found: dict[Key, int] = {}
        for start, run in _blocks(instructions, {*function.starts, *texts.labels}):
            end = start + len(run)
            for key, seen in self._sightings(run, controls[start:end], code, start, end):
                found[key] = found.get(key, 0) + seen
        self.tallies.add_function(function.key, len(instructions), found)

    def _sightings(
        self,
        run: Sequence[Instruction],
        controls: Sequence[Control],
        code: bytes,
        start: int,
        end: int,
    ) -> Iterable[tuple[Key, int]]:
        """(name and distance, occurrences) in straight-line code, known by its machine code."""
        digest = blake2b(code[WORD_BYTES * start : WORD_BYTES * end], digest_size=12).digest()
        known = self._runs.get(digest)
        if known is None:
            counts: dict[Key, int] = {}
            for kind, first, second, register, cycles in find_sightings(
                zip(run, controls, strict=True), self.sm
            ):
                for names in self._names_of(kind, first, second, register):
                    key = (*names, cycles)
                    counts[key] = counts.get(key, 0) + 1
            if len(self._runs) >= _MAX_KEPT_RUNS:
                self._runs.clear()
            known = self._runs[digest] = tuple(counts.items())
        return known

    def _instruction(self, text: str) -> Instruction | None:
        """The instruction with a text, without its place and control word.

        None if its shape was not learnt.
        """
        instruction = self._instructions.get(text)
        if instruction is None:
            if not text:
                return None
            marks = self.marks.derive(text)
            if marks is None:
                return None
            guard, opcode, operands = parse_text(text)
            row = Row(0, text, 0, *marks)
            registers = def_use(row, guard, opcode.partition(".")[0], operands)
            instruction = Instruction(0, text, 0, _NO_CONTROL, opcode, guard, operands, *registers)
            if len(self._instructions) >= _MAX_KEPT_TEXTS:
                self._instructions.clear()
            self._instructions[text] = instruction
        return instruction

    def _names_of(self, kind: str, first: Instruction, second: Instruction, register: int) -> Names:
        """The names of a pair."""
        if kind == "AFTER" or kind == "BEFORE":
            exact, coarse = pairing.barrier_pair(first, second)
            return ((kind, exact, coarse, coarse),)
        hazard: pairing.HazardKind = kind  # type: ignore[assignment]
        key = pairing.pair_key(first, second, register, hazard)
        names = self._names.get(key)
        if names is None:
            form, coarse = pairing.coarse_names(first, second, register, hazard)
            exact_names = pairing.exact_names(first, second, register, hazard)
            names = tuple((kind, name, form, coarse) for name in exact_names)
            self._names[key] = names
        return names


@lru_cache(1 << 14)  # code has few different control words
def _control(high: int) -> Control:
    """The control word in the upper half of an instruction word."""
    return encoding.decode(high << 64)[1]


def _blocks(
    instructions: Sequence[Instruction | None], starts: set[int]
) -> Iterator[tuple[int, list[Instruction]]]:
    """(position, instructions) of each run of straight-line code.

    ``starts`` are positions where control may enter.  An instruction without marks or without a
    row in the opcode table ends a run, because it may access any register.
    """
    run: list[Instruction] = []
    for at, instruction in enumerate(instructions):
        if run and at in starts:
            yield at - len(run), run
            run = []
        if instruction is None or not instruction.is_known_opcode:
            if run:
                yield at - len(run), run
            run = []
            continue
        run.append(instruction)
        if instruction.effects & Effect.ENDS_BLOCK:
            yield at + 1 - len(run), run
            run = []
    if run:
        yield len(instructions) - len(run), run
