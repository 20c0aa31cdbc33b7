"""Autocast's op lists for CPUs and for accelerators, in PyTorch's own categories.

Facts: the dispatcher, `ATen/autocast_mode.cpp` and `ATen/autocast_mode.h`. CPU: 127 ops on torch 2.13; 129 on 2.11,
which also counts overloads for named dimensions; 126 on 2.15, which drops `cholesky` and `qr` and adds
`linalg_matrix_sqrth`. CUDA: 120 ops on torch 2.13, `_cudnn_rnn` among them, which only builds with cuDNN have; 126 on
2.11, for the same reason, but without `rms_norm`; 121 on 2.15, which adds `linalg_matrix_sqrth`. XPU, MTIA and MAIA
have CUDA's lists without cuDNN's ops. MPS has shorter lists of its own, with softmax and sums in plain `fp32`.
"""

from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "lower_precision_fp",  # floating operands are cast to the low type
    "fp32",  # floating operands are cast to float32
    "fp32_set_opt_dtype",  # nothing is cast; the argument `dtype` is float32 unless the user gave one
    "fp32_append_dtype",  # nothing is cast; the overload that takes a dtype is called, with float32
    "promote",  # floating operands are cast to the widest among them
    "follow_destination",  # floating operands are cast to the dtype of the first, which is written in place
    "fp32_inside",  # floating operands are cast to float32, floating results to the low type
    "fp32_round_trip",  # floating operands are cast to float32, floating results back to the first one's dtype
    "as_arrives",  # nothing is cast
    "banned",  # raises, as in eager autocast
]
Version = tuple[int, int]
GPU_LIKE = ("cuda", "xpu", "mtia", "maia")
ACCELERATORS = (*GPU_LIKE, "mps")
EVERY_DEVICE = ("cpu", *ACCELERATORS)


@dataclass(frozen=True)
class Group:
    """Ops (`name` or `name.overload`, blank-separated, aten's without a namespace) in one category for one reason."""

    category: Category
    devices: tuple[str, ...]
    because: str
    ops: str
    since: Version = (0, 0)  # first supported torch release whose autocast has them
    before: Version = (999, 0)  # first supported torch release whose autocast lacks them again
    follows: tuple[tuple[str, str], ...] = ()
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    redispatch: str = ""

    def names(self) -> list[str]:
        """The ops' full names, as `aten::linear`."""
        return [op if "::" in op else f"aten::{op}" for op in self.ops.split()]


CPU, CUDA, MPS = ("cpu",), ("cuda",), ("mps",)
CPU_UNITS = "gain where a CPU has 16-bit matrix instructions, which add up in float32"
MATRIX_UNITS = "gain from matrix units, which multiply 16-bit numbers and add up in float32"
SOLVER = "decompositions and solvers multiply rounding errors, and most have no 16-bit kernel"
CPU_LONG_SUM = "adds, multiplies or interpolates many numbers, where 16 bits lose digits"
STEEP = "its result grows or shrinks faster than its argument, so 16 bits overflow or lose digits"
SQUARES = "adds up squares, which overflow 16 bits early"
LOSS = "a loss adds up many terms, and all gradients grow from it"
LONG_SUM = "a long sum or product needs float32"
ASKED = f"{LONG_SUM}; the kernel is asked for it, unless you gave a dtype"
COORDINATES = "positions and weights are fractions of coordinates, which 16 bits hold too coarsely"
ONE_DTYPE = "its kernel needs all operands in one dtype"

SUMS = (
    "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod "
    "prod.dim_int softmax.int sum sum.dim_IntList"
)
SUMS_OVER_NAMED_DIMENSIONS = (
    "cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList"
)

