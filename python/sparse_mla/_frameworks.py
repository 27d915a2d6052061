"""What the exchange of tensors asks of a framework in Python, where C has no way to ask.

Every function is called by the extension and by nothing else. A framework is only ever asked when
one of its arrays is at hand, so that the imports below find it loaded.

Where a result comes from, when the caller gave no ``out``:

- PyTorch tensors, subclasses included: ``torch.empty`` on the tensor's device;
- NumPy arrays: ``numpy.empty`` (done in C);
- CuPy arrays: ``cupy.empty`` on the array's device;
- JAX arrays, which are immutable, on the CPU: a NumPy array, which ``finish`` hands to JAX; on a
  GPU: memory of the driver's, which ``adopt`` hands to JAX;
- any other object on the CPU: a NumPy array; on a GPU: nothing, ``out`` and ``lse`` must be given.
"""

from __future__ import annotations

import sys
from typing import Any


def _is(array: Any, module: str, name: str) -> bool:
    """Whether ``array`` is an instance of a class of a module that is loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(array, kind)


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype of that name; bfloat16 and float8_e4m3fn are those of ml_dtypes."""
    try:
        import numpy
    except ImportError as error:
        raise ImportError(
            "a result for these tensors is a NumPy array, and NumPy is not installed; "
            "install it, or pass the outputs (out=, lse=)"
        ) from error
    if name not in ("bfloat16", "float8_e4m3fn"):
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"a NumPy array of {name} needs the package ml_dtypes, which is not installed; "
            "install sparse-mla[numpy], or pass the outputs (out=, lse=)"
        ) from error
    return numpy.dtype(getattr(ml_dtypes, name))


def empty(like: Any, shape: tuple[int, ...], dtype: str, on_cpu: bool) -> Any:
    """A new, uninitialised, contiguous array of ``like``'s framework on ``like``'s device.

    Errors are the framework's own, its out-of-memory error above all.
    """
    if _is(like, "torch", "Tensor"):
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if _is(like, "cupy", "ndarray"):
        import cupy

        with like.device:
            return cupy.empty(shape, dtype=cupy.dtype(numpy_dtype(dtype)))
    if not on_cpu:
        raise TypeError(
            f"cannot make a result like {type(like).__module__}.{type(like).__qualname__} on "
            "a GPU; pass the outputs (out=, lse=) as tensors of PyTorch or CuPy"
        )
    descr = numpy_dtype(dtype)
    import numpy

    return numpy.empty(shape, dtype=descr)


def finish(like: Any, array: Any) -> Any:
    """The JAX array, on ``like``'s device, of a NumPy array that ``empty`` made for it."""
    import jax

    return jax.device_put(array, next(iter(like.devices())))


class _Buffer:
    """Device memory in a DLPack capsule, as an object that ``jax.dlpack.from_dlpack`` takes.

    The launch that wrote it has been waited for, so that it is ready on any stream.
    """

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self.capsule = capsule
        self.device = device

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def adopt(like: Any, capsule: Any) -> Any:
    """The JAX array, on ``like``'s GPU, that owns the memory of a DLPack capsule."""
    import jax

    return jax.dlpack.from_dlpack(_Buffer(capsule, like.__dlpack_device__()))


def torch_stream(device: int) -> int:
    """The CUDA stream (a cudaStream_t) on which PyTorch works now; 0: legacy."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def cupy_stream(device: int) -> int:
    """The CUDA stream (a cudaStream_t) on which CuPy works now; 0: legacy."""
    import cupy

    return cupy.cuda.get_current_stream(device).ptr


def why_not(tensor: Any) -> str | None:
    """Why PyTorch cannot lend the memory of ``tensor``, and what to do; None: who knows."""
    import torch

    if tensor.is_meta:
        return "a meta tensor has no data"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} has no strides; pass .to_dense()"
    return None
