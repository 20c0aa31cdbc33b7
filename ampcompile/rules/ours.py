"""Beyond autocast's lists: rules of ours, and what composite ops contain.

The rules are for ops that would raise on mixed dtypes, ops that call listed ops, and torchvision's. None replaces one
of the device's own list.
"""

from .autocast_lists import ACCELERATORS, EVERY_DEVICE, GPU_LIKE, Group

MIXED = "raises in eager when floating dtypes are mixed"
BOXES = "torchvision's own autocast kernel: float32 inside, so that box coordinates keep their digits"

GROUPS = (
    Group(
        "promote",
        EVERY_DEVICE,
        f"puts values into a copy of its first argument; {MIXED}",
        "_unsafe_masked_index_put_accumulate index_add index_copy index_put index_reduce "
        "masked_scatter put scatter.reduce scatter.src scatter_add scatter_reduce.two",
    ),
    Group(
        "promote",
        EVERY_DEVICE,
        MIXED,
        "_chunk_cat _grouped_mm addmv bilinear cartesian_prod convolution cross dot embedding_bag "
        "embedding_bag.padding_idx heaviside histogram.bins_tensor isclose lerp.Scalar lerp.Tensor linalg_cross "
        "meshgrid meshgrid.indexing mv vdot",
    ),
    Group("promote", ("mps",), MIXED, "binary_cross_entropy linalg_vecdot"),
    Group(
        "follow_destination",
        EVERY_DEVICE,
        f"writes into its first argument, whose dtype stays; {MIXED}",
        "_index_put_impl_ addbmm_ addmm_ addmv_ baddbmm_ heaviside_ index_add_ index_copy_ index_put_ "
        "index_reduce_ lerp_.Scalar lerp_.Tensor masked_scatter_ put_ scatter_.reduce scatter_.src "
        "scatter_add_ scatter_reduce_.two",
    ),
    Group(
        "lower_precision_fp",
        ("cpu",),
        "what nn.TransformerEncoderLayer calls without gradients; eager autocast lowers the products inside it",
        "_transformer_encoder_layer_fwd",
        keeps=("norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2"),
    ),
    Group(
        "fp32",
        ACCELERATORS,
        "made of log_softmax and nll_loss, both in float32 under autocast; kept whole, one kernel can do it",
        "cross_entropy_loss",
    ),
    Group(
        "fp32",
        GPU_LIKE,
        "calls the op of the same name that is on autocast's fp32 list",
        "_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec "
        "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_bicubic2d.vec "
        "upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec "
        "upsample_nearest3d.vec upsample_trilinear3d.vec",
    ),
    Group(
        "fp32_round_trip",
        ("cuda", "xpu"),
        BOXES,
        "torchvision::deform_conv2d torchvision::ps_roi_align torchvision::ps_roi_pool torchvision::roi_pool",
    ),
    Group("fp32_round_trip", ("cpu", "cuda", "xpu"), BOXES, "torchvision::roi_align"),
    Group("fp32", ("cpu", "cuda", "xpu"), BOXES, "torchvision::nms"),
)

_CONTENTS = """
    _convolution_mode: convolution
    _pad_enum pad: reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    _scaled_dot_product_attention_math cov linalg_matmul: matmul
    _weight_norm: norm_except_dim
    arccos: acos
    arcsin: asin
    arctan2: atan2
    chain_matmul: mm linalg_multi_dot
    column_stack: hstack
    combinations: stack
    concat concatenate dstack flatten_dense_tensors: cat
    gradient.array gradient.scalararray gradient.scalarint gradient.scalarrayarray gradient.scalarrayint: cat
    gradient.tensorarray gradient.tensorarrayint hstack vstack: cat
    conv1d.padding conv2d.padding conv3d.padding: _convolution_mode
    corrcoef: cov
    ctc_loss.IntList ctc_loss.Tensor: sum
    cumulative_trapezoid.dx cumulative_trapezoid.x: cumsum
    einsum: bmm sum.dim_IntList
    float_power.Scalar: pow.Scalar
    float_power.Tensor_Scalar square: pow.Tensor_Scalar
    float_power.Tensor_Tensor: pow.Tensor_Tensor
    gru.data gru.input lstm.data rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input: linear cat stack
    gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell: linear
    inner: tensordot
    instance_norm: batch_norm
    istft: fft_irfft fft_ifft pow.Tensor_Scalar
    linalg_cond: linalg_svdvals linalg_inv_ex linalg_matrix_norm
    linalg_cond.p_str: linalg_svdvals linalg_inv_ex linalg_matrix_norm.str_ord
    linalg_matrix_norm: linalg_svdvals linalg_vector_norm
    linalg_matrix_norm.str_ord: linalg_svdvals linalg_vector_norm sum.dim_IntList
    linalg_matrix_power: linalg_inv matmul
    linalg_multi_dot: mm
    linalg_norm: linalg_vector_norm linalg_matrix_norm
    linalg_norm.ord_str nuclear_norm nuclear_norm.dim: linalg_matrix_norm.str_ord
    linalg_vander: cat cumprod
    lstm.input: linear mkldnn_rnn_layer cat stack
    matrix_power: linalg_matrix_power
    nanmean trapezoid.dx trapezoid.x trapz.dx trapz.x: sum.dim_IntList
    nll_loss_nd: nll_loss nll_loss2d
    norm_except_dim: norm.Scalar norm.ScalarOpt_dim
    pairwise_distance: norm.ScalarOpt_dim
    row_stack: vstack
    special_erfinv: erfinv
    special_expm1: expm1
    special_log1p: log1p
    special_log_softmax: log_softmax.int
    special_logsumexp: logsumexp
    special_softmax: softmax.int
    sum_to_size: sum sum.dim_IntList
    tensordot: dot mm sum sum.dim_IntList
    vander: linalg_vander
"""


def _read() -> dict[str, tuple[str, ...]]:
    contents: dict[str, tuple[str, ...]] = {}
    for outer, inner in (line.split(":") for line in _CONTENTS.strip().splitlines()):
        contents |= dict.fromkeys((f"aten::{op}" for op in outer.split()), tuple(f"aten::{op}" for op in inner.split()))
    return contents


CONTENTS = _read()
"""The ops on some autocast list that eager autocast meets inside composite ops.

Facts about ATen's C++, the same on every device; whether one matters depends on the device's own lists. Composites that
are missing here contain no op on any list, and stay whole (`dropout`, `reshape`, `to`, `batch_norm` ...).
"""
