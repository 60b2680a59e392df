"""Operators of single ladder steps: definition, CUDA implementation in Triton, CPU implementation, fake."""
import torch
from glconv import ops  # noqa: F401  (registers glconv's own operators, which the graphs use beside these)

LIBRARY = torch.library.Library("glconv_graphs", "DEF")
Tensor = torch.Tensor

for schema in (
        "multiply_spectra(Tensor spectra, Tensor kernel, bool channel_major, int tile, int warps) -> Tensor",
        "multiplied_spectra_of(Tensor u, Tensor kernel, bool channel_major, int tile, int warps) -> Tensor",
        "gate_pairs(Tensor x, Tensor in_gate, ScalarType dtype) -> Tensor",
        "unpack_pairs(Tensor packed, Tensor out_gate, float factor) -> Tensor"):
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


# Spectra of the two products are complex, [batch, channels, bins], or [channels, batch, bins] when channel-major; the
# kernel's [channels, bins].

@torch.library.impl(LIBRARY, "multiply_spectra", "CUDA")
def _multiply_cuda(spectra: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    product = torch.empty_like(spectra, memory_format=torch.contiguous_format)
    _launch(spectra.contiguous(), kernel, product, channel_major, tile, warps)
    return product


@torch.library.impl(LIBRARY, "multiply_spectra", "CPU")
def _multiply_cpu(spectra: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    return spectra * (kernel[:, None] if channel_major else kernel)


@torch.library.register_fake("glconv_graphs::multiply_spectra", lib=LIBRARY)
def _multiply_fake(spectra: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    return spectra.new_empty(spectra.shape)


@torch.library.impl(LIBRARY, "multiplied_spectra_of", "CUDA")
def _multiplied_of_cuda(u: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    """rfft of u [.., .., L] of size 2L and the product in place of it. One operator, for Inductor (2.13) cannot
    functionalise a mutation of a complex tensor."""
    spectra = torch.fft.rfft(u, n=2 * u.shape[-1])
    _launch(spectra, kernel, spectra, channel_major, tile, warps)
    return spectra


@torch.library.impl(LIBRARY, "multiplied_spectra_of", "CPU")
def _multiplied_of_cpu(u: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    return torch.fft.rfft(u, n=2 * u.shape[-1]).mul_(kernel[:, None] if channel_major else kernel)


@torch.library.register_fake("glconv_graphs::multiplied_spectra_of", lib=LIBRARY)
def _multiplied_of_fake(u: Tensor, kernel: Tensor, channel_major: bool, tile: int, warps: int) -> Tensor:
    return u.new_empty((*u.shape[:-1], u.shape[-1] + 1), dtype=kernel.dtype)


def _launch(spectra: Tensor, kernel: Tensor, product: Tensor, channel_major: bool, tile: int, warps: int) -> None:
    from .kernels import launch_multiply

    u, k, product = (torch.view_as_real(t) for t in (spectra, kernel.contiguous(), product))
    with torch.cuda.device(spectra.device):
        launch_multiply(u, k, product, channel_major, tile, warps)


@torch.library.impl(LIBRARY, "gate_pairs", "CUDA")
def _gate_pairs_cuda(x: Tensor, in_gate: Tensor, dtype: torch.dtype) -> Tensor:
    from .kernels import launch_gate

    with torch.cuda.device(x.device):
        return launch_gate(x.contiguous(), in_gate.contiguous(), dtype)


@torch.library.impl(LIBRARY, "gate_pairs", "CPU")
def _gate_pairs_cpu(x: Tensor, in_gate: Tensor, dtype: torch.dtype) -> Tensor:
    """x, in_gate [batch, channels, L], batch even -> [batch / 2, channels, 2L, 2], zeros past L."""
    u = (x * in_gate).to(dtype)
    return torch.nn.functional.pad(torch.stack((u[0::2], u[1::2]), -1), (0, 0, 0, x.shape[-1]))


@torch.library.register_fake("glconv_graphs::gate_pairs", lib=LIBRARY)
def _gate_pairs_fake(x: Tensor, in_gate: Tensor, dtype: torch.dtype) -> Tensor:
    batch, channels, length = x.shape
    return x.new_empty((batch // 2, channels, 2 * length, 2), dtype=dtype)


@torch.library.impl(LIBRARY, "unpack_pairs", "CUDA")
def _unpack_pairs_cuda(packed: Tensor, out_gate: Tensor, factor: float) -> Tensor:
    from .kernels import launch_unpack

    with torch.cuda.device(packed.device):
        return launch_unpack(packed.contiguous(), out_gate.contiguous(), factor)


@torch.library.impl(LIBRARY, "unpack_pairs", "CPU")
def _unpack_pairs_cpu(packed: Tensor, out_gate: Tensor, factor: float) -> Tensor:
    """packed [pairs, channels, 2L, 2], out_gate [batch, channels, L], batch 2 pairs or one less -> y as out_gate."""
    batch, channels, length = out_gate.shape
    y = packed[:, :, :length].permute(0, 3, 1, 2).reshape(-1, channels, length)[:batch]
    return (out_gate.float() * (y.float() * factor)).to(out_gate.dtype).contiguous()


@torch.library.register_fake("glconv_graphs::unpack_pairs", lib=LIBRARY)
def _unpack_pairs_fake(packed: Tensor, out_gate: Tensor, factor: float) -> Tensor:
    return out_gate.new_empty(out_gate.shape)
