"""Right, but gates x in place."""
import torch


def solve(x, in_gate, out_gate, k):
    size = 2 * x.shape[-1]
    y = torch.fft.irfft(torch.fft.rfft(x.mul_(in_gate).float(), n=size) * torch.fft.rfft(k, n=size), n=size)
    return (y[..., :x.shape[-1]] * out_gate).half()
