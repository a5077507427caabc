"""The command ``nostall doctor``: check which tools, packages and GPUs are available."""

from __future__ import annotations

import platform

from nostall import __version__
from nostall.cli.environment import check_environment, missing_parts
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import MissingPart


def doctor(format: FormatOption = Format.TABLE) -> None:
    """Check the environment: tools, packages and the GPU.

    The second table says which uses of nostall lack something here. Exit code 3 if a needed part
    is missing.
    """
    checks = check_environment()
    if format is Format.JSON:
        show_json([check.to_json() for check in checks])
    else:
        show_table(
            f"nostall {__version__} on Python {platform.python_version()}",
            ("part", "version", "remedy"),
            [(c.part, c.version or ("MISSING" if c.needed else "-"), c.remedy) for c in checks],
        )
        show_table(
            "what works here",
            ("use", "lacks"),
            [(use, ", ".join(parts) or "nothing") for use, parts in missing_parts(checks).items()],
        )
    missing = [check for check in checks if check.needed and not check.ok]
    if missing:
        raise MissingPart(f"{missing[0].part} is missing: {missing[0].remedy}")
    if format is Format.TABLE:
        out.print("Ready: `nostall tune` works on this machine with the modelled objective.")
