"""cuBLASLt through ctypes: algorithms that its heuristic proposes, and products by one of them.

PyTorch runs only the first proposal. Constants and structures are those of ``cublasLt.h`` (CUDA 13)
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nostall.core.errors import MissingPart

_REAL_TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""cudaDataType of the elements."""
_REAL_32F, _COMPUTE_32F = 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 7, 8, 26
"""Attributes of a product (cublasLtMatmulDescAttributes_t)."""
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE = 1
"""Attribute of a preference: bytes of workspace."""
ALGORITHM_BYTES = 64
_RESULT_BYTES = 96
"""cublasLtMatmulHeuristicResult_t: algorithm, workspace (size_t), state (int), waves, reserved."""
_WORKSPACE_AT, _STATE_AT = 64, 72
WORKSPACE_BYTES = 32 << 20
"""Workspace of all products, as PyTorch has it on Hopper."""


class CublasLtError(MissingPart):
    """A call of cuBLASLt failed, or the library is missing."""


def _check(status: int, call: str) -> None:
    if status:
        raise CublasLtError(f"{call} returned status {status}; the layer runs by F.linear instead")


@cache
def library() -> ctypes.CDLL:
    """The library that PyTorch's wheel brings. Raises :class:`CublasLtError` if there is none."""
    folders = [
        Path(base) / part for base in sys.path for part in ("nvidia/cu13/lib", "nvidia/cublas/lib")
    ]
    found = [str(file) for folder in folders for file in sorted(folder.glob("libcublasLt.so.*"))]
    for name in (*found, "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            loaded = ctypes.CDLL(name)
        except OSError:
            continue
        loaded.cublasLtGetVersion.restype = ctypes.c_size_t
        return loaded
    raise CublasLtError("libcublasLt is not installed; install PyTorch for CUDA")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


@cache
def _workspace(device: int) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


@dataclass(frozen=True, eq=False)
class Product:
    """The description of y = x W^T (+ bias) for one M, N and K; holds cuBLASLt's objects.

    In cuBLASLt's column-major view the product is y^T (N, M) = W (N, K) x^T (K, M).
    """

    device: int
    has_bias: bool
    description: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    layouts: tuple[ctypes.c_void_p, ...] = field(
        default_factory=lambda: tuple(ctypes.c_void_p() for _ in range(3))
    )

    _usable: dict[bytes, bool] = field(default_factory=dict)

    @staticmethod
    @cache
    def of(m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: int) -> Product:
        """The product of these sizes; made once and kept."""
        lib, kind = library(), _REAL_TYPES[dtype]
        product = Product(device, has_bias)
        _check(
            lib.cublasLtMatmulDescCreate(
                ctypes.byref(product.description), _COMPUTE_32F, _REAL_32F
            ),
            "cublasLtMatmulDescCreate",
        )
        product._set(_TRANSPOSE_A, ctypes.c_int32(1))
        if has_bias:
            product._set(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
            product._set(_BIAS_TYPE, ctypes.c_int32(kind))
        for layout, rows, columns in zip(product.layouts, (k, k, n), (n, m, m), strict=True):
            _check(
                lib.cublasLtMatrixLayoutCreate(
                    ctypes.byref(layout), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                    ctypes.c_int64(rows),
                ),
                "cublasLtMatrixLayoutCreate",
            )  # fmt: skip
        return product

    def _set(self, attribute: int, value: Any) -> None:
        status = library().cublasLtMatmulDescSetAttribute(
            self.description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        _check(status, "cublasLtMatmulDescSetAttribute")

    def algorithms(self, count: int = 24) -> list[bytes]:
        """The algorithms that the heuristic proposes, best first; at most ``count``."""
        lib, preference = library(), ctypes.c_void_p()
        _check(
            lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)),
            "cublasLtMatmulPreferenceCreate",
        )
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        lib.cublasLtMatmulPreferenceSetAttribute(
            preference, _MAX_WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(8)
        )
        results = (ctypes.c_uint8 * (_RESULT_BYTES * count))()
        found = ctypes.c_int(0)
        weight, x, y = self.layouts
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(self.device), self.description, weight, x, y, y, preference,
            ctypes.c_int(count), results, ctypes.byref(found),
        )  # fmt: skip
        lib.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
        algorithms = []
        for index in range(found.value):
            at = index * _RESULT_BYTES
            if not ctypes.c_int.from_buffer(results, at + _STATE_AT).value:
                algorithms.append(bytes(results[at : at + ALGORITHM_BYTES]))
        return algorithms

    def is_usable(self, algorithm: bytes) -> bool:
        """Whether the library can compute this product with an algorithm; asked once for each."""
        if algorithm not in self._usable:
            self._usable[algorithm] = self._ask(algorithm)
        return self._usable[algorithm]

    def _ask(self, algorithm: bytes) -> bool:
        result = (ctypes.c_uint8 * _RESULT_BYTES)()
        weight, x, y = self.layouts
        status = library().cublasLtMatmulAlgoCheck(
            _handle(self.device), self.description, weight, x, y, y,
            ctypes.create_string_buffer(algorithm, ALGORITHM_BYTES), result,
        )  # fmt: skip
        needed = ctypes.c_size_t.from_buffer(result, _WORKSPACE_AT).value
        return status == 0 and needed <= WORKSPACE_BYTES

    def run(
        self, algorithm: bytes, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None
    ) -> None:
        """Compute y with an algorithm, on the current stream."""
        if bias is not None:
            self._set(_BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
        pointer, space = ctypes.c_void_p, _workspace(self.device)
        for_weight, for_x, for_y = self.layouts
        status = library().cublasLtMatmul(
            _handle(self.device), self.description, ctypes.byref(ctypes.c_float(1.0)),
            pointer(weight.data_ptr()), for_weight, pointer(x.data_ptr()), for_x,
            ctypes.byref(ctypes.c_float(0.0)), pointer(y.data_ptr()), for_y,
            pointer(y.data_ptr()), for_y,
            ctypes.create_string_buffer(algorithm, ALGORITHM_BYTES), pointer(space.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES), pointer(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        _check(status, "cublasLtMatmul")
