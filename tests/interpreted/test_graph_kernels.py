"""The ladder's own Triton kernels against their CPU implementations: through the interpreter where TRITON_INTERPRET=1
(tests/test_graphs.py starts this file so), natively on a CUDA device otherwise."""
import os

import pytest
import torch

from graphs import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(),
                                reason="needs TRITON_INTERPRET=1 or a CUDA device")
SHAPES = ((2, 1, 1), (4, 3, 5), (6, 2, 70))     # batch, channels, length


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty and empty_like give NaN, so that an element a kernel does not write cannot pass."""
    def poisoning(native):
        def empty(*args, **options):
            tensor = native(*args, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


@pytest.mark.parametrize("channel_major", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_multiply(poisoned, shape, channel_major):
    from graphs.kernels import launch_multiply

    batch, channels, length = shape
    axes = (channels, batch) if channel_major else (batch, channels)
    u, k = torch.randn(*axes, length + 1, 2), torch.randn(channels, length + 1, 2)
    exact = ops._multiply_cpu(torch.view_as_complex(u), torch.view_as_complex(k), channel_major, 0, 0)
    exact = torch.view_as_real(exact)
    product = torch.empty_like(u, device=DEVICE)
    launch_multiply(u.to(DEVICE), k.to(DEVICE), product, channel_major, 64, 4)
    torch.testing.assert_close(product.cpu(), exact)
    in_place = u.to(DEVICE)
    launch_multiply(in_place, k.to(DEVICE), in_place, channel_major, 64, 4)
    torch.testing.assert_close(in_place.cpu(), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_gate_pairs(poisoned, shape, dtype):
    from graphs.kernels import launch_gate

    x, in_gate = torch.randn(shape).half(), torch.randn(shape).half()
    packed = launch_gate(x.to(DEVICE), in_gate.to(DEVICE), dtype, tile=64)
    torch.testing.assert_close(packed.cpu(), ops._gate_pairs_cpu(x, in_gate, dtype), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_pairs(poisoned, shape, odd):
    from graphs.kernels import launch_unpack

    batch, channels, length = shape
    packed = torch.randn(batch // 2, channels, 2 * length, 2)
    out_gate = torch.randn(batch - odd, channels, length).half()
    y = launch_unpack(packed.to(DEVICE), out_gate.to(DEVICE), 0.25, tile=64)
    torch.testing.assert_close(y.cpu(), ops._unpack_pairs_cpu(packed, out_gate, 0.25), rtol=1e-3, atol=1e-4)
