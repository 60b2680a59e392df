"""The launch record without a GPU: what a driver would be given, by a stand-in for it."""
import ctypes
import types

import pytest
from glconv.fused import driver

BEFORE = [(ctypes.c_char * 128)(), *(ctypes.c_int32(n) for n in (1, 2, 3)), *(ctypes.c_int64(n) for n in (4, 5, 6)),
          ctypes.c_void_p(7)]
AFTER = [ctypes.c_void_p(99), ctypes.c_int32(5), ctypes.c_float(1.0)]


class Config(ctypes.Structure):
    """CUlaunchConfig, as the driver's header has it."""

    _fields_ = [*((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z",
                                                     "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint)]


class Driver:
    """Keeps what it was called with; refuses the first launch when there is no context."""

    def __init__(self, sizes, context=True):
        self.sizes, self.context, self.launched, self.made_current = sizes, context, [], []

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        if not self.context:
            return driver.INVALID_CONTEXT
        config = ctypes.cast(config, ctypes.POINTER(Config)).contents
        fields = {name: getattr(config, name) for name, _ in Config._fields_}
        values = [int.from_bytes(ctypes.string_at(address, size), "little")
                  for address, size in zip(addresses, self.sizes)]
        assert not any(address % min(size, 8) for address, size in zip(addresses, self.sizes))
        self.launched.append((fields, values, function.value))
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 4321
        self.device = device
        return 0

    def cuCtxSetCurrent(self, context):
        self.made_current.append(context.value)
        self.context = True
        return 0


def entry(monkeypatch, before, tensors, sizes=None, **options):
    """An Entry over a stand-in for the driver, whose kernel takes parameters of these sizes; by default as given."""
    sizes = sizes or [*map(ctypes.sizeof, before), *(ctypes.sizeof(driver.CODES[code]) for code in tensors),
                      *map(ctypes.sizeof, AFTER), *[8] * driver.SCRATCH_POINTERS]
    stand_in = Driver(sizes, **options)
    monkeypatch.setattr(driver, "library", lambda: stand_in)
    metadata = types.SimpleNamespace(num_warps=4, shared=777, global_scratch_size=0, name="kernel")
    compiled = types.SimpleNamespace(_init_handles=lambda: None, metadata=metadata, function=1234)
    return driver.Entry(compiled, 3, 321, before, tensors, AFTER), stand_in


@pytest.mark.parametrize(("before", "tensors", "values"), [
    ([], "QQQQQ", [11, 22, 33, 2**47 + 1, 55]), (BEFORE, "iiiQi", [2**30 - 1, 22, 33, 2**48 + 44, 55])],
    ids=["portable", "hopper"])
def test_record_reaches_the_driver(monkeypatch, before, tensors, values):
    made, stand_in = entry(monkeypatch, before, tensors)
    made.layout.pack_into(made.record, driver.STREAM, 0xDEADBEEFCAFE, 0, 0, *values)
    assert made.start(made.config, made.function, made.addresses, None) == 0
    (fields, arguments, function), = stand_in.launched
    assert fields == {"grid_x": 321, "grid_y": 1, "grid_z": 1, "block_x": 128, "block_y": 1, "block_z": 1,
                      "shared": 777, "stream": 0xDEADBEEFCAFE, "attributes": None, "attribute_count": 0}
    assert function == 1234
    assert arguments[len(before):len(before) + 5] == values
    assert arguments[len(before) + 5:] == [99, 5, 0x3F800000, 0, 0]
    if before:
        assert arguments[1:8] == [1, 2, 3, 4, 5, 6, 7]
        made.replace(7, ctypes.c_void_p(70))
        made.start(made.config, made.function, made.addresses, None)
        assert stand_in.launched[1][1][7] == 70


def test_a_thread_without_a_context_gets_the_devices(monkeypatch):
    made, stand_in = entry(monkeypatch, [], "QQQQQ", context=False)
    made.layout.pack_into(made.record, driver.STREAM, 0, 0, 0, 1, 2, 3, 4, 5)
    code = made.start(made.config, made.function, made.addresses, None)
    assert code == driver.INVALID_CONTEXT
    made.retry(code)
    assert (stand_in.device, stand_in.made_current) == (3, [4321])
    assert stand_in.launched[0][1][:5] == [1, 2, 3, 4, 5]


def test_another_parameter_list_is_refused(monkeypatch):
    with pytest.raises(driver.DriverError, match=r"^kernel takes parameters of \[8, 8, 4\] bytes; want \[8,"):
        entry(monkeypatch, [], "QQQQQ", sizes=[8, 8, 4])
