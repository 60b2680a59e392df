"""Right, and does everything twice."""
import torch


def solve(x, in_gate, out_gate, k):
    size = 2 * x.shape[-1]
    for _ in range(2):
        y = torch.fft.irfft(torch.fft.rfft((x * in_gate).float(), n=size) * torch.fft.rfft(k, n=size), n=size)
        y = (y[..., :x.shape[-1]] * out_gate).half()
    return y
