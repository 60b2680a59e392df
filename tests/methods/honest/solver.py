"""Right; prints on standard output, and fails where the environment of the judge reaches it."""
import os

import torch


def solve(x, in_gate, out_gate, k):
    print("this must not disturb the judge")
    assert "SOME_TOKEN" not in os.environ
    size = 2 * x.shape[-1]
    y = torch.fft.irfft(torch.fft.rfft((x * in_gate).float(), n=size) * torch.fft.rfft(k, n=size), n=size)
    return (y[..., :x.shape[-1]] * out_gate).half()
