"""The few calls of the CUDA driver that a launch without waste needs, through ctypes.

A jitted Triton launch binds and specialises its arguments anew at every call: 35 us on the host where the kernel runs
19. `Entry` binds them once; afterwards only the pointers change.
"""
import ctypes
import functools
import struct
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
    return ctypes.CDLL("libcuda.so.1")


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


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint64)]


STREAM = LaunchConfig.stream.offset
STREAM_CODES = "@QQQ"      # its end, from the stream on
CODES: dict[str, Any] = {"i": ctypes.c_int32, "Q": ctypes.c_uint64}


class Entry:
    """A compiled kernel with its grid and its constant arguments bound.

    The stream and what tells where the tensors are lie in one record, which one call of `struct` writes: every
    attribute set and every argument converted by ctypes would cost the host a tenth of a microsecond, each launch.
    """

    def __init__(self, compiled: Any, device: int, grid: int, before: Sequence[Any], tensors: str,
                 after: Sequence[Any]) -> None:
        """
        Args:
            compiled: the kernel, as Triton compiled it for the current device.
            device: that device's number.
            grid: programs.
            tensors: `struct` codes of the arguments for x, in_gate, out_gate, k and y.
            before, after: ctypes objects, the arguments on both sides of those.

        Raises:
            DriverError: the kernel's parameters are not these; a Triton built it that lays them out in another way.
            AttributeError: the driver is older than CUDA 12.4.
        """
        compiled._init_handles()
        self.device = device
        self.base = 0       # the address that the arguments `before` count from; callers keep it
        self.layout = struct.Struct(STREAM_CODES + tensors)
        self.record = ctypes.create_string_buffer(STREAM + self.layout.size)
        config = LaunchConfig.from_buffer(self.record)
        config.grid[:], config.block[:] = (grid, 1, 1), (32 * compiled.metadata.num_warps, 1, 1)
        config.shared = compiled.metadata.shared
        ends = [STREAM + struct.calcsize(STREAM_CODES + tensors[:n]) for n in range(1, len(tensors) + 1)]
        self.bound = [*before, *(CODES[code].from_buffer(self.record, end - struct.calcsize(code))
                                 for code, end in zip(tensors, ends)), *after,
                      *(ctypes.c_void_p() for _ in range(SCRATCH_POINTERS))]
        sizes, given = parameter_sizes(compiled.function), [ctypes.sizeof(argument) for argument in self.bound]
        if sizes != given[:len(sizes)] or len(sizes) < len(given) - SCRATCH_POINTERS or (
                compiled.metadata.global_scratch_size):
            raise DriverError(f"{compiled.metadata.name} takes parameters of {sizes} bytes; want {given}")
        self.addresses = (ctypes.c_void_p * len(given))(*(ctypes.addressof(argument) for argument in self.bound))
        self.lock = threading.Lock()        # between writing the record and the launch that copies it
        self.start = library().cuLaunchKernelEx     # (config, function, addresses, None)
        self.config, self.function = ctypes.byref(config), ctypes.c_void_p(compiled.function)

    def replace(self, index: int, argument: Any) -> None:
        """Another value for one of the arguments `before`. The caller holds `lock`."""
        self.bound[index] = argument
        self.addresses[index] = ctypes.addressof(argument)

    def retry(self, code: int) -> None:
        """After a launch that `start` refused with `code`. The caller holds `lock`. Raises DriverError."""
        if code == INVALID_CONTEXT:     # a thread that has not used the GPU yet
            context = ctypes.c_void_p()
            succeed(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device), "taking a device's context")
            succeed(library().cuCtxSetCurrent(context), "making a context current")
            code = self.start(self.config, self.function, self.addresses, None)
        succeed(code, "a kernel launch")
