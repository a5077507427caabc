"""Terminal lines of a search of the assembler's input: levers, resources and candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def assembler_lines(assembler: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the winner and the search; ``assembler`` is that field of the result."""
    # Imported here: the options of `tune` need no report.
    from nostall.report.tune.change_words import setting_words

    winner = assembler.get("winner")
    if winner is not None:
        yield f"changed:  {'; '.join(map(setting_words, winner['levers'])) or 'nothing'}"
        yield f"before:   {_resources(assembler['original'])}"
        yield f"after:    {_resources(winner)}"
    yield f"searched: {count_text(assembler['counts'])}"
    if refused := assembler.get("native_refused"):
        yield f"native:   {refused}"
    idle = assembler.get("idle_share")
    if idle is not None:
        yield f"GPU idle: {idle:.1%} of the search, with {assembler['workers']} build processes"


def median_times(record: Mapping[str, Any]) -> str:
    """The medians of the final comparison; ``record`` is the result of a measured run."""
    return (
        f"{record['original'] * 1e6:.3f} us -> {record['best'] * 1e6:.3f} us in the final "
        "comparison; the gain is the median of its paired ratios"
    )


def dependent_lines(dependent: Mapping[str, Any]) -> Iterator[str]:
    """Lines on dependent launches; ``dependent`` is that field of the result."""
    chain, isolated = dependent["chain"], dependent["over_isolated"]
    if "ratio" not in chain:
        yield f"chains:   dependent launches were not timed ({chain['fate']}: {chain['detail']})"
        return
    over = f", {_ratio(isolated)} over the result" if isolated and "ratio" in isolated else ""
    kept = "" if dependent["improved"] else "; not kept"
    yield (
        f"chains:   {_ratio(chain)} over the original, launches back to back as dependent launches "
        f"({dependent['mode']}){over}{kept}"
    )


def _ratio(comparison: Mapping[str, Any]) -> str:
    interval = f"[{comparison['low']:.4f}, {comparison['high']:.4f}]"
    null = f"[{comparison['null_low']:.4f}, {comparison['null_high']:.4f}]"
    return f"{comparison['ratio']:.4f}x {interval} (null {null})"


def count_text(counts: Mapping[str, int]) -> str:
    """Candidates by outcome, the most frequent first."""
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{number} {outcome}" for outcome, number in ranked) or "no candidates"


def _resources(resources: Mapping[str, Any]) -> str:
    parts = [f"{resources['registers']} registers"]
    if resources.get("spill_bytes") is not None:
        parts.append(f"{resources['spill_bytes']} bytes spilled")
    if "blocks_per_sm" in resources:
        parts.append(f"{resources['blocks_per_sm']} blocks an SM (limit: {resources['limit']})")
    return ", ".join(parts)
