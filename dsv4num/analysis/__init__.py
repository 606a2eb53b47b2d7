"""What a format costs: errors measured, bounds proven. Needs SciPy; defines no byte.

`error` measures, `bounds` states what cannot be exceeded and how often something is to be expected,
`scale_rules` has the ways in which other writers choose a scale, `pooling` the arithmetic that the
compressor could have used instead of the one in SPEC 1. The notebooks import from here.
"""

from dsv4num.analysis.bounds import (
    bf16_step_rate,
    clip_probability,
    code_change_rate,
    double_rounding_rate,
    element_bound,
    exp_by_exp2_bound,
    group_bound,
    scaled_range,
    sum_bound,
)
from dsv4num.analysis.error import (
    BiasTest,
    bias_test,
    error_in_ulp,
    rate_interval,
    relative_error,
    sqnr,
    ulp_distance,
)
from dsv4num.analysis.pooling import exp_by_exp2, pool, pool_exact, rms_norm_by_rsqrt, running_sum
from dsv4num.analysis.scale_rules import (
    ROUNDINGS,
    encode_scale_by,
    exponent_by_log2,
    quantize_by,
    round_trip,
    shared_exponent,
)

__all__ = [
    "ROUNDINGS",
    "BiasTest",
    "bf16_step_rate",
    "bias_test",
    "clip_probability",
    "code_change_rate",
    "double_rounding_rate",
    "element_bound",
    "encode_scale_by",
    "error_in_ulp",
    "exp_by_exp2",
    "exp_by_exp2_bound",
    "exponent_by_log2",
    "group_bound",
    "pool",
    "pool_exact",
    "quantize_by",
    "rate_interval",
    "relative_error",
    "rms_norm_by_rsqrt",
    "round_trip",
    "running_sum",
    "scaled_range",
    "shared_exponent",
    "sqnr",
    "sum_bound",
    "ulp_distance",
]
