"""Names of the machine's parts, for which a measured gain holds."""

from __future__ import annotations

import contextlib
import platform

CPU = "CPU "
"""Beginning of a device's name that is no GPU."""


def cpu_name() -> str:
    """The CPU's model, after :data:`CPU`."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return CPU + line.partition(":")[2].strip()
    return CPU + (platform.processor() or platform.machine())


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        words = file.readline().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None
