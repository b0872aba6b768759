"""Which steps of a root are compared with each other, and how many steps of a long run are kept.

In: the elements of two steps' inputs. Out: whether they are close, and one step's time at the other's size. Guarantee:
steps of equal sizes are compared as they were timed. The running script, the store and the report use this.
"""

from __future__ import annotations

REQUIRES_GRAD = "requires_grad"  # stands in a step's signature before the numbers of the arguments that do
PAIR_WINDOW = 64  # calls between a held-out step and the routed ones that it is compared with
PAIR_STEPS = 6
# Time grows with size neither quite linearly nor by the same law in every model: over a quarter more of it that hardly
# matters, and as many neighbours are smaller as are larger.
MAX_SIZE_RATIO = 1.25
NEIGHBOURHOOD = 2 * PAIR_WINDOW  # calls that a long run keeps or lets go as a whole
THINNED_WITHIN = 8  # of a neighbourhood's routed steps one in so many stays: PAIR_STEPS of each of two shapes in turn


def is_close(elements: int, other: int) -> bool:
    """Whether inputs with so many elements cost about as much; 0 stands for unrecorded sizes."""
    return max(elements, other) <= MAX_SIZE_RATIO * min(elements, other)


def at_size(step_us: float, elements: int, wanted: int) -> float:
    """The time of a step if its inputs had had ``wanted`` elements, for close sizes."""
    return step_us if elements == wanted else step_us * wanted / elements


def held_out_one_in(one_in: int) -> int:
    """Of how many held-out steps one is kept where one in ``one_in`` routed ones is: they go by neighbourhoods only."""
    return max(1, one_in // THINNED_WITHIN)
