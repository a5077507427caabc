"""Contracts and base types that all levels of nostall share; imports no other nostall package."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.core.errors import (
        BadBinary,
        BadHardware,
        BadInput,
        BadJob,
        BadLaunch,
        BadRun,
        BadTrace,
        ContractBroken,
        IllegalMove,
        MissingPart,
        NostallError,
        UnsupportedArchitecture,
    )
    from nostall.core.launch import Buffer, Constant, LaunchSpec, LaunchVariant, Scalar
    from nostall.core.measurement import Comparison, Measurement
    from nostall.core.objective import Objective
    from nostall.core.run import Run
    from nostall.core.search import Budget, Checkpoint, Observer, Search, SearchResult, Trial
    from nostall.core.space import Move, Space, Tags
    from nostall.core.tolerance import Tolerance

__all__ = [
    "BadBinary",
    "BadHardware",
    "BadInput",
    "BadJob",
    "BadLaunch",
    "BadRun",
    "BadTrace",
    "Budget",
    "Buffer",
    "Checkpoint",
    "Comparison",
    "Constant",
    "ContractBroken",
    "IllegalMove",
    "LaunchSpec",
    "LaunchVariant",
    "Measurement",
    "MissingPart",
    "Move",
    "NostallError",
    "Objective",
    "Observer",
    "Run",
    "Scalar",
    "Search",
    "SearchResult",
    "Space",
    "Tags",
    "Tolerance",
    "Trial",
    "UnsupportedArchitecture",
]

__getattr__ = lazy_exports(
    __name__,
    __all__,
    "errors",
    "tolerance",
    "measurement",
    "space",
    "objective",
    "search",
    "launch",
    "run",
)
