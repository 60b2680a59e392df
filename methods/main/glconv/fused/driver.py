"""The few calls of the CUDA driver that a launch without waste needs, through ctypes.

A jitted Triton launch binds and specialises its arguments anew at every call: 35 us on the host where the kernel runs
19. `Entry` binds them once and afterwards changes only the pointers.
"""
import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

INVALID_CONTEXT = 201
FLOAT16, SWIZZLE_BY_BYTES, PROMOTE_128 = 6, {32: 1, 64: 2, 128: 3}, 2     # CUtensorMap enumerations
SCRATCH_POINTERS = 2        # that Triton appends to a kernel's own parameters; null for kernels that use no scratch


class DriverError(RuntimeError):
    """The driver refused a call."""


@functools.cache
def library() -> ctypes.CDLL:
    """The CUDA driver of this machine. Raises OSError where there is none."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLaunchKernel.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    return cuda


def succeed(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(f"{what} failed with {(name.value or b'an unknown error').decode()} ({code})")


def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a loaded kernel. Raises AttributeError with a driver older than CUDA 12.4."""
    query = library().cuFuncGetParamInfo
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while query(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


@functools.lru_cache(maxsize=1024)
def tensor_map(base: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> ctypes.Array:
    """A descriptor for bulk copies of FP16 boxes, innermost axis first, swizzled by the box's innermost bytes.

    Args:
        base: address that coordinates count from.
        sizes: elements along each axis.
        strides: bytes along each axis but the innermost.
        box: elements of one copy along each axis.
    """
    rank, room = len(sizes), ctypes.create_string_buffer(192)
    start = -ctypes.addressof(room) % 64        # the driver wants 64-byte alignment
    encoded = (ctypes.c_char * 128).from_buffer(room, start)
    succeed(library().cuTensorMapEncodeTiled(
        ctypes.byref(encoded), FLOAT16, rank, ctypes.c_void_p(base), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, SWIZZLE_BY_BYTES[2 * box[0]], PROMOTE_128, 0), "making a tensor map")
    return encoded


class Entry:
    """A compiled kernel with its grid and its arguments bound; `arguments[i].value` may change between launches."""

    def __init__(self, compiled: Any, grid: int, arguments: Sequence[Any]) -> None:
        """Raises DriverError when the kernel's parameters are not the ones given: then it was built by a Triton that
        lays them out in another way."""
        compiled._init_handles()
        self.function, self.grid = ctypes.c_void_p(compiled.function), grid
        self.threads, self.shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        self.arguments = list(arguments)
        bound = [*arguments, *(ctypes.c_void_p() for _ in range(SCRATCH_POINTERS))]
        sizes, given = parameter_sizes(compiled.function), [ctypes.sizeof(argument) for argument in bound]
        if sizes != given[:len(sizes)] or len(sizes) < len(arguments) or compiled.metadata.global_scratch_size:
            raise DriverError(f"{compiled.metadata.name} takes parameters of {sizes} bytes; want {given}")
        self.bound = bound
        self.addresses = (ctypes.c_void_p * len(bound))(*(ctypes.addressof(argument) for argument in bound))
        self.lock = threading.Lock()        # between writing the arguments and the launch that copies them
        self.start = library().cuLaunchKernel

    def point(self, index: int, argument: ctypes.Array) -> None:
        """Replaces an argument that is passed by address, a tensor map."""
        self.bound[index] = argument
        self.addresses[index] = ctypes.addressof(argument)

    def launch(self, stream: int) -> None:
        """On a stream of the current device. The caller holds `lock`."""
        where = self.function, self.grid, 1, 1, self.threads, 1, 1, self.shared, stream, self.addresses, None
        code = self.start(*where)
        if code == INVALID_CONTEXT:     # a thread that has not used the GPU yet
            import torch

            torch.cuda.set_device(torch.cuda.current_device())
            code = self.start(*where)
        succeed(code, "a kernel launch")
