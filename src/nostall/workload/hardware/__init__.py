"""What jobs run on: peak rates with their sources, and how much of a peak work reaches."""

from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.efficiency import Curve, Fit, fit_curve, flat
from nostall.workload.hardware.file import load_hardware, presets
from nostall.workload.hardware.operators import OperatorCurve, OperatorFit, fit_operator

__all__ = [
    "Curve",
    "Fit",
    "Hardware",
    "OperatorCurve",
    "OperatorFit",
    "fit_curve",
    "fit_operator",
    "flat",
    "load_hardware",
    "presets",
]
