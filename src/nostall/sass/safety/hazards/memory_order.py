"""Memory order: what is complete before a fence must be complete before it in a candidate, too.

A fence orders the accesses that are complete when it issues.  The registers of an access do not
show this: an acquire load may protect its result with another scoreboard than the one that the
fence waits for.  Three kinds of instructions rely on the completion of earlier ones:

- A scheduling barrier relies on all accesses and asynchronous operations that are not in flight
  when it issues, whichever instruction waited for them.
- An access with the effect of a fence (an atomic or strong access) relies on those that its own
  wait ends.
- Any access relies on the fences and asynchronous operations that are not in flight when it issues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect
from nostall.sass.safety.hazards.facts import InstructionFacts
from nostall.sass.safety.hazards.in_flight import COMPLETION, InFlight, Key, Provers, State


@dataclass(slots=True)
class CompletionRecord:
    """What is in flight at the instructions that rely on completion, by original index."""

    in_flight: dict[int, frozenset[Key]] = field(default_factory=dict[int, frozenset[Key]])
    """Instruction -> accesses and asynchronous operations in flight when it issues."""
    assumed_complete: dict[int, dict[Key, Provers]] = field(
        default_factory=dict[int, dict[Key, Provers]]
    )
    """Instruction -> those that are complete if the order of pairs without witnesses holds."""
    ended: dict[int, frozenset[Key]] = field(default_factory=dict[int, frozenset[Key]])
    """Instruction -> those that its own wait ends."""

    def add(
        self,
        current: InstructionFacts,
        state: State,
        ended: list[tuple[Key, InFlight]],
        facts: dict[int, InstructionFacts],
    ) -> None:
        """Record one instruction; ``state`` is what is in flight after its waits."""
        instruction = current.instruction
        if instruction.is_barrier or current.accesses_memory:
            ordered = {k: i.relied_on for k, i in state.items() if _is_ordered(k, facts)}
            in_flight = frozenset(key for key, provers in ordered.items() if provers is None)
            if in_flight:
                self.in_flight[instruction.index] = in_flight
            if len(in_flight) < len(ordered):
                self.assumed_complete[instruction.index] = {
                    key: provers for key, provers in ordered.items() if provers is not None
                }
        if ended:
            own = frozenset(key for key, _ in ended if _is_ordered(key, facts))
            if own:
                self.ended[instruction.index] = own


def _is_ordered(key: Key, facts: dict[int, InstructionFacts]) -> bool:
    """Whether others may rely on the completion of an item: of an access or a barrier."""
    producer = facts[key[0]]
    if key[1] >= COMPLETION:
        return True
    return (producer.accesses_memory or producer.instruction.is_barrier) and (
        not producer.fixed_latency
    )


def lost_completions(
    original: CompletionRecord,
    candidate: CompletionRecord,
    by_index: dict[int, Instruction],
) -> Iterator[tuple[Instruction, Instruction]]:
    """(instruction, operation that it relies on and that may be in flight when it issues)."""
    for index in candidate.in_flight.keys() | candidate.assumed_complete.keys():
        complete = original.assumed_complete.get(index, {})
        in_flight = candidate.in_flight.get(index, frozenset()) | {
            key
            for key, provers in candidate.assumed_complete.get(index, {}).items()
            if key not in complete or not complete[key] <= provers
        }
        new = in_flight - original.in_flight.get(index, frozenset())
        if not new:
            continue
        instruction = by_index[index]
        own = original.ended.get(index, frozenset())
        for key in sorted(new):
            operation = by_index[key[0]]
            if _relies_on(instruction, operation, key, own):
                yield instruction, operation


def _relies_on(
    instruction: Instruction, operation: Instruction, key: Key, own: frozenset[Key]
) -> bool:
    """Whether an instruction relies on the end of an item that was not in flight originally.

    ``own``: the items that the instruction's own wait ends in the original.
    """
    if instruction.is_barrier:
        return True
    if instruction.effects & Effect.FENCE and key in own:
        return True
    return operation.is_barrier and key[1] >= COMPLETION
