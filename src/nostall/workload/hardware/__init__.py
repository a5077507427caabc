"""What jobs run on: peak rates with their sources, and how much of a peak work reaches."""

from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.efficiency import Curve, Fit, fit_curve, flat
from nostall.workload.hardware.file import load_hardware, presets

__all__ = ["Curve", "Fit", "Hardware", "fit_curve", "flat", "load_hardware", "presets"]
