"""Which operators the device has, and what is particular about some. Data alone.

Source: the names that the public pre-release sources of torch-neuronx (April 2026) register for PrivateUse1. What is
not here falls back to CPU, there as here.
"""

__all__ = ["KINDS", "REGISTERED", "REGISTERED_OUTSIDE_OUR_REACH", "Kind"]

from enum import IntFlag


class Kind(IntFlag):
    """kernels.h has the same numbers."""

    ARITHMETIC = 1
    SORT = 2
    BOUNDS_CHECKED = 4
    RANDOM = 8
    DATA_DEPENDENT = 16
    METADATA = 32
    GROUPED_MM = 64
    HOST_ROUND_TRIP = 128
    REMEMBERED = 256
    HOST_INDICES = 512


REGISTERED = frozenset(
    [
        "_foreach_add",
        "_foreach_div",
        "_foreach_mul",
        "_foreach_norm",
        "_foreach_sub",
        "_fused_adamw",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_grouped_mm",
        "_index_put_impl",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "_to_copy",
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "addmm",
        "addmv",
        "all",
        "amax",
        "amin",
        "any",
        "arange",
        "argsort",
        "atleast_2d",
        "batch_norm_backward_elemt",
        "batch_norm_backward_reduce",
        "batch_norm_elemt",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_stats",
        "bitwise_and",
        "bitwise_left_shift",
        "bitwise_not",
        "bitwise_or",
        "bitwise_right_shift",
        "bitwise_xor",
        "bmm",
        "cat",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "convolution",
        "convolution_backward",
        "cos",
        "cumsum",
        "div",
        "dot",
        "embedding",
        "embedding_dense_backward",
        "eq",
        "erf",
        "erfinv",
        "exp",
        "eye",
        "fill",
        "flip",
        "floor_divide",
        "full",
        "gather",
        "ge",
        "gelu",
        "gelu_backward",
        "gt",
        "histc",
        "index",
        "index_add",
        "index_copy",
        "index_select",
        "index_select_backward",
        "isfinite",
        "isinf",
        "isnan",
        "isneginf",
        "le",
        "lerp",
        "linalg_vector_norm",
        "linear",
        "linear_backward",
        "log",
        "log_softmax",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "masked_select",
        "max",
        "mean",
        "min",
        "mm",
        "mul",
        "mv",
        "native_dropout",
        "native_dropout_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "ne",
        "neg",
        "nll_loss_backward",
        "nll_loss_forward",
        "nonzero",
        "nonzero_static",
        "one_hot",
        "ones",
        "ones_like",
        "pow",
        "reciprocal",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "relu",
        "remainder",
        "repeat",
        "repeat_interleave",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "resize",
        "rsqrt",
        "scalar_tensor",
        "scatter",
        "scatter_add",
        "select_backward",
        "sgn",
        "sigmoid",
        "sigmoid_backward",
        "sign",
        "signbit",
        "silu",
        "silu_backward",
        "sin",
        "slice_backward",
        "softmax",
        "softplus",
        "softplus_backward",
        "sqrt",
        "stack",
        "sub",
        "sum",
        "tanh",
        "tanh_backward",
        "threshold",
        "threshold_backward",
        "topk",
        "tril",
        "triu",
        "trunc",
        "value_selecting_reduction_backward",
        "vstack",
        "where",
        "zero",
        "zeros",
    ]
)
"""Names without overload and without the underscore of in-place variants."""

REGISTERED_OUTSIDE_OUR_REACH = "composite"
"""torch-neuronx also registers some operators that torch splits into others before a device sees them (linear, softmax,
contiguous, one_hot...). Here they stay split, since CPU, whose kernels run, has none of them whole."""

_KINDS: dict[Kind, str] = {
    Kind.ARITHMETIC: """
        add sub rsub mul div floor_divide remainder pow neg abs sum cumsum prod addcmul addcdiv mm bmm addmm dot mv
        bitwise_left_shift bitwise_right_shift _foreach_add _foreach_sub _foreach_mul scatter_add index_add clamp
    """,
    Kind.SORT: "sort argsort msort",
    Kind.BOUNDS_CHECKED: """
        index_select index index_put _index_put_impl scatter scatter_add scatter_reduce index_add index_copy gather
    """,
    Kind.RANDOM: """
        normal uniform random bernoulli exponential geometric cauchy log_normal randperm multinomial native_dropout
        rand_like randn_like randint_like poisson rrelu_with_noise
    """,
    Kind.DATA_DEPENDENT: """
        nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount equal repeat_interleave
    """,
    Kind.METADATA: """
        alias view_as_real view_as_complex resize is_set_to _has_compatible_shallow_copy_type diagonal
        _conj _neg_view lift lift_fresh
    """,
    Kind.GROUPED_MM: "_grouped_mm",
    Kind.HOST_ROUND_TRIP: "select_backward",
    Kind.REMEMBERED: """
        index index_select gather embedding sort topk max min cumsum _grouped_mm masked_select scatter scatter_add
    """,
    Kind.HOST_INDICES: "index index_put _index_put_impl",
}


def _by_name() -> dict[str, int]:
    table: dict[str, int] = {}
    for kind, names in _KINDS.items():
        for name in names.split():
            table[name] = table.get(name, 0) | kind
    return {f"aten::{name}": int(bits) for name, bits in table.items()}


KINDS = _by_name()
