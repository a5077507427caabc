"""The command ``nostall doctor``: check which tools, packages and GPUs are available."""

from __future__ import annotations

import platform

from nostall import __version__
from nostall.cli.environment import Check, check_environment, missing_parts
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import MissingPart


def doctor(format: FormatOption = Format.TABLE) -> None:
    """Check the environment: tools, packages and the GPU.

    The first line is the verdict, the first table says which uses of nostall lack something here,
    and the second one how to get what is missing. `--format json` has the version of each part.
    Exit code 3 if a needed part is missing.
    """
    checks = check_environment()
    missing = [check for check in checks if check.needed and not check.ok]
    if format is Format.JSON:
        show_json([check.to_json() for check in checks])
    else:
        _show(checks, is_usable=not missing)
    if missing:
        raise MissingPart(f"{missing[0].part} is missing: {missing[0].remedy}")


def _show(checks: list[Check], *, is_usable: bool) -> None:
    lacking = missing_parts(checks)
    ready = sum(not parts for parts in lacking.values())
    verdict = "Ready" if is_usable else "Not ready"
    out.print(f"{verdict}: {ready} of {len(lacking)} uses of nostall lack nothing here.")
    gpu = next(check for check in checks if check.part == "GPU")
    out.print(f"GPU: {gpu.version or 'none, so nothing can be measured here'}")
    found = {check.part: check.version for check in checks}
    versions = [
        f"{part} {found[part].partition(' ')[0]}"
        for part in ("triton", "torch", "vllm")
        if found[part]
    ]
    out.print(
        ", ".join([f"nostall {__version__}", f"Python {platform.python_version()}", *versions])
    )
    show_table(
        "what works here",
        ("use", "state"),
        [
            (use, f"lacks {', '.join(parts)}" if parts else "ready")
            for use, parts in lacking.items()
        ],
    )
    absent = [check for check in checks if not check.ok]
    if absent:
        show_table(
            "what is missing",
            ("part", "remedy"),
            [(c.part + (" (MISSING, needed)" if c.needed else ""), c.remedy) for c in absent],
        )