GROUPS = (
    Group(
        "lower_precision_fp",
        CPU,
        f"convolutions {CPU_UNITS}",
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding _convolution.deprecated conv_tbc "
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
    ),
    Group(
        "lower_precision_fp",
        CPU,
        f"matrix products {CPU_UNITS}",
        "addbmm addmm _addmm_activation baddbmm bmm linalg_vecdot linear matmul mm",
    ),
    Group(
        "lower_precision_fp",
        EVERY_DEVICE,
        "matrix products, with a softmax that adds up in float32 inside; a mask takes the query's dtype",
        "scaled_dot_product_attention",
        follows=(("attn_mask", "query"),),
    ),
    Group(
        "lower_precision_fp",
        CPU,
        f"mostly matrix products, which {CPU_UNITS}",
        "_native_multi_head_attention mkldnn_rnn_layer",
    ),
    Group("lower_precision_fp", EVERY_DEVICE, "one product per element, often right after a convolution", "prelu"),
    Group(
        "fp32",
        EVERY_DEVICE,
        LOSS,
        "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss "
        "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    ),
    Group(
        "fp32",
        CPU,
        LOSS,
        "binary_cross_entropy cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor multilabel_margin_loss_forward",
    ),
    Group(
        "fp32",
        CPU,
        SOLVER,
        "_lu_with_info cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
        "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
        "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor "
        "linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr "
        "ormqr pinverse svd triangular_solve",
    ),
    Group("fp32", CPU, SOLVER, "cholesky qr", before=(2, 15)),
    Group("fp32", CPU, SOLVER, "linalg_matrix_sqrth", since=(2, 15)),
    Group(
        "fp32",
        CPU,
        "Fourier transforms add up the whole signal, and have no bfloat16 kernel",
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 "
        "fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center",
    ),
    Group(
        "fp32",
        CPU,
        "pooling, padding or sampling that had no 16-bit kernel when the list was drawn up",
        "_grid_sampler_2d_cpu_fallback adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d "
        "fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d max_pool3d max_unpool2d "
        "max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d",
    ),
    Group(
        "fp32",
        CPU,
        CPU_LONG_SUM,
        "cdist nanquantile nanquantile.scalar prod prod.dim_int quantile quantile.scalar trace",
    ),
    Group("fp32", CPU, CPU_LONG_SUM, "prod.dim_Dimname", before=(2, 13)),
    Group(
        "fp32",
        CPU,
        "makes complex or quantized numbers, which bfloat16 cannot",
        "fake_quantize_per_tensor_affine polar view_as_complex",
    ),
    Group("promote", CPU, ONE_DTYPE, "cat index_copy stack"),
    Group("promote", CPU, ONE_DTYPE, "index_copy.dimname", before=(2, 13)),
    Group(
        "lower_precision_fp",
        ACCELERATORS,
        f"convolutions {MATRIX_UNITS}",
        "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d.input convolution",
    ),
    Group("lower_precision_fp", GPU_LIKE, f"convolutions {MATRIX_UNITS}", "conv_transpose3d.input"),
    Group("lower_precision_fp", CUDA, f"convolutions {MATRIX_UNITS}", "cudnn_convolution cudnn_convolution_transpose"),
    Group("lower_precision_fp", MPS, f"convolutions {MATRIX_UNITS}", "_mps_convolution"),
    Group(
        "lower_precision_fp",
        ACCELERATORS,
        f"matrix products {MATRIX_UNITS}",
        "addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv",
    ),
    Group("lower_precision_fp", GPU_LIKE, f"matrix products {MATRIX_UNITS}", "linalg_vecdot"),
    Group("lower_precision_fp", ACCELERATORS, f"mostly matrix products, which {MATRIX_UNITS}", "lstm_cell"),
    Group(
        "lower_precision_fp",
        GPU_LIKE,
        f"mostly matrix products, which {MATRIX_UNITS}",
        "_thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell rnn_relu_cell rnn_tanh_cell",
    ),
    Group(
        "lower_precision_fp",
        CUDA,
        f"mostly matrix products, which {MATRIX_UNITS}; the flat weight buffer is made anew from the cast weights",
        "_cudnn_rnn",
        drops=("weight_buf",),
    ),
    Group(
        "lower_precision_fp",
        GPU_LIKE,
        "matrix products, with a softmax that adds up in float32 inside",
        "_scaled_dot_product_flash_attention",
    ),
    Group(
        "fp32",
        ACCELERATORS,
        STEEP,
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow.Scalar pow.Tensor_Scalar "
        "pow.Tensor_Tensor reciprocal rsqrt sinh softplus tan",
    ),
    Group(
        "fp32",
        ACCELERATORS,
        SQUARES,
        "cdist cosine_similarity dist frobenius_norm.dim group_norm layer_norm native_layer_norm nuclear_norm "
        "nuclear_norm.dim pdist renorm",
    ),
    Group("fp32", GPU_LIKE, SQUARES, "rms_norm", since=(2, 13)),
    Group("fp32", MPS, SQUARES, "batch_norm", keeps=("running_mean", "running_var")),
    Group(
        "fp32",
        GPU_LIKE,
        COORDINATES,
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
    ),
    Group("fp32", CUDA, "decompositions multiply rounding errors", "linalg_matrix_sqrth", since=(2, 15)),
    Group("fp32", MPS, "has no 16-bit kernel here", "conv_transpose3d.input"),
    Group("fp32", MPS, LONG_SUM, SUMS),
    Group("fp32", MPS, LONG_SUM, SUMS_OVER_NAMED_DIMENSIONS, before=(2, 13)),
    Group("fp32_set_opt_dtype", GPU_LIKE, ASKED, SUMS),
    Group("fp32_set_opt_dtype", GPU_LIKE, ASKED, SUMS_OVER_NAMED_DIMENSIONS, before=(2, 13)),
    Group("fp32_append_dtype", GPU_LIKE, SQUARES, "norm.Scalar", redispatch="aten::norm.ScalarOpt_dtype"),
    Group("fp32_append_dtype", GPU_LIKE, SQUARES, "norm.ScalarOpt_dim", redispatch="aten::norm.ScalarOpt_dim_dtype"),
    Group(
        "fp32_append_dtype",
        GPU_LIKE,
        SQUARES,
        "norm.names_ScalarOpt_dim",
        before=(2, 13),
        redispatch="aten::norm.names_ScalarOpt_dim_dtype",
    ),
    Group(
        "promote",
        ACCELERATORS,
        ONE_DTYPE,
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot",
    ),
    Group("promote", GPU_LIKE, ONE_DTYPE, "vdot"),
    Group(
        "banned",
        GPU_LIKE,
        "probabilities near 0 and 1 don't survive 16 bits: use binary_cross_entropy_with_logits",
        "binary_cross_entropy",
    ),
)
