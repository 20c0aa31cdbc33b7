"""Our additions to ATen's autocast lists: ops that raise on mixed dtypes, and ops that contain or are listed ops.

A device's own list beats these entries.
"""

from .group import ACCELERATORS, EVERY_DEVICE, GPU_LIKE, Group

MIXED = "raises in eager when floating dtypes are mixed"

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
        "torchvision's own autocast kernel: float32 inside, so that box coordinates keep their digits",
        "torchvision::deform_conv2d torchvision::ps_roi_align torchvision::ps_roi_pool torchvision::roi_pool",
    ),
    Group(
        "fp32_round_trip",
        ("cpu", "cuda", "xpu"),
        "torchvision's own autocast kernel: float32 inside, so that box coordinates keep their digits",
        "torchvision::roi_align",
    ),
    Group(
        "fp32",
        ("cpu", "cuda", "xpu"),
        "torchvision's own autocast kernel: float32 inside, so that box coordinates keep their digits",
        "torchvision::nms",
    ),
)
