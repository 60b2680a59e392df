"""FFTs whose every intermediate is rounded to FP16, as native half transforms on a GPU keep them: what overflows there
overflows here. Plain radix 2, so sizes are powers of two.

Roundings alone make 1.30e-3 of relative L2 where cuFFT's transforms on an H200 make 2.21e-3 (L = 2048, uniform gates,
decaying kernel, all three transforms in FP16). With twiddles that err by ERROR the emulation makes 2.2e-3, and 3.8e-3
for the worst of some hundred rows of a white kernel and normal gates, where the H200 made 3.6e-3: so it has that error.
"""
import functools
import math

import torch

ERROR = 1.45 * 2.0**-12     # root mean square, of each part of a twiddle that is neither 1 nor i, before it is rounded


def to_half(z: torch.Tensor) -> torch.Tensor:
    """complex64 with both parts rounded to FP16; beyond its range they become infinite."""
    return torch.view_as_complex(torch.view_as_real(z).half().float())


@functools.lru_cache(maxsize=64)
def twiddles(size: int, sign: int) -> torch.Tensor:
    """exp(sign pi i n / size) as a GPU has them."""
    error = torch.randn(size, 2, generator=torch.Generator().manual_seed(size)) * ERROR
    error[0] = error[size // 2] = 0
    return to_half(torch.polar(torch.ones(size), sign * math.pi / size * torch.arange(size))
                   + torch.view_as_complex(error))


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b as FP16 does it: for each part a product, and a fused product and sum, both rounded."""
    re, im = (a.imag * b.imag).half().float(), (a.real * b.imag).half().float()
    return to_half(torch.complex(a.real * b.real - re, a.imag * b.real + im))


def fft(z: torch.Tensor, sign: int) -> torch.Tensor:
    """Unnormalised transform of the last axis, exp(sign 2 pi i n k / N), every product and sum rounded to FP16."""
    blocks = to_half(z)[..., None]
    while blocks.shape[-2] > 1:
        half, size = blocks.shape[-2] // 2, blocks.shape[-1]
        first, second = blocks[..., :half, :], blocks[..., half:, :]
        second = multiply(second, twiddles(size, sign))
        blocks = torch.cat((to_half(first + second), to_half(first - second)), -1)
    return blocks[..., 0, :]


def complex_half(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.view_as_real(z.contiguous()).half())


def widen(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.view_as_real(z).float())


def rfft(u: torch.Tensor, n: int) -> torch.Tensor:
    """torch.fft.rfft of FP16 u."""
    padded = torch.nn.functional.pad(u.float(), (0, n - u.shape[-1]))
    return complex_half(fft(padded.to(torch.complex64), -1)[..., :n // 2 + 1])


def ifft(z: torch.Tensor, norm: str) -> torch.Tensor:
    """torch.fft.ifft, unnormalised, of complex half z."""
    assert norm == "forward"
    return complex_half(fft(widen(z), +1))


def irfft(z: torch.Tensor, n: int, norm: str) -> torch.Tensor:
    """torch.fft.irfft, unnormalised, of complex half z."""
    assert norm == "forward"
    half = widen(z)
    return fft(torch.cat((half, torch.conj_physical(half[..., 1:-1]).flip(-1)), -1), +1).real.half()


def install(monkeypatch) -> None:
    """Makes torch.fft take half tensors on a CPU as it does on a GPU; other dtypes go where they went."""
    for emulated in (rfft, ifft, irfft):
        native = getattr(torch.fft, emulated.__name__)

        def either(z, *args, emulated=emulated, native=native, **options):
            half = z.dtype in (torch.float16, torch.complex32)
            return (emulated if half else native)(z, *args, **options)

        monkeypatch.setattr(torch.fft, emulated.__name__, either)
