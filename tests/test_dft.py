"""The factors: what they transform, their symmetry, and the gain that rounding leaves."""
import math

import pytest
import torch
from glconv import dft

CPU = torch.device("cpu")
SIZES = [(64, 32), (64, 16), (32, 32), (128, 16), (16, 16)]


def transform(x, n1, n2):
    return ((dft.row_factor(n1) @ x.reshape(*x.shape[:-1], n1, n2).to(torch.complex128)) * dft.twiddle(n1, n2)
            ) @ dft.column_factor(n2)


@pytest.mark.parametrize(("n1", "n2"), SIZES)
def test_transform_is_the_weighted_dft(n1, n2):
    """U[k1, k2] is the value at k = k1 + N1*k2 of the transform modulo z^L - i, divided by sqrt(L)."""
    length = n1 * n2
    torch.manual_seed(0)
    u = torch.randn(length, dtype=torch.float64)
    weighted = torch.fft.fft(u * dft.weight(length)) / math.sqrt(length)
    assert (transform(u, n1, n2).transpose(0, 1).reshape(-1) - weighted).abs().max() < 1e-12


@pytest.mark.parametrize(("n1", "n2"), SIZES)
def test_product_is_low_plus_i_high(n1, n2):
    """Inverse of the product of two spectra: the first half of the linear convolution, plus i times the second."""
    length = n1 * n2
    torch.manual_seed(1)
    u, k = torch.randn(2, length, dtype=torch.float64)
    v = (transform(u, n1, n2) * transform(k, n1, n2)) @ dft.column_factor(n2).conj() * dft.twiddle(n1, n2).conj()
    product = (dft.row_factor(n1).conj() @ v).reshape(-1) * math.sqrt(length)
    linear = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)
    assert (product.real - linear[:length]).abs().max() < 1e-10
    assert (product.imag - linear[length:]).abs().max() < 1e-10


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_factors_are_symmetric_and_unitary(n):
    for matrix in (dft.row_factor(n), dft.column_factor(n)):
        assert torch.equal(matrix, matrix.T)
        assert (matrix @ matrix.conj().T - torch.eye(n)).abs().max() < 1e-14


@pytest.mark.parametrize(("n1", "n2"), SIZES)
def test_rounded_once_from_float64(n1, n2):
    """Every factor is its exact matrix, scaled and rounded once; the scale never makes the rounding worse."""
    rounded = dft.factors(n1, n2, CPU)
    assert all(matrix.dtype == torch.float16 and matrix.is_contiguous() for matrix in rounded)
    for (_, exact), real, imaginary in zip(dft.rounded(n1, n2), rounded[::2], rounded[1::2]):
        parts, plain = torch.complex(real.double(), imaginary.double()), torch.view_as_real(exact).half().double()
        scale = (parts * exact.conj()).real.sum() / exact.abs().square().sum()
        assert 0.7 <= scale <= 1.001
        left = (parts / scale - exact).norm() / exact.norm()
        assert left < 2.0 ** -12
        assert left <= (torch.view_as_complex(plain) - exact).norm() / exact.norm()
    assert dft.factors(n1, n2, CPU) is rounded


@pytest.mark.parametrize(("n1", "n2"), SIZES)
def test_gain_takes_the_mean_of_rounding_out(n1, n2):
    """Product of spectra through rounded factors, exact otherwise: the least-squares gain is 1, without it 3e-4 off."""
    length = n1 * n2
    torch.manual_seed(2)
    u, k = torch.randn(2, 8, length, dtype=torch.float64)
    real_imaginary = [matrix.double() for matrix in dft.factors(n1, n2, CPU)]
    f1, f2, t = (torch.complex(*pair) for pair in zip(real_imaginary[::2], real_imaginary[1::2]))

    def rounded(x):
        return ((f1 @ x.reshape(-1, n1, n2).to(f1)) * t) @ f2

    y = (f1.conj() @ ((rounded(u) * rounded(k)) @ f2.conj() * t.conj())).real.reshape(-1, length) * dft.gain(n1, n2)
    exact = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)[:, :length]
    fitted = (y * exact).sum() / (exact * exact).sum()
    assert abs(fitted - 1) < 1e-4
    scales = dft.ROW_SCALES[n1] * dft.COLUMN_SCALES[n2]
    assert dft.gain(n1, n2) == pytest.approx(math.sqrt(length) / scales ** 3, rel=2e-3)
