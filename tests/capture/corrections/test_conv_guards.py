"""One trace of a module with convolutions serves the batch sizes that were seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofuse.capture.corrections.conv_guards import without_batch_guards
from autofuse.capture.dynamo import capture_settings, mark_dynamic


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 8, 1)
        self.apart = nn.Conv2d(8, 8, 3, 2, 1, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apart(self.narrow(torch.relu(self.norm(self.wide(x)))))


def graphs_of(model: nn.Module, batches: list[torch.Tensor]) -> int:
    """How many graphs the batches take, each checked against eager."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for x in batches:
        with capture_settings(8):
            mark_dynamic({"x": x}, [("x", 0)])
            found = compiled(x)
        expected = model(x)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    return len(graphs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(16, 8, 3), (8, 16, 32)], ids=str)
def test_one_graph_serves_batches_above_and_below_sixteen(sizes: tuple[int, ...], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert graphs_of(Convolutions().eval(), [torch.randn(n, 3, 12, 12) for n in sizes]) == 1
    finally:
        torch.set_num_threads(before)


def test_images_channels_last_keep_their_layout() -> None:
    model = Convolutions().eval().to(memory_format=torch.channels_last)
    batches = [torch.randn(n, 3, 12, 12).to(memory_format=torch.channels_last) for n in (16, 8)]
    assert graphs_of(model, batches) >= 1


def test_torchs_own_question_is_back_afterwards() -> None:
    before = torch._C._select_conv_backend
    with pytest.raises(ZeroDivisionError), without_batch_guards():
        assert torch._C._select_conv_backend is not before
        raise ZeroDivisionError
    assert torch._C._select_conv_backend is before
