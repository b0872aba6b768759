"""Whether a CUDA graph capture of the user's script is under way.

During it, a router may only launch loaded kernels: no module is loaded, no plan changes, nothing is captured, timed or
checked. Recorded work would be replayed for ever, and a call that synchronises ends the capture. Every part that must
not act then calls this.
"""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """For the calling thread's current stream; False, at the price of a flag, where no GPU is in use."""
    try:
        return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return True  # the answer of the legacy stream while another thread records one that waits for it
