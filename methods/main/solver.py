"""The submission: solve(x, in_gate, out_gate, k), over the package `glconv` beside this file."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))    # works from a copy of this folder alone

from glconv import describe, gated_causal_conv

__all__ = ["describe", "solve"]


def solve(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """y = out_gate * causal_conv(x * in_gate, k): x, gates, y FP16 [batch, streams, heads, length], k FP32 [streams,
    heads, length]. Raises TypeError or ValueError for anything else; see `gated_causal_conv`."""
    return gated_causal_conv(x, in_gate, out_gate, k)
