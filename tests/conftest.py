"""Where the tests run: every kernel that this machine has, NumPy and PyTorch, CPU and GPU."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import sparse_mla
from compare import check_call, to_framework, to_numpy

# Otherwise JAX takes three quarters of a GPU's memory at its first call, for as long as the process
# runs, and the other frameworks and processes go without.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def cpu_kernels() -> list[str]:
    """The CPU kernels that this build has and this machine runs, best first."""
    return [each["name"] for each in sparse_mla.build_info()["cpu_kernels"] if each["runs"]]


def gpu_kernels() -> list[str]:
    """The names that SPARSE_MLA_KERNEL takes for tensors on a GPU: the families of cuda/, less what
    is for other GPUs than those that are there."""
    families = {image.split("_")[0] for image in sparse_mla.build_info()["gpu_kernels"]}
    found = {each.get("compute_capability") for each in sparse_mla.devices()} - {None}
    if found and (9, 0) not in found:
        families.discard("sm90")
    return sorted(families)


def has_cuda() -> bool:
    return any(device["device"].startswith("cuda") for device in sparse_mla.devices())


@dataclass(frozen=True)
class Backend:
    """A framework's tensors on a device, and the kernel that has to be used for them."""

    framework: str
    device: str
    kernel: str | None

    def tensors(self, arguments: Any) -> Any:
        return to_framework(arguments, self.framework, self.device)

    def attend(self, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        """attend with NumPy arguments on this backend; NumPy results."""
        out, lse = sparse_mla.attend(**self.tensors(arguments))
        return to_numpy(out), to_numpy(lse)

    def check(self, arguments: dict[str, Any]) -> dict[str, float]:
        return check_call(arguments, self.framework, self.device)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.framework, self.device, self.kernel)))


BACKENDS = [
    *(pytest.param(Backend("numpy", "cpu", kernel), id=kernel) for kernel in cpu_kernels()),
    pytest.param(Backend("torch", "cpu", None), id="torch"),
    *(
        pytest.param(
            Backend("torch", "cuda", kernel),
            id="-".join(filter(None, ("cuda", kernel))),
            marks=pytest.mark.gpu,
        )
        for kernel in (None, *gpu_kernels())
    ),
]
ON_CUDA = [each for each in BACKENDS if each.values[0].device == "cuda"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """A kernel that is forced on a GPU says what it cannot take; that is no failure of the test."""
    try:
        return (yield)
    except sparse_mla.UnsupportedError as error:
        if "SPARSE_MLA_KERNEL" in os.environ and str(error).startswith("SPARSE_MLA_KERNEL: "):
            pytest.skip(str(error))
        raise


def use(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if backend.framework == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if backend.kernel:
        monkeypatch.setenv("SPARSE_MLA_KERNEL", backend.kernel)
    return backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A test with this fixture runs on every kernel, framework and device that there is."""
    return use(request.param, monkeypatch)


@pytest.fixture(params=ON_CUDA)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A test with this fixture runs on the GPU: as planned, and with every kernel forced."""
    return use(request.param, monkeypatch)


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Skips where the GPU has not as many GiB left; gives them back behind the test, since PyTorch
    would keep them. Processes that run tests at once take turns, so that each finds them there."""
    import torch

    def ask(gib: int) -> None:
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gib + 1:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")

    with open(__file__) as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield ask
        # Of a failed test these hold its frame, and so its tensors.
        sys.last_exc = sys.last_value = sys.last_traceback = None
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_fault_left() -> None:
    """A test leaves no fault recorded for the next one, and takes none from the last."""
    os.environ.pop("SPARSE_MLA_KERNEL", None)
    with contextlib.suppress(sparse_mla.IndexFault):
        sparse_mla.synchronize()
    sparse_mla.faults()
