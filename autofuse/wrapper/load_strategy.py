"""Reads a strategy from the bytes in the store.

In: bytes of `strategies.bundle.pack`, and a function that loads one kernel. Out: a `LoadedStrategy`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from autofuse.strategies.bundle import MARK, is_bundle
from autofuse.strategies.strategy import Strategy
from autofuse.wrapper.node_call import Entry
from autofuse.wrapper.strategy_call import LoadedStrategy


def unpack(binary: bytes, load: Callable[[str, str, bytes], Entry]) -> LoadedStrategy:
    """The strategy, ready to be called; ``load(digest, name, binary)`` gives the entry of one kernel.

    A part may be a strategy itself: a node of two kernels.
    """

    def load_part(digest: str, name: str, binary: bytes) -> Entry:
        return unpack(binary, load) if is_bundle(binary) else load(digest, name, binary)

    data: dict[str, Any] = json.loads(binary[len(MARK) :])
    entries = tuple(load_part(digest, name, base64.b64decode(text)) for digest, name, text in data["kernels"])
    return LoadedStrategy(Strategy.from_json(data["way"]), entries)
