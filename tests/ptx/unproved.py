"""What SentryWard does not prove of compiled kernels, by its reason. Both lists may only shrink.

Named as in ``benchmarks/results/gpu_static.json``: the case, its dtype, and whether it was made to have two passes.
"""

# Lanes that hold one value all store it into shared memory, in conversions of layouts. The prover does not see values,
# `ptx.schedules` follows them: here they are not the same instructions of the same inputs (attention's sums of a row
# contract another product, an argmax compares in another order), or a branch or the guard of a load depends on data.
# Our executor has seen equal ones in each.
DUPLICATES = (
    "argmax_middle float32", "attention biased float32", "attention causal float32",
    "attention from_projection float32", "attention one_query float32", "attention padding float32",
    "attention plain float32", "attention rounded float32", "attention scaled float32", "attention unbatched float32",
    "gradients_of_a_broadcast float32", "gradients_of_a_broadcast float32, in two passes", "nll_weighted float32",
    "nll_weighted float32, in two passes", "product one_column float32",
)  # fmt: skip

UNPROVED = {
    # An address depends on data.
    "allocation_alias_relation_unknown": (
        "bucketize float32", "cross_entropy_none float32", "masked_index float32", "reflection_pad float32",
        "reflection_pad_row float32",
    ),
    # A branch depends on data: a check of an index, a loop inside a special function.
    "control_predicate_not_static": (
        "attention capped float32", "bce float32", "bce float32, in two passes", "bce_followed float32",
        "bce_followed float32, in two passes", "bce_logits float32", "bce_logits float32, in two passes",
        "bce_logits_weights float32", "bce_logits_weights float32, in two passes", "bce_weight float32",
        "bce_weight float32, in two passes", "bessel_j float32", "bias_gradient float32",
        "bias_gradient float32, in two passes", "broadcast_both_ways float32", "cross_entropy float32",
        "cross_entropy float32, in two passes", "cross_entropy_sum float32",
        "cross_entropy_sum float32, in two passes", "digamma float32", "distance float32",
        "distance float32, in two passes", "embedding float32", "embedding_beside float32", "embedding_norm float32",
        "embedding_softmax float32", "floor_divide float32", "fmod float32", "followed_class_loss float32",
        "followed_class_loss float32, in two passes", "followed_rows_then_all float32",
        "followed_rows_then_all float32, in two passes", "gamma_functions float32", "gather_clamped float32",
        "gather_copied float32", "gather_first float32", "gather_last float32", "gather_smaller float32",
        "gather_sum float32", "hypot_nextafter float32", "image_loss float32", "image_loss float32, in two passes",
        "image_loss_weighted float32", "image_loss_weighted float32, in two passes", "index_apart float32",
        "index_broadcast float32", "index_columns float32", "index_of_one float32", "index_of_values float32",
        "index_pairs float32", "index_rows float32", "index_select float32", "index_select_last float32",
        "index_single float32", "index_transposed float32", "ldexp float32", "logcumsumexp float32",
        "nests_of_parts float32", "norms float32", "pow_base float32", "pow_scalars float32", "pow_tensor float32",
        "relative_bias float32", "remainder float32", "remainder_tensor float32", "rounded_quotients float32",
        "soft_margin float32", "soft_margin float32, in two passes", "take float32", "take_along_dim float32",
        "unary_cos float32", "unary_sin float32", "unary_sinc float32", "unary_tan float32",
        "upsample_kept_places float32", "upsample_nearest float32",
    ),
    # The prover's parser refuses a function that is declared before it is defined (`pow` in float64).
    "invalid_ptx_syntax": (
        "norm_rows float32", "polygamma float32", "zeta float32", "zeta_scalars float32",
    ),
    # The prover needs more than 15 s.
    "timeout": (
        "attention wide float32", "reflection_pad_volume float32",
    ),
}  # fmt: skip
