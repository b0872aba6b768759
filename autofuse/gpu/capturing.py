"""Whether the user's script records a CUDA graph right now.

While it does, a router may launch what is loaded and nothing else: no module is loaded, no plan changes, nothing is
captured, timed or checked. What is recorded would replay for ever, and calls that synchronise end a recording.
Every part that must hold still asks here.
"""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """For the calling thread's current stream; False, at the price of a flag, where no GPU is in use."""
    try:
        return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return True  # the answer of the legacy stream while another thread records one that waits for it
