"""What is in the binary: version, kernels, symbols, libraries, and what an import costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig

import pytest

import sparse_mla
from sparse_mla import _core

LIBRARIES = {"libc", "libm", "libpthread", "libdl", "ld-linux-x86-64", "ld-linux-aarch64"}
SANITIZERS = {"libasan", "libubsan", "libtsan"}


def python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def readelf(*options: str) -> list[str]:
    try:
        result = subprocess.run(
            ["readelf", "--wide", *options, _core.__file__],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("readelf is not installed")
    return result.stdout.splitlines()


def needed_libraries() -> set[str]:
    lines = [line for line in readelf("--dynamic") if "(NEEDED)" in line]
    return {line.split("[")[1].split(".so")[0] for line in lines}


def test_version_has_one_source():
    assert sparse_mla.__version__ == sparse_mla.build_info()["version"]
    try:
        installed = importlib.metadata.version("sparse-mla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only importable")
    assert sparse_mla.__version__ == installed


def test_licences_are_installed():
    try:
        files = importlib.metadata.files("sparse-mla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only importable")
    names = {str(file).split("/licenses/")[-1] for file in files if "/licenses/" in str(file)}
    assert names == {"LICENSE", "LICENSES/dlpack.txt"}
    assert importlib.metadata.metadata("sparse-mla")["License-Expression"] == "Apache-2.0"


def test_no_run_time_dependencies():
    try:
        requires = importlib.metadata.requires("sparse-mla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only importable")
    assert all("extra ==" in requirement for requirement in requires)


def test_build_info_lists_cpu_kernels():
    kernels = sparse_mla.build_info()["cpu_kernels"]
    assert kernels[-1]["name"] == "cpu_plain"
    assert kernels[-1]["runs"]


def test_build_info_lists_what_is_embedded():
    info = sparse_mla.build_info()
    if not info["gpu_kernels"]:
        assert info["gpu_targets"] == info["gpu_compiler"] == ""
        return
    assert "any_merge" in info["gpu_kernels"]
    targets = info["gpu_targets"].split()
    assert any(target.startswith("sm_") for target in targets)
    assert int(info["gpu_compiler"].split(".")[0]) >= 12
    # Every fatbin is inside the binary: they begin with the same number.
    with open(_core.__file__, "rb") as file:
        assert file.read().count(b"\x50\xed\x55\xba") >= len(info["gpu_kernels"])


def test_stable_abi():
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert sparse_mla.build_info()["stable_abi"] == _core.__file__.endswith(".abi3.so")
    assert sparse_mla.build_info()["stable_abi"] != free_threaded


def test_only_the_module_is_exported():
    symbols = [line.split() for line in readelf("--dyn-syms")]
    defined = {
        fields[7].split("@")[0]
        for fields in symbols
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK") and fields[6] != "UND"
    }
    assert {name for name in defined if not name.startswith("__")} - {"_init", "_fini"} == {
        "PyInit__core"
    }


def test_needs_libc_only():
    assert needed_libraries() - SANITIZERS <= LIBRARIES


def test_no_executable_stack():
    stack = [line for line in readelf("--program-headers") if "GNU_STACK" in line]
    assert stack
    assert "RWE" not in stack[0]


def test_import_loads_no_framework_and_no_driver():
    loaded = python(
        "import sys, sparse_mla\n"
        "print(*sorted({'numpy', 'torch', 'jax', 'cupy', 'ml_dtypes'} & set(sys.modules)))\n"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    assert loaded.split("\n")[:2] == ["", "False"]


def test_import_is_fast():
    """The extension alone, in milliseconds; the best of five fresh interpreters."""
    code = (
        "import importlib.util, time\n"
        f"spec = importlib.util.spec_from_file_location('sparse_mla._core', {_core.__file__!r})\n"
        "begin = time.perf_counter()\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(1e3 * (time.perf_counter() - begin))"
    )
    best = min(float(python(code)) for _ in range(5))
    assert best < (200 if needed_libraries() & SANITIZERS else 10)


def test_attend_without_numpy():
    pytest.importorskip("torch")
    printed = python(
        "import sys, warnings\n"
        "sys.modules['numpy'] = sys.modules['ml_dtypes'] = None\n"
        "warnings.simplefilter('ignore')\n"
        "import torch, sparse_mla\n"
        "torch.manual_seed(0)\n"
        "q = torch.randn(3, 4, 96, dtype=torch.bfloat16)\n"
        "cache = torch.randn(5, 8, 96, dtype=torch.bfloat16)\n"
        "indices = torch.randint(0, 40, (3, 16))\n"
        "out, lse = sparse_mla.attend(q, cache, indices, softmax_scale=0.1, head_dim_v=64)\n"
        "k = cache.flatten(0, 1)[indices].double()\n"
        "p = torch.softmax(0.1 * q.double() @ k.mT, -1)\n"
        "print(float((out.double() - p @ k[..., :64]).abs().max()))"
    )
    assert float(printed) < 0.02
