"""Autocast's op lists for accelerators, in PyTorch's own categories. Facts: the dispatcher, `ATen/autocast_mode.h`.

CUDA: 120 ops on torch 2.13, `_cudnn_rnn` among them, which only builds with cuDNN have; 126 on 2.11, which also counts
overloads for named dimensions but lacks `rms_norm`; 121 on 2.15, which adds `linalg_matrix_sqrth`. XPU, MTIA and MAIA
have CUDA's lists without cuDNN's ops. MPS has shorter lists of its own, with softmax and sums in plain `fp32`.
"""

from .group import ACCELERATORS, GPU_LIKE, Group

CUDA, MPS = ("cuda",), ("mps",)
MATRIX_UNITS = "gain from matrix units, which multiply 16-bit numbers and add up in float32"
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
        ACCELERATORS,
        "matrix products, with a softmax that adds up in float32 inside; a mask takes the query's dtype",
        "scaled_dot_product_attention",
        follows=(("attn_mask", "query"),),
    ),
    Group(
        "lower_precision_fp",
        GPU_LIKE,
        "matrix products, with a softmax that adds up in float32 inside",
        "_scaled_dot_product_flash_attention",
    ),
    Group("lower_precision_fp", ACCELERATORS, "one product per element, often right after a convolution", "prelu"),
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
        ACCELERATORS,
        LOSS,
        "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss "
        "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    ),
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
