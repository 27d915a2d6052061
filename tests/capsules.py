"""DLPack capsules made by hand, with every field free, for the tests of the exchange.

``Producer(array, ...)`` has ``__dlpack__`` over a NumPy array's memory and counts what happens to
the tensors that it hands out: ``made``, ``deleted``. The structs are those of dlpack.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
READ_ONLY, IS_COPIED = 1, 2

# numpy kind -> DLPack type code
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
BFLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2 = 4, 10, 12


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# A destructor sees its capsule without a reference, so it is an address here.
_api.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

# What handed-out tensors need to stay alive: address of the managed struct -> (struct, producer,
# memory). A tensor whose deleter is NULL stays here for good.
_alive: dict[int, tuple[Any, Producer, Any]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _, producer, _ = _alive.pop(address)
    producer.deleted += 1


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _api.PyCapsule_IsValid(capsule, name):
            address = _api.PyCapsule_GetPointer(capsule, name)
            if _alive[address][0].deleter:
                _delete(address)


def _int64s(values: Any) -> Any:
    return None if values is None else (ctypes.c_int64 * len(values))(*values)


class Producer:
    """An object with ``__dlpack__`` over ``array``; keywords replace what the capsule says.

    ``strides`` are in elements; None stands for a NULL pointer, ``shape=None`` too. ``deleter``
    False is a NULL deleter. ``version`` None makes a legacy capsule.
    """

    def __init__(self, array: np.ndarray, *, version=(1, 3), deleter=True, **fields: Any) -> None:
        self.array = array
        self.version = version
        self.deleter = deleter
        self.fields = fields
        self.made = 0
        self.deleted = 0

    def __dlpack__(self, **keywords: Any) -> Any:
        self.keywords = keywords
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.fields.get("device", (CPU, 0))

    def capsule(self) -> Any:
        array, fields = self.array, dict(self.fields)
        size = max(array.itemsize, 1)
        shape = _int64s(fields.pop("shape", array.shape))
        strides = _int64s(fields.pop("strides", [step // size for step in array.strides]))
        managed = _Managed() if self.version is None else _ManagedVersioned()
        if self.version is not None:
            managed.major, managed.minor = self.version
            managed.flags = fields.pop("flags", 0)
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p) if self.deleter else None
        managed.tensor = _Tensor(
            data=fields.pop("data", array.ctypes.data),
            device=_Device(*fields.pop("device", (CPU, 0))),
            ndim=fields.pop("ndim", array.ndim),
            dtype=_DataType(
                fields.pop("code", _CODES.get(array.dtype.kind, 3)),
                fields.pop("bits", 8 * size),
                fields.pop("lanes", 1),
            ),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) if shape else None,
            strides=ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)) if strides else None,
            byte_offset=fields.pop("byte_offset", 0),
        )
        if fields.pop("poison", False):
            ctypes.memset(ctypes.addressof(managed.tensor), 0xFF, ctypes.sizeof(_Tensor))
        assert not fields, f"no such fields: {fields}"
        address = ctypes.addressof(managed)
        _alive[address] = (managed, self, (array, shape, strides))
        self.made += 1
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _api.PyCapsule_New(address, name, ctypes.cast(_destroy, ctypes.c_void_p))
