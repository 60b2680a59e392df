"""Right, but writes every result into the same memory."""
import torch

kept = {}


def solve(x, in_gate, out_gate, k):
    size = 2 * x.shape[-1]
    y = torch.fft.irfft(torch.fft.rfft((x * in_gate).float(), n=size) * torch.fft.rfft(k, n=size), n=size)
    return kept.setdefault(x.shape, torch.empty_like(x)).copy_(y[..., :x.shape[-1]] * out_gate)
