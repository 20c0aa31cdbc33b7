"""Autocast's op lists for accelerators (CUDA, XPU, MPS, MTIA, MAIA), in PyTorch's own categories.

The facts were read from `ATen/autocast_mode.h`, which ships in the wheel, and checked against the dispatcher.
"""

from ampcompile.rules_group import Group

_GPU_LIKE = ("cuda", "xpu", "mtia", "maia")
_ALL = (*_GPU_LIKE, "mps")

GROUPS = (
    Group(
        "lower_precision_fp",
        _ALL,
        "convolutions gain from matrix units, which multiply 16-bit numbers and sum in float32",
        "_convolution.deprecated _convolution convolution conv1d conv2d conv3d conv_tbc "
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
    ),
    Group(
        "lower_precision_fp",
        _ALL,
        "matrix products gain from matrix units, which multiply 16-bit numbers and sum in float32",
        "addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot",
    ),
    Group(
        "lower_precision_fp",
        _GPU_LIKE,
        "a batch of dot products, a matrix product in disguise",
        "linalg_vecdot",
    ),
    Group(
        "lower_precision_fp",
        _ALL,
        "multiplies by a learned slope, so 16 bits follow a convolution without a cast between",
        "prelu",
    ),
    Group("lower_precision_fp", _ALL, "a recurrent cell is mostly matrix products", "lstm_cell"),
    Group(
        "lower_precision_fp",
        _GPU_LIKE,
        "a recurrent cell is mostly matrix products",
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    Group(
        "lower_precision_fp",
        _ALL,
        "attention is matrix products; its softmax sums in float32 inside the kernel",
        "scaled_dot_product_attention",
        follows=(("attn_mask", "query"),),
    ),
    Group(
        "lower_precision_fp",
        _GPU_LIKE,
        "attention is matrix products; its softmax sums in float32 inside the kernel",
        "_scaled_dot_product_flash_attention",
    ),
    Group(
        "lower_precision_fp",
        ("cuda",),
        "convolutions gain from matrix units, which multiply 16-bit numbers and sum in float32",
        "cudnn_convolution cudnn_convolution_transpose",
    ),
    Group(
        "lower_precision_fp",
        ("cuda",),
        "a recurrent layer is mostly matrix products (builds with cuDNN only)",
        "_cudnn_rnn",
    ),
    Group(
        "lower_precision_fp",
        ("mps",),
        "convolutions gain from matrix units, which multiply 16-bit numbers and sum in float32",
        "_mps_convolution",
    ),
    Group(
        "fp32",
        _ALL,
        "grows or shrinks its argument steeply, so 16-bit inputs and results overflow or lose digits",
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus logsumexp",
    ),
    Group(
        "fp32",
        _ALL,
        "a norm or a distance adds up many squares, which 16 bits cannot hold",
        "layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim "
        "cosine_similarity dist pdist cdist renorm",
    ),
    Group(
        "fp32",
        _GPU_LIKE,
        "a norm adds up many squares, which 16 bits cannot hold",
        "rms_norm",
        since=(2, 13),
    ),
    Group("fp32", ("mps",), "a norm adds up many squares, which 16 bits cannot hold", "batch_norm"),
    Group(
        "fp32",
        _ALL,
        "a loss adds up many terms, and its gradient is what everything else is scaled by",
        "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
        "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
        "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits",
    ),
    Group(
        "fp32",
        _GPU_LIKE,
        "interpolation weights are differences of coordinates, which 16 bits hold only up to 2048",
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
        "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    Group(
        "fp32",
        ("cuda",),
        "a matrix square root multiplies rounding errors",
        "linalg_matrix_sqrth",
        since=(2, 15),
    ),
    Group(
        "fp32_set_opt_dtype",
        _ALL,
        "a long sum or product needs float32; the kernel is asked for it, unless you gave a dtype",
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
        "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList",
    ),
    Group(
        "fp32_set_opt_dtype",
        _ALL,
        "a long sum or product needs float32; the kernel is asked for it, unless you gave a dtype",
        "cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname "
        "sum.dim_DimnameList",
        before=(2, 13),
    ),
    Group(
        "fp32_append_dtype",
        _GPU_LIKE,
        "a norm adds up many squares; the overload with a dtype is called, with float32",
        "norm.Scalar",
        redispatch="aten::norm.ScalarOpt_dtype",
    ),
    Group(
        "fp32_append_dtype",
        _GPU_LIKE,
        "a norm adds up many squares; the overload with a dtype is called, with float32",
        "norm.ScalarOpt_dim",
        redispatch="aten::norm.ScalarOpt_dim_dtype",
    ),
    Group(
        "fp32_append_dtype",
        _GPU_LIKE,
        "a norm adds up many squares; the overload with a dtype is called, with float32",
        "norm.names_ScalarOpt_dim",
        redispatch="aten::norm.names_ScalarOpt_dim_dtype",
        before=(2, 13),
    ),
    Group(
        "promote",
        _ALL,
        "its kernel needs all operands in one dtype",
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    ),
    Group(
        "banned",
        _GPU_LIKE,
        "its gradient overflows in float16: use binary_cross_entropy_with_logits",
        "binary_cross_entropy",
    ),
)
