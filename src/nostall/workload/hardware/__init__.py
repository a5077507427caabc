"""Hardware descriptions: peak rates with their sources, and the efficiency that work reaches."""

from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.efficiency import (
    EfficiencyCurve,
    EfficiencyFit,
    fit_efficiency,
    flat_efficiency,
)
from nostall.workload.hardware.file import load_hardware, presets
from nostall.workload.hardware.operator_time import (
    OperatorTimeFit,
    OperatorTimeModel,
    fit_operator_time,
)

__all__ = [
    "EfficiencyCurve",
    "EfficiencyFit",
    "Hardware",
    "OperatorTimeFit",
    "OperatorTimeModel",
    "fit_efficiency",
    "fit_operator_time",
    "flat_efficiency",
    "load_hardware",
    "presets",
]
