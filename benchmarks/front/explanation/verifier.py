"""Figures of ``docs/explanation/verifier-evidence.md`` outside of its generated tables."""

from __future__ import annotations

from benchmarks.harness.result_file import load, results


def figures() -> dict[str, str]:
    """Name -> text."""
    found = load(results("sass") / "false_alarms_blind.json")["summary"]
    parts = [
        f"{refused} of {number} for {architecture}"
        for architecture, (number, refused) in sorted(
            found["by_architecture"].items(), key=lambda item: int(item[0].removeprefix("sm_"))
        )
    ]
    before = load(results("sass") / "false_alarms_before_repair.json")["summary"]["unseen"]
    return {
        "before-repair": f"{before['refused']} of {before['functions']:,}",
        "before-repair-share": f"{100 * before['refused'] / before['functions']:.2f} %",
        "blind": f"{found['refused']} of {found['functions']:,}",
        "blind-share": f"{100 * found['refused'] / found['functions']:.2f} %",
        "blind-architectures": f"{', '.join(parts[:-1])}, and {parts[-1]}",
    }
