"""A circular convolution: the mistake of an FFT without padding."""
import torch


def solve(x, in_gate, out_gate, k):
    y = torch.fft.irfft(torch.fft.rfft((x * in_gate).float()) * torch.fft.rfft(k), n=x.shape[-1])
    return (y * out_gate).half()
