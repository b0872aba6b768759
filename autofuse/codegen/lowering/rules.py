"""The lowering table: overload -> rule. One row for every fusible overload of `ir.optable`.

In: the name of an overload. Out: its rule. A test holds this table and the operator table together. Nodes on a GPU have
the rows of `rules_cuda` in place of the general ones.
"""

from __future__ import annotations

from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_activations import ACTIVATION_RULES
from autofuse.codegen.lowering.rules_bessel import BESSEL_RULES
from autofuse.codegen.lowering.rules_border import BORDER_RULES
from autofuse.codegen.lowering.rules_copy import COPY_RULES
from autofuse.codegen.lowering.rules_cuda import CUDA_RULES
from autofuse.codegen.lowering.rules_diagonal import DIAGONAL_RULES
from autofuse.codegen.lowering.rules_functions import FUNCTION_RULES
from autofuse.codegen.lowering.rules_glu import GLU_RULES
from autofuse.codegen.lowering.rules_index import INDEX_RULES
from autofuse.codegen.lowering.rules_indexed import INDEXED_RULES
from autofuse.codegen.lowering.rules_loss import LOSS_RULES
from autofuse.codegen.lowering.rules_memory import MEMORY_RULES
from autofuse.codegen.lowering.rules_norm import NORM_RULES
from autofuse.codegen.lowering.rules_places import PLACE_RULES
from autofuse.codegen.lowering.rules_pointwise import POINTWISE_RULES
from autofuse.codegen.lowering.rules_pool import POOL_RULES
from autofuse.codegen.lowering.rules_pool_backward import POOL_BACKWARD_RULES
from autofuse.codegen.lowering.rules_random import RANDOM_RULES
from autofuse.codegen.lowering.rules_reduce import REDUCE_RULES
from autofuse.codegen.lowering.rules_scan import SCAN_RULES
from autofuse.codegen.lowering.rules_search import SEARCH_RULES
from autofuse.codegen.lowering.rules_shift import SHIFT_RULES
from autofuse.codegen.lowering.rules_special import SPECIAL_RULES
from autofuse.codegen.lowering.rules_write import WRITE_RULES
from autofuse.ir.operation import NodeForm

RULES: dict[str, Rule] = {
    **POINTWISE_RULES, **FUNCTION_RULES, **ACTIVATION_RULES, **INDEX_RULES, **MEMORY_RULES, **SHIFT_RULES,
    **REDUCE_RULES, **NORM_RULES, **LOSS_RULES, **RANDOM_RULES, **POOL_RULES,
    **COPY_RULES, **DIAGONAL_RULES, **BORDER_RULES, **GLU_RULES,
    **INDEXED_RULES,
    **SPECIAL_RULES, **BESSEL_RULES,
    **POOL_BACKWARD_RULES,
    **WRITE_RULES,
    **PLACE_RULES,
    **SEARCH_RULES,
    **SCAN_RULES,
}  # fmt: skip

_ON_GPUS = {**RULES, **CUDA_RULES}


def rules_of(form: NodeForm) -> dict[str, Rule]:
    """The table for a node's device."""
    return RULES if form.spec(form.outputs[0]).device == "cpu" else _ON_GPUS
