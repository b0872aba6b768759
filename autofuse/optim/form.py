"""What one optimizer step is: the algorithm, the flags that change its code, the dtype and the sizes of its tensors.

In: the arguments of torch's functional optimizers (``torch.optim.adam.adam`` and its like). Out: a `StepForm`.
Guarantee: torch-free and serialisable; hyper-parameters that are only numbers (learning rate, betas) are no part of it,
so a scheduler changes no decision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape
from autofuse.ir.validation import one_of, stored_name, stored_number
from autofuse.optim.algorithms import ALGORITHMS, Algorithm

OPTIMIZER = "optimizer"  # the key under which a request's node holds a step


# Arguments that change the code. A flag is on where the argument is true: a weight decay of 0 is off.
FLAGS = ("amsgrad", "maximize", "decoupled_weight_decay", "weight_decay", "momentum", "nesterov", "centered")
ASKED = ("", "foreach", "fused")
COUNTERS = ("host", "device")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class StepForm:
    """A step of one parameter group."""

    algorithm: str
    flags: tuple[str, ...]  # the flags that are on, in the order of FLAGS
    dtype: str  # of parameters, gradients and states
    sizes: tuple[int, ...]  # number of elements of each parameter
    asked: str = ""  # what the script asked for: "foreach", "fused", "" for torch's choice
    device: str = "cpu"  # the type of device of all tensors but the counters
    counters: str = "host"  # where the step counters are; "device" where the script asks a GPU for ``fused``

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "flags": list(self.flags),
            "dtype": self.dtype,
            "sizes": list(self.sizes),
            "asked": self.asked,
            "device": self.device,
            "counters": self.counters,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepForm:
        """A step from its JSON. Raises FusionError where it is none."""
        return cls(
            one_of(data["algorithm"], ALGORITHMS, "an optimizer"),
            tuple(one_of(flag, FLAGS, "a flag") for flag in data["flags"]),
            one_of(data["dtype"], DTYPES, "a dtype"),
            tuple(map(stored_number, data["sizes"])),
            one_of(data["asked"], ASKED, "a variant"),
            stored_name(data["device"]),
            one_of(data["counters"], COUNTERS, "a place of counters"),
        )

    @property
    def rule(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def states(self) -> tuple[str, ...]:
        """The arguments with the states that are in use."""
        return tuple(name for name, flag in self.rule.states if not flag or flag in self.flags)

    @property
    def vendors(self) -> tuple[str, ...]:
        """Torch's own implementations that may compete with the one that the script asked for."""
        if self.counters == "device":
            return ()  # all but ``fused`` would wait for each counter from the device
        usual = self.asked or ("" if self.device == "cpu" else "foreach")  # torch's own choice on a GPU
        return tuple(name for name in self.rule.vendors if name != usual)

    def cut_to(self, most: int) -> StepForm:
        """The same step on at most ``most`` elements altogether: the largest tensors are cut to one common size."""
        left, cap = most, max(self.sizes, default=0)
        for number, size in enumerate(sorted(self.sizes)):
            share = left // (len(self.sizes) - number)
            if size > share:
                cap = share
                break
            left -= size
        return replace(self, sizes=tuple(min(size, cap) for size in self.sizes))

    @property
    def fusion_id(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the form's JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The algorithm's name for people."""
        return "adamw" if "decoupled_weight_decay" in self.flags else self.algorithm

    @property
    def label(self) -> str:
        return f"af_optimizer_{self.name}_{self.fusion_id[:6]}"

    @property
    def operations(self) -> str:
        return f"{self.name} over {len(self.sizes)} tensors"

    def node(self) -> dict[str, Any]:
        """The step as a node of one operation on all elements, for lists of nodes, with the step itself added."""
        shape = SymbolicShape([sum(self.sizes)])
        spec = TensorSpec(shape, self.dtype, SymbolicShape([1]), self.device)
        inputs = tuple(NodeInput(f"i{n}", spec) for n in range(2 + len(self.states)))
        refs = tuple(ValueRef(item.name) for item in inputs)
        outputs = tuple([spec] * (1 + len(self.states)))
        step = Operation("v0", f"{OPTIMIZER}.{self.name}.default", refs, (), outputs)
        form = NodeForm(inputs, (step,), tuple(ValueRef("v0", n) for n in range(len(outputs))))
        return {**form.to_json(), OPTIMIZER: self.to_json()}


def form_of_request(node: Mapping[str, Any]) -> NodeForm | StepForm:
    """The form of a request's ``node``: a step if it holds one, else that of a fusion node. Raises FusionError."""
    return StepForm.from_json(node[OPTIMIZER]) if OPTIMIZER in node else NodeForm.from_json(dict(node))


def flags_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags that are on among a function's arguments."""
    return tuple(name for name in FLAGS if arguments.get(name))
