"""Rules that eager autocast lacks: ops that would raise on mixed floating dtypes, on every device."""

from ampcompile.rules_group import Group

_EVERY = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")

GROUPS = (
    Group(
        "promote",
        _EVERY,
        "its kernel needs all operands in one dtype, and raises in eager autocast",
        "index_put index_add index_copy scatter.src scatter_add scatter_reduce.two index_reduce "
        "masked_scatter lerp.Tensor lerp.Scalar addcmul addcdiv dot vdot mv addmv addr cross bilinear "
        "_trilinear tensordot grid_sampler binary_cross_entropy linalg_vecdot",
    ),
    Group(
        "follow_destination",
        _EVERY,
        "writes into its first argument, whose dtype stays",
        "index_put_ _index_put_impl_ index_add_ index_copy_ scatter_.src scatter_add_ scatter_reduce_.two "
        "index_reduce_ masked_scatter_ lerp_.Tensor lerp_.Scalar addmm_ addbmm_ baddbmm_ addmv_ addr_ "
        "addcmul_ addcdiv_",
    ),
)
