"""Memory for the tests: larger than the machine has, or ending at a page that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

NORESERVE = 0x4000  # Linux; mmap has the name from Python 3.13 on
LIBC = ctypes.CDLL(None, use_errno=True)


def lazy(count: int, dtype: np.dtype | type) -> np.ndarray:
    """`count` zeros of which only the pages that are touched cost memory."""
    dtype = np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), np.uint8).view(dtype)


def fenced(array: np.ndarray, before: bool = False) -> np.ndarray:
    """A contiguous copy that ends (or begins) next to a page that faults when touched."""
    page, size = mmap.PAGESIZE, array.nbytes
    room = (size + page - 1) // page * page
    region = np.frombuffer(mmap.mmap(-1, room + 2 * page), np.uint8)
    for fence in (0, room + page):
        failed = LIBC.mprotect(ctypes.c_void_p(region.ctypes.data + fence), page, 0)
        assert not failed, ctypes.get_errno()
    start = page if before else page + room - size
    copy = region[start : start + size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def fence(value: Any, before: bool = False) -> Any:
    """`fenced`, of every array of a dict or tuple."""
    if isinstance(value, dict):
        return {name: fence(item, before) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(fence(item, before) for item in value)
    return fenced(value, before) if isinstance(value, np.ndarray) else value
