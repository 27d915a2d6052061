"""Tensors that say they are on a GPU, and what the driver of fake_driver.c was asked for.

Imported by the scripts of test_gpu_driver.py, whose libcuda.so.1 is the made-up one.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from capsules import CUDA, Producer

driver = ctypes.CDLL("libcuda.so.1")


def tensor(
    *shape: int,
    device: int = 0,
    offset: int = 0,
    kind: type = Producer,
    dtype: type | str = np.float32,
) -> Producer:
    """A contiguous tensor, `offset` numbers past an address that 32 divides."""
    count, size = math.prod(shape), np.dtype(dtype).itemsize
    numbers = np.zeros(count + 32 // size + offset, dtype)
    begin = -(numbers.ctypes.data // size) % (32 // size) + offset
    array = numbers[begin : begin + count].reshape(shape)
    return kind(array, device=(CUDA, device))


class Launch(ctypes.Structure):
    """fake_launch: what was launched last."""

    _fields_ = (
        ("blocks", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_ulonglong),
        ("kernel", ctypes.c_char * 64),
        ("overlaps", ctypes.c_int),
    )


def last_launch() -> Launch:
    return Launch.in_dll(driver, "fake_launch")


def order() -> str:
    """What streams were asked for since the last call of this, one thing a line."""
    text = (ctypes.c_char * 4096).in_dll(driver, "fake_order")
    said = text.value.decode()
    text.value = b""
    return said


def capture(stream: int) -> None:
    """Makes that stream the one that is being captured; 0: none."""
    ctypes.c_ulonglong.in_dll(driver, "fake_captured").value = stream


def calls(function: str) -> int:
    """How often the driver's function was called."""
    return driver.fake_calls(function.encode())
