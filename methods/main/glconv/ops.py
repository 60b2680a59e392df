"""The package's operators for the PyTorch dispatcher: definition, CUDA and CPU implementation, fake.

Defined with torch.library.Library rather than custom_op: 2.6 us a call on the host instead of 5.5. Inputs are trusted;
`contract.check` stands at the public entry. Kernels are imported at the first call that needs them.
"""
from typing import Any

import torch

from .contract import Problem

LIBRARY = torch.library.Library("glconv", "DEF")

LIBRARY.define("gated_causal_conv(Tensor x, Tensor in_gate, Tensor out_gate, Tensor k) -> Tensor",
               tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(LIBRARY, "gated_causal_conv", "CUDA")
def _gated_causal_conv_cuda(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor,
                            k: torch.Tensor) -> torch.Tensor:
    from . import operator_call

    problem = Problem(*x.shape, x.device)   # type: ignore[call-arg]  # four sizes, which mypy does not count
    return operator_call(problem)(x, in_gate, out_gate, k)


@torch.library.impl(LIBRARY, "gated_causal_conv", "CPU")
def _gated_causal_conv_cpu(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor,
                           k: torch.Tensor) -> torch.Tensor:
    from .spectral.right_angle import convolve

    return convolve(x, in_gate, out_gate, k)


@torch.library.register_fake("glconv::gated_causal_conv", lib=LIBRARY)
def _gated_causal_conv_fake(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor,
                            k: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# Everything after `scale` is `spectral.pairs.Packing`, field by field: it changes the kernel's layout, not its result.
LIBRARY.define("pair_spectra(Tensor spectra, Tensor kernel, float scale, int tile_pairs, int tile_bins, int warps, "
               "int stages, str emit, str nyquist, str layout, str scale_at, str signal_policy, str kernel_policy, "
               "bool static_sizes) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(LIBRARY, "pair_spectra", "CUDA")
def _pair_spectra_cuda(spectra: torch.Tensor, kernel: torch.Tensor, scale: float,
                       *packing: Any) -> torch.Tensor:
    from .spectral.kernels import launch_pairs
    from .spectral.pairs import Packing

    with torch.cuda.device(spectra.device):
        return launch_pairs(spectra.contiguous(), kernel.contiguous(), scale, Packing(*packing))


@torch.library.impl(LIBRARY, "pair_spectra", "CPU")
def _pair_spectra_cpu(spectra: torch.Tensor, kernel: torch.Tensor, scale: float,
                      *packing: Any) -> torch.Tensor:
    from .spectral.pairs import pair_spectra

    return pair_spectra(spectra, kernel, scale)


@torch.library.register_fake("glconv::pair_spectra", lib=LIBRARY)
def _pair_spectra_fake(spectra: torch.Tensor, kernel: torch.Tensor, scale: float,
                       *packing: Any) -> torch.Tensor:
    batch, channels, bins, _ = spectra.shape
    return spectra.new_empty(((batch + 1) // 2, channels, 2 * (bins - 1), 2))
