"""The runner of graphs (`native_source`) in this process: compiled, loaded, introduced to torch, and proved.

In: a C compiler's binary. Out: a `Runner`, which makes Python functions of programs; None where this torch or this
Python has not what the runner needs. Guarantee: no runner is used that has not given Python's results in a proof of
all of its steps.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from autofuse.codegen.c.build import Toolchain, compile_key, compile_source
from autofuse.codegen.c.load import method_of, new_builtin, open_library
from autofuse.hidden_thread import HiddenThread
from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.wrapper.native_build import NativeBuilder, NativeProgram
from autofuse.wrapper.native_source import FUNCTIONS, SOURCE

NAME = "af_graph_runner"
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-std=gnu11", "-w")
_METH_O = 0x0008
_DTYPES = ("float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
_PRODUCTS = ("float32", "float64", "float16", "bfloat16")

Run = Callable[[list[Any]], Any]  # takes the inputs out of the list; None where it did not run, and took none
# Takes lists of equally many tensors: gradients, their parameters, others. Gives int64 words: for each tensor but the
# gradients its identity, address, elements, dtype, dims and strides; then the gradients' addresses. None where one is
# no plain strided tensor on the CPU, or a gradient has not the elements, the dtype and the strides of its parameter.
Look = Callable[[tuple[list[Any], ...]], bytes | None]
# Takes a list of parameters and the dict of their states. Gives lists of the parameters that have a gradient, of their
# gradients, and of their states by name. None where a parameter or a gradient is no plain strided tensor of a real
# dtype, or a state is not made.
Collect = Callable[[tuple[list[Any], dict[Any, Any]]], tuple[list[Any], ...] | None]


def runner_key(toolchain: Toolchain) -> CompileKey:
    """What the runner's binary depends on; the store keeps it like a kernel."""
    return compile_key(SOURCE, toolchain, FLAGS)


def compile_runner(toolchain: Toolchain) -> KernelRecord:
    """Raises CompilerError."""
    return KernelRecord(runner_key(toolchain), NAME, SOURCE, compile_source(SOURCE, toolchain, FLAGS))


class Runner:
    """Makes functions of programs."""

    def __init__(self, library: ctypes.CDLL, dtypes: Mapping[str, int]) -> None:
        self.dtypes = dtypes
        self._library = library
        self._entry = self._method(NAME, library.af_entry, b"(inputs) -> results")
        self._collect = self._method("af_collect", library.af_collect, b"((parameters, states)) -> lists")
        look = self._method("af_look", library.af_look, b"(lists of tensors) -> words")
        self.look: Look = new_builtin(look, None, None)

    def make(self, program: NativeProgram) -> Run:
        made: Run = new_builtin(self._entry, tuple(program), None)
        return made

    def collect(self, *states: str) -> Collect:
        """A function that collects these states."""
        made: Collect = new_builtin(self._collect, ("grad", *states), None)
        return made

    @staticmethod
    def _method(name: str, function: Any, doc: bytes) -> int:
        """The address of the record of a function of the library."""
        return ctypes.addressof(method_of(name, ctypes.cast(function, ctypes.c_void_p).value, _METH_O, doc))


