"""Reasons why operators without a lowering rule are left to PyTorch and Inductor.

Each is a kind of computation that a loop over rows and columns with affine addresses does not do,
or that a library does better. An operator without a rule and without a reason here could become one
of nostall's operators, and has no rule yet.
"""

from __future__ import annotations

NO_RULE = "unsupported operator"
OWN = "an operator of nostall"
ATTENTION = "attention, for fused attention kernels"
"""Reason of all operators with this word in their names."""
LISTS = "list of tensors, such as an optimiser's: not for kernels of regions"
"""Reason of ``_foreach_*``; :mod:`nostall.fusion.lists` has the kernels over lists."""

_NAMES: dict[str, str] = {
    "matrix product or convolution, for cuBLAS, cuDNN and CUTLASS": (
        "mm addmm baddbmm bmm dot vdot mv addmv addbmm convolution convolution_backward linear "
        "_convolution _scaled_mm _grouped_mm _scaled_grouped_mm _int_mm _trilinear addr "
        "cudnn_convolution mkldnn_convolution slow_conv2d_forward _slow_conv2d_forward"
    ),
    "scan: each result depends on the one before": (
        "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"
    ),
    "sorting": (
        "sort topk kthvalue median nanmedian mode searchsorted bucketize histc histogram bincount"
    ),
    "random numbers": (
        "rand randn randint randperm bernoulli normal multinomial poisson binomial "
        "_sample_dirichlet _standard_gamma exponential geometric cauchy log_normal uniform dropout "
        "native_dropout rand_like randn_like randint_like rrelu_with_noise_functional "
        "inductor_randint inductor_seed inductor_seeds inductor_random "
        "inductor_rand_eager_offset inductor_rand_eager_offsets"
    ),
    "shape that depends on values": (
        "nonzero unique _unique _unique2 unique_dim unique_consecutive masked_select "
        "repeat_interleave nonzero_static _local_scalar_dense item"
    ),
    "window over positions": (
        "avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward "
        "_adaptive_avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d "
        "adaptive_max_pool3d im2col col2im unfold unfold_backward upsample_nearest1d "
        "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices "
        "upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
        "upsample_linear1d upsample_trilinear3d upsample_nearest2d_backward "
        "upsample_bilinear2d_backward grid_sampler_2d grid_sampler_3d fractional_max_pool2d "
        "fractional_max_pool3d max_unpool2d max_unpool3d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa _upsample_nearest_exact2d upsample_bicubic2d_backward"
    ),
    "several elements of a row by indices": (
        "index index_put _unsafe_index _unsafe_index_put embedding embedding_dense_backward "
        "_embedding_bag _embedding_bag_forward_only index_select index_add index_copy index_fill "
        "index_reduce take put scatter_reduce masked_scatter _unsafe_masked_index "
        "_unsafe_masked_index_put_accumulate"
    ),
    "part of a result: kernels write whole tensors": (
        "diagonal_scatter as_strided_scatter constant_pad_nd reflection_pad1d "
        "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
        "_fft_r2c _fft_c2r _fft_c2c"
    ),
    "view with strides of its own": (
        "as_strided diagonal view_as_real view_as_complex real imag inductor_force_stride_order"
    ),
    "memory without values": (
        "empty empty_strided empty_like empty_permuted new_empty new_empty_strided resize set_"
    ),
    "size, not a tensor": (
        "sym_size sym_numel sym_stride sym_storage_offset sym_constrain_range "
        "sym_constrain_range_for_size _assert_async _assert_scalar"
    ),
    "distances of all pairs": "_cdist_forward _pdist_forward _cdist_backward _pdist_backward cdist",
    "linear algebra": (
        "cholesky linalg_cholesky_ex linalg_eigh linalg_eig linalg_qr linalg_svd _linalg_svd "
        "linalg_inv_ex linalg_lu_factor_ex linalg_solve_triangular triangular_solve lu_unpack "
        "_linalg_det _linalg_slogdet _linalg_solve_ex _linalg_eigh linalg_lu linalg_lstsq "
        "linalg_householder_product ormqr geqrf cholesky_solve cholesky_inverse"
    ),
}
LEFT: dict[str, str] = {name: reason for reason, text in _NAMES.items() for name in text.split()}
"""The reason by the name of the operator, without its overload."""


def reason(target: object) -> str:
    """Why no kernel computes a call without a lowering rule."""
    parts = str(target).split(".")
    name = parts[1] if len(parts) > 1 else ""
    if parts[0] == "nostall":
        return OWN
    if "attention" in name:
        return ATTENTION
    return LISTS if name.startswith("_foreach_") else LEFT.get(name, NO_RULE)
