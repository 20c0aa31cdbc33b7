"""Contents of composite ops: the ops inside them that are on some autocast list.

These are facts about ATen's C++, the same on every device; a device's own lists decide which of them matter.
Composites that are missing here contain no listed op, and stay whole (`dropout`, `reshape`, `to`, `batch_norm` ...).
"""

_CONTENTS = """
    _convolution_mode               convolution
    _pad_enum                       reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    _pad_enum                       replication_pad3d
    _scaled_dot_product_attention_math  matmul
    _weight_norm                    norm_except_dim
    arccos                          acos
    arcsin                          asin
    arctan2                         atan2
    chain_matmul                    mm linalg_multi_dot
    column_stack                    hstack
    combinations                    stack
    concat                          cat
    concatenate                     cat
    conv1d.padding                  _convolution_mode
    conv2d.padding                  _convolution_mode
    conv3d.padding                  _convolution_mode
    corrcoef                        cov
    cov                             matmul
    ctc_loss.IntList                sum
    ctc_loss.Tensor                 sum
    cumulative_trapezoid.dx         cumsum
    cumulative_trapezoid.x          cumsum
    dstack                          cat
    einsum                          bmm sum.dim_IntList
    flatten_dense_tensors           cat
    float_power.Scalar              pow.Scalar
    float_power.Tensor_Scalar       pow.Tensor_Scalar
    float_power.Tensor_Tensor       pow.Tensor_Tensor
    gradient.array                  cat
    gradient.scalararray            cat
    gradient.scalarint              cat
    gradient.scalarrayarray         cat
    gradient.scalarrayint           cat
    gradient.tensorarray            cat
    gradient.tensorarrayint         cat
    gru.data                        linear cat stack
    gru.input                       linear cat stack
    gru_cell                        linear
    hstack                          cat
    inner                           tensordot
    instance_norm                   batch_norm
    istft                           fft_irfft fft_ifft pow.Tensor_Scalar
    linalg_cond                     linalg_svdvals linalg_inv_ex linalg_matrix_norm
    linalg_cond.p_str               linalg_svdvals linalg_inv_ex linalg_matrix_norm.str_ord
    linalg_matmul                   matmul
    linalg_matrix_norm              linalg_svdvals linalg_vector_norm
    linalg_matrix_norm.str_ord      linalg_svdvals linalg_vector_norm sum.dim_IntList
    linalg_matrix_power             linalg_inv matmul
    linalg_multi_dot                mm
    linalg_norm                     linalg_vector_norm linalg_matrix_norm
    linalg_norm.ord_str             linalg_matrix_norm.str_ord
    linalg_vander                   cat cumprod
    lstm.data                       linear cat stack
    lstm.input                      linear mkldnn_rnn_layer cat stack
    lstm_cell                       linear
    matrix_power                    linalg_matrix_power
    nanmean                         sum.dim_IntList
    nll_loss_nd                     nll_loss nll_loss2d
    norm_except_dim                 norm.Scalar norm.ScalarOpt_dim
    nuclear_norm                    linalg_matrix_norm.str_ord
    nuclear_norm.dim                linalg_matrix_norm.str_ord
    pad                             reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    pad                             replication_pad3d
    pairwise_distance               norm.ScalarOpt_dim
    rnn_relu.data                   linear cat stack
    rnn_relu.input                  linear cat stack
    rnn_relu_cell                   linear
    rnn_tanh.data                   linear cat stack
    rnn_tanh.input                  linear cat stack
    rnn_tanh_cell                   linear
    row_stack                       vstack
    special_erfinv                  erfinv
    special_expm1                   expm1
    special_log1p                   log1p
    special_log_softmax             log_softmax.int
    special_logsumexp               logsumexp
    special_softmax                 softmax.int
    square                          pow.Tensor_Scalar
    sum_to_size                     sum sum.dim_IntList
    tensordot                       dot mm sum sum.dim_IntList
    trapezoid.dx                    sum.dim_IntList
    trapezoid.x                     sum.dim_IntList
    trapz.dx                        sum.dim_IntList
    trapz.x                         sum.dim_IntList
    vander                          linalg_vander
    vstack                          cat
"""


def _read() -> dict[str, tuple[str, ...]]:
    contents: dict[str, tuple[str, ...]] = {}
    for outer, *inner in (line.split() for line in _CONTENTS.strip().splitlines()):
        name = f"aten::{outer}"
        contents[name] = (*contents.get(name, ()), *(f"aten::{op}" for op in inner))
    return contents


CONTENTS = _read()
