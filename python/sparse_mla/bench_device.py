"""What the benchmark of a GPU asks of a framework: memory, random numbers, graphs and clocks.

PyTorch and CuPy say the same in their own words. Arrays take Python's operators, indexing,
`reshape` and `cumsum` in both, so that only the rest is here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

FRAMEWORKS = ("torch", "cupy")
MATRIX = 8192  # rows and columns of the matrix product that is timed


class NoFramework(RuntimeError):
    """Neither PyTorch nor CuPy is installed."""


class TorchDevice:
    framework = "torch"

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.manual_seed(seed)
        self.stream = torch.cuda.Stream()

    def upload(self, array: Any) -> Any:
        import numpy as np

        torch = self.torch
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).to(self.device).view(torch.bfloat16)
        return torch.from_numpy(array).to(self.device)

    def download(self, array: Any) -> Any:
        torch = self.torch
        if array.dtype != torch.bfloat16:
            return array.cpu().numpy()
        import ml_dtypes

        return array.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def repeated(self, array: Any, count: int) -> Any:
        """Again and again along the first dimension, which becomes `count`."""
        times = -(-count // array.shape[0])
        return array.repeat(times, *[1] * (array.ndim - 1))[:count]

    def arange(self, count: int) -> Any:
        return self.torch.arange(count, device=self.device)

    def integers(self, high: int, shape: tuple[int, ...]) -> Any:
        """int64, from 0 on and below `high`."""
        return self.torch.randint(high, shape, device=self.device)

    def uniform(self, shape: tuple[int, ...]) -> Any:
        """float64 in (0, 1]."""
        return 1 - self.torch.rand(shape, dtype=self.torch.float64, device=self.device)

    def log(self, array: Any) -> Any:
        return self.torch.log(array)

    def as_int64(self, array: Any) -> Any:
        return array.to(self.torch.int64)

    def as_int32(self, array: Any) -> Any:
        return array.to(self.torch.int32)

    def copy(self, to: Any, array: Any) -> None:
        to.copy_(array)

    def matrix_product(self) -> tuple[Callable[[int], Any], str]:
        """A product of square matrices of random numbers, and their dtype."""
        one, other, out = (
            self.torch.randn(MATRIX, MATRIX, dtype=self.torch.bfloat16, device=self.device)
            for _ in range(3)
        )
        return lambda i: self.torch.matmul(one, other, out=out), "bfloat16"

    def record(self, call: Callable[[int], Any], count: int) -> Callable[[], None]:
        """call(0), call(1), ... as a graph whose nodes follow one another; what replays it."""
        torch = self.torch
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            call(0)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory of graphs that are gone
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for i in range(count):
                call(i)
            graph.capture_end()
        return graph.replay

    def seconds(self, replay: Callable[[], None]) -> float:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.stream(self.stream):
            begin.record()
            replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def facts(self) -> dict[str, Any]:
        properties = self.torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "l2_bytes": properties.L2_cache_size,
            "framework": f"PyTorch {self.torch.__version__}",
            "cuda": self.torch.version.cuda,
        }


class CupyDevice:
    framework = "cupy"

    def __init__(self, device: str, seed: int) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()
        cupy.random.seed(seed)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def upload(self, array: Any) -> Any:
        import numpy as np

        if array.dtype.name == "bfloat16":
            return self.cupy.asarray(array.view(np.int16)).view(array.dtype)
        return self.cupy.asarray(array)

    def download(self, array: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return self.cupy.asnumpy(array.view("int16")).view(array.dtype)
        return self.cupy.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        import ml_dtypes

        return self.cupy.empty(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def repeated(self, array: Any, count: int) -> Any:
        times = -(-count // array.shape[0])
        bits = array.view("int16") if array.dtype.name == "bfloat16" else array
        tiled = self.cupy.tile(bits, (times, *[1] * (array.ndim - 1)))
        return tiled[:count].view(array.dtype)

    def arange(self, count: int) -> Any:
        return self.cupy.arange(count)

    def integers(self, high: int, shape: tuple[int, ...]) -> Any:
        return self.cupy.random.randint(0, high, shape, dtype="int64")

    def uniform(self, shape: tuple[int, ...]) -> Any:
        return 1 - self.cupy.random.random(shape)

    def log(self, array: Any) -> Any:
        return self.cupy.log(array)

    def as_int64(self, array: Any) -> Any:
        return array.astype("int64")

    def as_int32(self, array: Any) -> Any:
        return array.astype("int32")

    def copy(self, to: Any, array: Any) -> None:
        self.cupy.copyto(to, array)

    def matrix_product(self) -> tuple[Callable[[int], Any], str]:
        one, other, out = (
            self.cupy.random.standard_normal((MATRIX, MATRIX)).astype("float16") for _ in range(3)
        )
        return lambda i: self.cupy.matmul(one, other, out=out), "float16"

    def record(self, call: Callable[[int], Any], count: int) -> Callable[[], None]:
        self.cupy.cuda.Device().synchronize()
        with self.stream:
            call(0)
            self.stream.synchronize()
            self.stream.begin_capture()
            for i in range(count):
                call(i)
            graph = self.stream.end_capture()
        return graph.launch

    def seconds(self, replay: Callable[[], None]) -> float:
        begin, end = (self.cupy.cuda.Event() for _ in range(2))
        with self.stream:
            begin.record()
            replay()
            end.record()
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(begin, end) / 1e3

    def facts(self) -> dict[str, Any]:
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        version = self.cupy.cuda.runtime.runtimeGetVersion()
        return {
            "name": properties["name"].decode(),
            "l2_bytes": properties["l2CacheSize"],
            "framework": f"CuPy {self.cupy.__version__}",
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
        }


def open_device(device: str, framework: str | None, seed: int) -> Any:
    """The device through the framework, or through the first that is installed.

    Raises NoFramework where there is none.
    """
    kinds = {"torch": TorchDevice, "cupy": CupyDevice}
    for name in [framework] if framework else FRAMEWORKS:
        if find_spec(name):
            return kinds[name](device, seed)
    wanted = framework or "PyTorch or CuPy"
    raise NoFramework(f"--device {device} needs {wanted}: pip install torch, or cupy-cuda13x")
