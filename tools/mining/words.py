"""Texts of instruction words, each different word listed once, and targets of relative branches.

Functions of a library share most of their instruction words, and the text of a word does not
depend on its place, except for the labels of relative branches, whose displacement is decoded here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from nostall.core.errors import BadBinary
from nostall.sass.binary import encoding
from nostall.sass.binary.encoding import WORD_BYTES
from tools.mining.functions import CodeFunction
from tools.mining.listing import Texts, word_texts

Word = tuple[int, int]
"""The low and the high half of an instruction word without control fields and displacement."""

_PAYLOAD_HIGH = encoding.PAYLOAD_MASK >> 64
_OPCODE = 0xFFF
_DISPLACEMENT = encoding.BitField(34, 48)
"""Signed displacement of BRA, CALL.REL and WARPSYNC.COLLECTIVE, or its upper part."""
_LOW_DISPLACEMENT = encoding.BitField(16, 8)
"""Its lower part since sm_90."""
_SPLIT_SINCE = 90
_FORWARD = encoding.BitField(34, 30)
"""Displacement of BSSY."""
_UNIT = 4
"""Bytes in one unit of a displacement."""

_BRANCHES = frozenset((0x947, 0x547, 0x944, 0x344))
"""BRA and CALL.REL."""
_CONVERGENCE = 0x945
"""BSSY."""
_COLLECTIVE = 0x348
"""WARPSYNC, which has a target only in its COLLECTIVE form since sm_90; otherwise a register may
stand in these bits, so they stay in the word, and a position too many may count as a target."""
_RELATIVE = _BRANCHES | {_CONVERGENCE, _COLLECTIVE}
_MAX_KEPT = 200_000
"""Words that are kept; the store is emptied when it is full."""


@dataclass(slots=True)
class WordTexts:
    """The texts of the instruction words of one architecture."""

    sm: int
    _texts: dict[Word, str] = field(default_factory=dict[Word, str])

    def texts(self, functions: Sequence[CodeFunction]) -> list[Texts]:
        """The texts of functions of one variant of the architecture, and where branches enter.

        A word that nvdisasm rejects has an empty text.
        """
        decoded = [self._decode(function) for function in functions]
        if len(self._texts) > _MAX_KEPT:
            self._texts.clear()
        unknown: dict[Word, bytes] = {}
        for function, (words, _) in zip(functions, decoded, strict=True):
            for at, word in enumerate(words):
                if word not in self._texts and word not in unknown:
                    unknown[word] = self._without_displacement(
                        function.code[WORD_BYTES * at : WORD_BYTES * (at + 1)]
                    )
        self._list(functions[0], list(unknown), list(unknown.values()))
        known = self._texts
        return [Texts([known[word] for word in words], labels) for words, labels in decoded]

    def _list(self, example: CodeFunction, words: list[Word], originals: list[bytes]) -> None:
        """Learn the texts of words; a list that nvdisasm rejects is halved."""
        if not words:
            return
        try:
            texts = word_texts(example.flags, originals)
        except BadBinary:
            if len(words) == 1:
                self._texts[words[0]] = ""
                return
            middle = len(words) // 2
            self._list(example, words[:middle], originals[:middle])
            self._list(example, words[middle:], originals[middle:])
            return
        self._texts.update(zip(words, texts, strict=True))

    def _decode(self, function: CodeFunction) -> tuple[list[Word], list[int]]:
        """(words, positions that relative branches name) of one function."""
        words: list[Word] = []
        labels: list[int] = []
        for at, (low, high) in enumerate(struct.iter_unpack("<QQ", function.code)):
            high &= _PAYLOAD_HIGH
            if (opcode := low & _OPCODE) in _RELATIVE:
                word = high << 64 | low
                if opcode != _COLLECTIVE or self.sm >= _SPLIT_SINCE:
                    labels.append(at + 1 + self._displacement(opcode, word))
                cleared = word & ~self._displacement_mask(opcode)
                low, high = cleared & (1 << 64) - 1, cleared >> 64
            words.append((low, high))
        return words, [label for label in labels if 0 <= label < len(words)]

    def _displacement_mask(self, opcode: int) -> int:
        if opcode == _COLLECTIVE:
            return 0
        if opcode == _CONVERGENCE:
            return _FORWARD.mask
        is_split = self.sm >= _SPLIT_SINCE
        return _DISPLACEMENT.mask | (_LOW_DISPLACEMENT.mask if is_split else 0)

    def _displacement(self, opcode: int, word: int) -> int:
        """The displacement of a relative branch, in instructions."""
        if opcode == _CONVERGENCE:
            return _FORWARD.get(word) * _UNIT // WORD_BYTES
        units = _DISPLACEMENT.get(word)
        units -= units >> _DISPLACEMENT.width - 1 << _DISPLACEMENT.width
        if self.sm >= _SPLIT_SINCE:
            units = units << _LOW_DISPLACEMENT.width | _LOW_DISPLACEMENT.get(word)
        return units * _UNIT // WORD_BYTES

    def _without_displacement(self, original: bytes) -> bytes:
        word = int.from_bytes(original, "little")
        opcode = word & _OPCODE
        if opcode in _RELATIVE:
            word &= ~self._displacement_mask(opcode)
        return word.to_bytes(WORD_BYTES, "little")
