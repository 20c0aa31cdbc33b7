"""Autocast's op lists for CPU, in PyTorch's own categories, checked against the dispatcher."""

from ampcompile.rules_group import Group

_CPU = ("cpu",)

GROUPS = (
    Group(
        "lower_precision_fp",
        _CPU,
        "convolutions gain from 16-bit matrix instructions (AMX, AVX512-BF16), which sum in float32",
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding _convolution.deprecated conv_tbc "
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
    ),
    Group(
        "lower_precision_fp",
        _CPU,
        "matrix products gain from 16-bit matrix instructions (AMX, AVX512-BF16), which sum in float32",
        "bmm mm baddbmm addmm _addmm_activation addbmm linear matmul linalg_vecdot",
    ),
    Group("lower_precision_fp", _CPU, "a recurrent layer is mostly matrix products", "mkldnn_rnn_layer"),
    Group(
        "lower_precision_fp",
        _CPU,
        "attention is matrix products; its softmax sums in float32 inside the kernel",
        "scaled_dot_product_attention",
        follows=(("attn_mask", "query"),),
    ),
    Group(
        "lower_precision_fp",
        _CPU,
        "attention is matrix products; its softmax sums in float32 inside the kernel",
        "_native_multi_head_attention",
    ),
    Group(
        "lower_precision_fp",
        _CPU,
        "multiplies by a learned slope, so 16 bits follow a convolution without a cast between",
        "prelu",
    ),
    Group(
        "fp32",
        _CPU,
        "a loss adds up many terms, and its gradient is what everything else is scaled by",
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss "
        "ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss "
        "mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    ),
    Group(
        "fp32",
        _CPU,
        "decompositions and solvers multiply rounding errors, and most have no 16-bit kernel",
        "_lu_with_info cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
        "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
        "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor "
        "linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv "
        "linalg_tensorsolve lu_solve orgqr ormqr pinverse svd triangular_solve",
    ),
    Group(
        "fp32",
        _CPU,
        "decompositions and solvers multiply rounding errors, and most have no 16-bit kernel",
        "cholesky qr",
        before=(2, 15),
    ),
    Group(
        "fp32",
        _CPU,
        "a matrix square root multiplies rounding errors",
        "linalg_matrix_sqrth",
        since=(2, 15),
    ),
    Group(
        "fp32",
        _CPU,
        "Fourier transforms have no bfloat16 kernel, and sum over the whole signal",
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 "
        "fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center",
    ),
    Group(
        "fp32",
        _CPU,
        "pooling, padding and sampling here had no 16-bit kernel when the list was made",
        "_grid_sampler_2d_cpu_fallback adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d "
        "fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d max_pool3d "
        "max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    Group(
        "fp32",
        _CPU,
        "adds, multiplies or orders many numbers, where 16 bits lose digits",
        "cdist nanquantile nanquantile.scalar prod prod.dim_int quantile quantile.scalar trace",
    ),
    Group(
        "fp32",
        _CPU,
        "adds, multiplies or orders many numbers, where 16 bits lose digits",
        "prod.dim_Dimname",
        before=(2, 13),
    ),
    Group(
        "fp32",
        _CPU,
        "makes complex or quantized numbers, which have no bfloat16 form",
        "polar view_as_complex fake_quantize_per_tensor_affine",
    ),
    Group("promote", _CPU, "its kernel needs all operands in one dtype", "cat stack index_copy"),
    Group(
        "promote",
        _CPU,
        "its kernel needs all operands in one dtype",
        "index_copy.dimname",
        before=(2, 13),
    ),
)
