"""Autocast's op lists for CPU, in PyTorch's own categories. Facts: the dispatcher, and `ATen/autocast_mode.cpp`.

127 ops on torch 2.13; 129 on 2.11, which also counts overloads for named dimensions; 126 on 2.15, which drops
`cholesky` and `qr` and adds `linalg_matrix_sqrth`.
"""

from .group import Group

CPU = ("cpu",)
MATRIX_UNITS = "gain where a CPU has 16-bit matrix instructions, which add up in float32"
LOSS = "a loss adds up many terms, and all gradients grow from it"
SOLVER = "decompositions and solvers multiply rounding errors, and most have no 16-bit kernel"
LONG_SUM = "adds, multiplies or interpolates many numbers, where 16 bits lose digits"
ONE_DTYPE = "its kernel needs all operands in one dtype"

GROUPS = (
    Group(
        "lower_precision_fp",
        CPU,
        f"convolutions {MATRIX_UNITS}",
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding _convolution.deprecated conv_tbc "
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
    ),
    Group(
        "lower_precision_fp",
        CPU,
        f"matrix products {MATRIX_UNITS}",
        "addbmm addmm _addmm_activation baddbmm bmm linalg_vecdot linear matmul mm",
    ),
    Group(
        "lower_precision_fp",
        CPU,
        "matrix products, with a softmax that adds up in float32 inside; a mask takes the query's dtype",
        "scaled_dot_product_attention",
        follows=(("attn_mask", "query"),),
    ),
    Group("lower_precision_fp", CPU, f"mostly matrix products, which {MATRIX_UNITS}", "_native_multi_head_attention"),
    Group("lower_precision_fp", CPU, f"mostly matrix products, which {MATRIX_UNITS}", "mkldnn_rnn_layer"),
    Group("lower_precision_fp", CPU, "one product per element, often right after a convolution", "prelu"),
    Group(
        "fp32",
        CPU,
        LOSS,
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss "
        "ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss "
        "mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
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
        LONG_SUM,
        "cdist nanquantile nanquantile.scalar prod prod.dim_int quantile quantile.scalar trace",
    ),
    Group("fp32", CPU, LONG_SUM, "prod.dim_Dimname", before=(2, 13)),
    Group(
        "fp32",
        CPU,
        "makes complex or quantized numbers, which bfloat16 cannot",
        "fake_quantize_per_tensor_affine polar view_as_complex",
    ),
    Group("promote", CPU, ONE_DTYPE, "cat index_copy stack"),
    Group("promote", CPU, ONE_DTYPE, "index_copy.dimname", before=(2, 13)),
)
