"""An index out of its bounds on a GPU: the kernel asserts on the device, as eager's do, and reads nothing there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.key import options_for
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import NOTHING_ASSUMED, TritonSource
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import make_config
from autofuse.tuner.triton_compiler import TritonCompiler
from tests.cases import CASES
from tests.codegen.test_indexed import IDS, READS, X
from tests.tracing import trace

T = torch.Tensor
CONFIGS = {
    "default": None,
    "loops": make_config({"BLOCK_COLS": 4, "BLOCK_ROWS": 2, "persistent": False, "PROGRAMS": 2, "TILE": 4}),
}


def source_of(form: NodeForm, config: str = "default", size: int = 9) -> TritonSource:
    kernel, values = lower(form), dict.fromkeys(form.symbols, size)
    return print_triton(kernel, CONFIGS[config] or default_config(triton_knobs(kernel, values, values)))


def is_refused(call: object, *inputs: T) -> bool:
    try:
        call(*inputs)  # type: ignore[operator]
    except (IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", READS)
def test_the_device_stops_where_eager_raises(name: str, config: str) -> None:
    """Sizes are no multiples of a tile's: what lies beyond the tensor's end must not be taken for an index."""
    function, enter = READS[name]
    form = trace(function, (X, enter(IDS)), dynamic=False)
    entry = load_interpreted(source_of(form, config))
    for bad in (None, 4, 5, 7, 35, -1, -5, -6, -36, 2**31 + 1, None):
        ids = IDS.clone()
        if bad is not None:
            ids[2] = bad
        ids = enter(ids)
        out = torch.full(function(X, enter(IDS)).shape, torch.nan)
        if is_refused(function, X, ids):
            with pytest.raises(Exception, match="index out of bounds"):
                entry({}, [X, ids, out])
        else:
            entry({}, [X, ids, out])
            torch.testing.assert_close(out, function(X, ids))


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_the_assertion_is_compiled(compiler: TritonCompiler, target: str) -> None:
    """Triton leaves assertions out unless it is asked for them; kernels without any are compiled as before."""
    checked, plain = source_of(CASES["embedding"].form()), source_of(CASES["add_bias_gelu"].form())
    assert options_for(checked, target)["debug"] and not options_for(plain, target)["debug"]
    for source in (checked, plain):
        (image,) = compiler.compile(source, target, [NOTHING_ASSUMED]).images
        assert image.resources.spill_bytes == 0
        if target.startswith("cuda"):
            assert (b"__assertfail" in image.image) == (source is checked)