def load_runner(binary: bytes) -> Runner:
    """Raises OSError where it cannot be loaded, AttributeError where torch lacks a name, ValueError where it errs."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("expected CPython with its global lock")
    names = ctypes.CDLL(torch._C.__file__)  # a name is looked for in all libraries that it needs
    functions = [ctypes.cast(getattr(names, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    dtypes = {name: int(getattr(names, f"aoti_torch_dtype_{name}")()) for name in _DTYPES}
    products = sum(1 << dtypes[name] for name in _PRODUCTS)
    library = open_library(binary, NAME)
    plain = sum(1 << number for number in dtypes.values())
    own = [_payload(), id(torch.Tensor), id(torch.nn.Parameter), _below_autograd(), products, plain]
    table = (ctypes.c_int64 * (len(functions) + len(own)))(*functions, *own)
    library.af_setup(table)
    runner = Runner(library, dtypes)
    _prove(runner)
    _prove_look(runner)
    _prove_collect(runner)
    return runner


def _payload() -> int:
    """Where an object of Python has its tensor. Raises ValueError where that is not found."""
    found = None
    for tensor in (torch.empty(2), torch.empty(3, dtype=torch.int64), torch.nn.Parameter(torch.empty(1))):
        words = (ctypes.c_void_p * (torch._C.TensorBase.__basicsize__ // 8)).from_address(id(tensor))
        places = {index * 8 for index, word in enumerate(words) if index > 1 and word == tensor._cdata}
        found = places if found is None else found & places
    if not found or len(found) > 1:
        raise ValueError(f"expected one place of a tensor in its object, found {sorted(found or ())}")
    return found.pop()


def _below_autograd() -> int:
    """The dispatch keys that a graph is run without. Of a thread without any such keys of its own."""
    found: list[int] = []

    def look() -> None:
        before = torch._C._dispatch_tls_local_exclude_set().raw_repr()
        with torch._C._AutoDispatchBelowADInplaceOrView():
            found.append(torch._C._dispatch_tls_local_exclude_set().raw_repr() & ~before)

    thread = HiddenThread(look)
    thread.start()
    thread.join()
    (keys,) = found
    return keys - (1 << 64) if keys >> 63 else keys


_runner: list[Runner] = []  # of this process, the newest last; empty until `install`


def install(runner: Runner | None) -> None:
    """Run settled plans with this runner from now on; None: in Python."""
    _runner[:] = [] if runner is None else [runner]


def installed() -> Runner | None:
    """The runner of this process, if it has one."""
    return _runner[-1] if _runner else None


class _Step(NamedTuple):
    target: str
    function: Callable[..., Any]
    inputs: list[int]
    numbers: tuple[Any, ...] = ()


def _prove(runner: Runner) -> None:
    """Raises ValueError where a program of all steps does not give what Python gives, on two layouts of its input."""
    builder = NativeBuilder(runner.dtypes)
    builder.take([True, True, True])
    steps = [
        _Step("aten.t.default", lambda w: w.t(), [1]),
        _Step("aten.addmm.default", torch.addmm, [2, 0, 3]),
        _Step("aten.mm.default", torch.mm, [0, 3]),
        _Step("aten.view.default", lambda x: x.view(2, 3, -1), [4], ([2, 3, -1],)),
        _Step("aten.transpose.int", lambda x: x.transpose(-2, 0), [6], (-2, 0)),
        _Step("aten.permute.default", lambda x: x.permute(2, 0, -2), [7], ([2, 0, -2],)),
        _Step("aten.unsqueeze.default", lambda x: x.unsqueeze(-1), [8], (-1,)),
        _Step("aten.expand.default", lambda x: x.expand(2, -1, -1, -1, 3), [9], ([2, -1, -1, -1, 3],)),
        _Step("aten.select.int", lambda x: x.select(1, -1), [10], (1, -1)),
        _Step("aten.bmm.default", torch.bmm, [7, 7]),
        _Step("aten.detach.default", lambda x: x.detach(), [12]),
        _Step("", lambda x: x.sum(0), [13]),
        _Step("aten.view.default", lambda x: x.flatten(), [8], ([12],)),  # no view
    ]
    in_python = [step.function for step in steps[-2:]]

    def refuse(*inputs: object) -> None:
        raise ValueError("expected a step that is done in C, found one that is left to Python")

    builder.below()
    for number, step in enumerate(steps):
        function = step.function if step.function in in_python else refuse
        builder.operator(step.target, function, step.inputs, 3 + number, step.numbers)
    builder.result(range(3, 3 + len(steps)), False)
    run = runner.make(builder.program())
    values = torch.arange(-14.0, 14.0).sin()
    for x in (values[:24].view(6, 4), values[:24].view(4, 6).t(), torch.nn.Parameter(values[4:].view(6, 4))):
        with torch.no_grad():
            given = [x, values[:8].view(2, 4), values[:2]]
            found, known = run([*given]), [*given]
            for step in steps:
                known.append(step.function(*(known[i] for i in step.inputs)))
        for one, other in zip(found, known[3:], strict=True):
            if one.stride() != other.stride() or one.dtype != other.dtype or not torch.equal(one, other):
                raise ValueError("expected Python's results from the runner of graphs, found others")


def _prove_look(runner: Runner) -> None:
    """Raises ValueError where tensors are not told apart as they are."""
    single, double = ({"dtype": dtype, "device": "cpu"} for dtype in (torch.float32, torch.float64))
    params = [torch.nn.Parameter(torch.empty(4, 3, **single).t()), torch.nn.Parameter(torch.empty(5, **double))]
    grads, states = ([torch.empty_like(param) for param in params] for _ in range(2))
    known: list[int] = []
    for tensor in (*params, *states):
        dtype = runner.dtypes[str(tensor.dtype).removeprefix("torch.")]
        known += id(tensor), tensor.data_ptr(), tensor.numel(), dtype, tensor.dim(), *tensor.stride()
    known += [grad.data_ptr() for grad in grads]
    found = runner.look((grads, params, states))
    others = (params[0], grads[0].contiguous(), grads[0].double(), grads[0][:2], grads[0].to_sparse(), None)
    wrong = [runner.look(([other, grads[1]], params)) for other in others]
    unequal: tuple[Any, ...] = ((grads,), (grads, params[:1]), (grads, (*params,)))
    wrong += [*map(runner.look, unequal)]
    if found is None or array("q", found).tolist() != known or any(answer is not None for answer in wrong):
        raise ValueError("expected words for plain tensors alone, found others")


def _prove_collect(runner: Runner) -> None:
    """Raises ValueError where lists are not those that Python collects."""
    collect = runner.collect("average", "step")
    params = [torch.nn.Parameter(torch.empty(n, dtype=torch.float32, device="cpu")) for n in range(4)]
    for param in params[1:]:
        param.grad = torch.empty_like(param)
    states = {param: {"step": param.detach(), "average": param.clone()} for param in (params[2], *params)}
    having = params[1:]
    columns = [[states[param][name] for param in having] for name in ("average", "step")]
    known = (having, [param.grad for param in having], *columns)
    given = (
        (params, states),
        ([*params, torch.nn.Parameter(torch.empty(1, dtype=torch.complex64, device="cpu"))], states),
        (params, {params[1]: states[params[1]]}),
        (params, {**states, params[3]: {"step": 1}}),
    )
    found, *others = map(collect, given)
    if found is None or any(answer is not None for answer in others):
        raise ValueError("expected lists for plain tensors alone, found others")
    if [[*map(id, listed)] for listed in found] != [[*map(id, listed)] for listed in known]:
        raise ValueError("expected the tensors that Python collects, found others")
