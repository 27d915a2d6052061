"""The way to the driver: without one, with one that is made up, and with a real GPU.

The made-up driver (fake_driver.c) runs nothing, so everything up to a launch is tested on any
machine: loading once, contexts left as they were, errors in words, threads and forks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparse_mla

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = sparse_mla.build_info()
GPUS = [each for each in sparse_mla.devices() if each["device"] != "cpu"]

needs_kernels = pytest.mark.skipif(not BUILD["gpu_kernels"], reason="a build without GPU kernels")

# What each function of the driver is called for, between loading and a launch.
LOADING = [
    "cuDevicePrimaryCtxRetain",
    "cuLibraryLoadData",
    "cuCtxPushCurrent",
    "cuLibraryGetKernel",
    "cuKernelSetAttribute",
    "cuKernelGetFunction",
    "cuLibraryGetGlobal",
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
]

MERGE = """
import fake_gpu, sparse_mla
from fake_gpu import calls, driver, last_launch, tensor

def merge(rows=3, heads=5, d_v=64, device=0, offset=0):
    outs = [tensor(rows, heads, d_v, device=device, offset=offset) for _ in range(2)]
    lses = [tensor(rows, heads, device=device) for _ in range(2)]
    out = tensor(rows, heads, d_v, device=device)
    lse = tensor(rows, heads, device=device)
    sparse_mla.merge(outs, lses, out=out, lse=lse)
"""


def run(code: str, library: Path | None, **environment: str) -> str:
    """Runs code in a fresh interpreter that finds its driver in `library`; what it prints."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": path} | environment
    if library:
        variables["LD_LIBRARY_PATH"] = str(library)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the made-up driver."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    directory = tmp_path_factory.mktemp("driver")
    source = ["-I", str(ROOT / "src"), "-I", str(ROOT / "cuda"), str(HERE / "fake_driver.c")]
    target = ["-o", str(directory / "libcuda.so.1")]
    subprocess.run([compiler, "-std=c11", "-shared", "-fPIC", *source, *target], check=True)
    return directory


# ------------------------------------------------------------------------------- no driver


@pytest.fixture(scope="module")
def no_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a libcuda.so.1 that is none."""
    directory = tmp_path_factory.mktemp("no_driver")
    (directory / "libcuda.so.1").write_bytes(b"not a library")
    return directory


def test_without_a_driver_there_is_the_cpu(no_driver):
    printed = run(
        "import sparse_mla\n"
        "print([each['device'] for each in sparse_mla.devices()])\n"
        "sparse_mla.load()\n"
        "sparse_mla.synchronize()\n"
        "print(sparse_mla.faults())",
        no_driver,
    )
    assert printed.split("\n")[:2] == ["['cpu']", "None"]


@needs_kernels
def test_without_a_driver_loading_says_so(no_driver):
    code = (
        "import sparse_mla\n"
        "try:\n    sparse_mla.load('cuda:0')\n"
        "except sparse_mla.UnsupportedError as error:\n    print(error)"
    )
    assert "there is no NVIDIA driver: " in run(code, no_driver)


@pytest.mark.skipif(bool(BUILD["gpu_kernels"]), reason="a build with GPU kernels")
def test_without_kernels_loading_says_so():
    with pytest.raises(sparse_mla.UnsupportedError, match="this build has no GPU kernels"):
        sparse_mla.load("cuda:0")


# -------------------------------------------------------------------------- a made-up driver


def test_devices(fake):
    printed = run("import sparse_mla\nfor each in sparse_mla.devices()[1:]: print(each)", fake)
    devices = [eval(line) for line in printed.splitlines()]
    assert [each["device"] for each in devices] == ["cuda:0", "cuda:1"]
    assert [each["name"] for each in devices] == ["Fake GPU 0", "Fake GPU 1"]
    assert devices[1]["compute_capability"] == (7, 5)
    assert devices[1]["memory_bytes"] == 2 << 30


def test_no_gpu(fake):
    code = "import sparse_mla\nprint(len(sparse_mla.devices()))"
    assert run(code, fake, FAKE_CUDA_FAIL="cuInit=100") == "1\n"
    assert run(code, fake, FAKE_CUDA_DEVICES="0") == "1\n"


def test_driver_that_does_not_start(fake):
    code = (
        "import sparse_mla\n"
        "for _ in range(2):\n"
        "    try:\n        sparse_mla.devices()\n"
        "    except sparse_mla.CudaError as error:\n        print(error.code, error)"
    )
    line = "802 cuInit failed: CUDA_ERROR_FAKE (802): made up\n"
    assert run(code, fake, FAKE_CUDA_FAIL="cuInit=802") == 2 * line


@needs_kernels
def test_old_driver(fake):
    code = (
        "import sparse_mla\n"
        "try:\n    sparse_mla.load('cuda:0')\n"
        "except sparse_mla.UnsupportedError as error:\n    print(error)"
    )
    printed = run(code, fake, FAKE_CUDA_LACKS="cuLibraryLoadData")
    assert "driver is too old: it has no cuLibraryLoadData of CUDA 12.0" in printed


@needs_kernels
@pytest.mark.parametrize("device", [2, 64])
def test_device_that_is_not_there(fake, device):
    code = (
        "import sparse_mla\n"
        f"try:\n    sparse_mla.load('cuda:{device}')\n"
        "except ValueError as error:\n    print(error)"
    )
    expected = f"device: expected cuda:0 to cuda:1, the GPUs of this process, got cuda:{device}\n"
    assert run(code, fake) == expected


@needs_kernels
def test_loading_is_done_once_and_with_captures_allowed(fake):
    code = MERGE + (
        "driver.fake_mode(1)\n"
        "for _ in range(2):\n"
        "    sparse_mla.load()\n"
        "    merge(device=1)\n"
        "images = len(sparse_mla.build_info()['gpu_kernels'])\n"
        "print(calls('cuLibraryLoadData') == images, calls('cuDevicePrimaryCtxRetain'))\n"
        "import ctypes\n"
        "print(ctypes.c_int.in_dll(driver, 'fake_mode_at_load').value, driver.fake_mode(0))\n"
    )
    assert run(code, fake, FAKE_CUDA_COMPUTE="90") == "True 2\n2 1\n"


@needs_kernels
def test_images_for_another_gpu_are_left_out(fake):
    code = (
        "import sparse_mla\nfrom fake_gpu import calls\nsparse_mla.load('cuda:0')\n"
        "own = [name for name in sparse_mla.build_info()['gpu_kernels'] if name[:4] == 'sm90']\n"
        "images = len(sparse_mla.build_info()['gpu_kernels'])\n"
        "print(images - calls('cuLibraryLoadData') == len(own))\n"
    )
    assert run(code, fake) == "True\n"


@needs_kernels
def test_launch(fake):
    code = MERGE + (
        "merge(rows=70000, heads=3, device=1)\n"
        "launch = last_launch()\n"
        "print(launch.blocks, launch.threads, launch.device, launch.stream, launch.kernel)\n"
        "merge(d_v=63)\n"
        "print(last_launch().blocks, last_launch().device, last_launch().kernel)\n"
        "merge(offset=1)\n"
        "print(last_launch().kernel)\n"
        "before = calls('cuLaunchKernelEx')\n"
        "merge(rows=0)\n"
        "print(calls('cuLaunchKernelEx') - before, driver.fake_depth())\n"
    )
    assert run(code, fake).splitlines() == [
        "52500 128 1 0 b'any_merge_vector'",
        "4 0 b'any_merge'",
        "b'any_merge'",
        "0 0",
    ]


@needs_kernels
def test_the_current_context_is_kept(fake):
    code = MERGE + (
        "merge()\n"
        "pushed = calls('cuCtxPushCurrent')\n"
        "driver.fake_push(1)\n"
        "merge(device=1)\n"
        "print(calls('cuCtxPushCurrent') - pushed, driver.fake_depth())\n"
        "merge(device=1)\n"
        "merge(device=0)\n"
        "print(last_launch().device, driver.fake_depth())\n"
    )
    # Loading device 1 pushes its context; the launch finds it current already.
    assert run(code, fake) == "1 1\n0 1\n"


@needs_kernels
@pytest.mark.parametrize("function", [*LOADING, "cuCtxGetCurrent", "cuLaunchKernelEx"])
def test_every_failure_is_told_and_leaves_the_context(fake, function):
    code = MERGE + (
        "for _ in range(2):\n"
        "    try:\n        merge()\n"
        "    except sparse_mla.CudaError as error:\n"
        "        print(error.code, error, driver.fake_depth())\n"
    )
    line = f"999 {function} failed: CUDA_ERROR_FAKE (999): made up 0\n"
    assert run(code, fake, FAKE_CUDA_FAIL=f"{function}=999") == 2 * line


@needs_kernels
def test_a_failed_load_can_be_repeated(fake):
    code = MERGE + (
        "import ctypes\n"
        "try:\n    merge()\n"
        "except sparse_mla.CudaError:\n"
        "    ctypes.CDLL(None).unsetenv(b'FAKE_CUDA_FAIL')\n"
        "merge()\n"
        "print(last_launch().kernel)\n"
    )
    assert run(code, fake, FAKE_CUDA_FAIL="cuKernelGetFunction=2") == "b'any_merge_vector'\n"


@needs_kernels
@pytest.mark.parametrize("code", [200, 209, 221, 222, 223])
@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuKernelGetFunction"])
def test_no_binary_for_the_gpu(fake, function, code):
    printed = run(
        "import sparse_mla\n"
        "try:\n    sparse_mla.load('cuda:1')\n"
        "except sparse_mla.UnsupportedError as error:\n    print(error)",
        fake,
        FAKE_CUDA_FAIL=f"{function}={code}",
    )
    assert "Fake GPU 1 (compute capability 7.5, driver for CUDA 12.4)" in printed
    assert BUILD["gpu_targets"] in printed


@needs_kernels
@pytest.mark.parametrize(("code", "earlier"), [(700, True), (719, True), (400, False)])
def test_faults_of_earlier_work(fake, code, earlier):
    printed = run(
        "import sparse_mla\n"
        "sparse_mla.load()\n"
        "try:\n    sparse_mla.synchronize('cuda:0')\n"
        "except sparse_mla.CudaError as error:\n    print(error)",
        fake,
        FAKE_CUDA_FAIL=f"cuCtxSynchronize={code}",
    )
    assert f"cuCtxSynchronize failed: CUDA_ERROR_FAKE ({code})" in printed
    assert ("launched earlier" in printed) == earlier


def test_synchronize_makes_no_context(fake):
    code = (
        "import sparse_mla, fake_gpu\n"
        "sparse_mla.synchronize()\n"
        "print(fake_gpu.calls('cuDevicePrimaryCtxRetain'))"
    )
    assert run(code, fake) == "0\n"


@needs_kernels
def test_threads(fake):
    code = MERGE + (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work(i):\n"
        "    for _ in range(50): merge(device=i % 2)\n"
        "    return driver.fake_depth()\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    print(set(pool.map(work, range(16))))\n"
        "images = len(sparse_mla.build_info()['gpu_kernels'])\n"
        "print(calls('cuLibraryLoadData') == images, calls('cuLaunchKernelEx'))\n"
    )
    assert run(code, fake, FAKE_CUDA_COMPUTE="90") == "{0}\nTrue 800\n"


FORK = """
import os, sys
if os.fork() == 0:
    try:
        sparse_mla.load("cuda:0")
        print("loaded", flush=True)
    except sparse_mla.CudaError as error:
        print(error.code, error, flush=True)
    os._exit(0)
os.wait()
"""


@needs_kernels
def test_fork(fake):
    assert run("import sparse_mla\n" + FORK, fake) == "loaded\n"
    printed = run("import sparse_mla\nsparse_mla.load('cuda:0')\n" + FORK, fake)
    assert printed.startswith("3 CUDA was in use when this process was forked")
    assert "spawn" in printed


# ---------------------------------------------------------------------------------- a real GPU


@pytest.mark.gpu
def test_build_serves_the_gpus():
    for each in GPUS:
        sparse_mla.load(each["device"])
        sparse_mla.synchronize(each["device"])
        assert each["memory_bytes"] > 1 << 30


def merge_case(torch, dtypes, rows, heads, d_v, parts, seed=0):
    """Random parts on the GPU: some empty, one row empty in all of them, and NaN in what is not
    to be read."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for part in range(parts):
        out = torch.randn(rows, heads, d_v, generator=generator)
        lse = 30 * torch.randn(rows, heads, generator=generator)
        empty = torch.rand(rows, heads, generator=generator) < 0.3
        empty[rows // 2] = True
        out[empty] = float("nan")
        lse[empty] = -float("inf")
        outs.append(out.to("cuda", dtypes[part % len(dtypes)]))
        lses.append(lse.cuda())
    return outs, lses


def merged(outs, lses, sink=None):
    """The same in NumPy and float64, over (rows, heads, d_v)."""
    outs = np.stack([out.double().cpu().numpy() for out in outs])
    lses = np.stack([lse.double().cpu().numpy() for lse in lses])
    filled = lses > -np.inf
    maximum = np.where(filled.any(0), lses.max(0), 0.0)
    weights = np.where(filled, np.exp(lses - maximum), 0.0)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        lse = maximum + np.log(total)
    out = (weights[..., None] * np.where(filled[..., None], outs, 0.0)).sum(0)
    if sink is not None:
        with np.errstate(over="ignore"):
            total = total + np.exp(sink.double().cpu().numpy() - maximum)
    return out / np.where(total > 0, total, 1.0)[..., None], lse


TOLERANCE = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtypes", [["float32"], ["float16"], ["bfloat16"]])
@pytest.mark.parametrize(
    ("rows", "heads", "d_v", "parts"),
    [(1, 1, 1, 1), (7, 3, 63, 2), (5, 16, 512, 4), (3, 128, 512, 32), (70_000, 2, 36, 3)],
)
def test_merge(rows, heads, d_v, parts, dtypes, out_dtype):
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [getattr(torch, d) for d in dtypes], rows, heads, d_v, parts)
    out = torch.empty(rows, heads, d_v, device="cuda", dtype=getattr(torch, out_dtype))
    if out_dtype not in (dtypes[0], "float32"):
        pytest.skip("a result has the parts' dtype or float32")
    result, lse = sparse_mla.merge(outs, lses, out=out)
    assert result is out
    expected, expected_lse = merged(outs, lses)
    tolerance = TOLERANCE[out_dtype]
    np.testing.assert_allclose(
        out.double().cpu().numpy(), expected, rtol=tolerance, atol=1e-5 + tolerance
    )
    np.testing.assert_allclose(lse.cpu().numpy(), expected_lse, rtol=1e-6, atol=1e-5)
    assert (out[rows // 2] == 0).all()
    assert (lse[rows // 2] == -float("inf")).all()


@pytest.mark.gpu
def test_merge_sink():
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [torch.float32], 6, 7, 48, 3)
    inf = float("inf")
    sink = torch.tensor([-inf, inf, 0.0, -1e30, 1e30, 20.0, -20.0], device="cuda")
    out, lse = sparse_mla.merge(outs, lses, attn_sink=sink)
    plain_out, plain_lse = sparse_mla.merge(outs, lses)
    expected, _ = merged(outs, lses, sink)
    np.testing.assert_allclose(out.double().cpu().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[:, 0], plain_out[:, 0])
    assert (out[:, 1] == 0).all()


@pytest.mark.gpu
def test_merge_strides_and_alignment():
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [torch.bfloat16], 9, 4, 64, 3)
    expected = sparse_mla.merge(outs, lses)
    odd = []
    for out in outs:
        wide = torch.full((4, 9, 65), float("nan"), device="cuda", dtype=out.dtype)
        view = wide.transpose(0, 1)[..., 1:]
        view.copy_(out)
        odd.append(view)
    out = torch.empty(9, 4, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    lse = torch.empty(4, 9, device="cuda").T
    turned = [each.T.contiguous().T for each in lses]
    sparse_mla.merge(odd, turned, out=out, lse=lse)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.gpu
def test_merge_scores_and_nan():
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [torch.float32], 4, 2, 8, 2)
    for out, lse, value in zip(outs, lses, (1e5, 1e5), strict=True):
        lse[0] = value
        out[0] = 1.0
    lses[0][1, 0] = float("nan")
    outs[0][1, 0] = 0.0
    out, lse = sparse_mla.merge(outs, lses)
    assert torch.allclose(out[0], torch.ones_like(out[0]))
    assert torch.allclose(lse[0], torch.full_like(lse[0], 1e5))
    assert out[1, 0].isnan().all()
    assert lse[1, 0].isnan()
    assert not out[1, 1].isnan().any()
    assert not out[2:].isnan().any()


@pytest.mark.gpu
def test_merge_past_two_to_the_31_elements(room):
    torch = pytest.importorskip("torch")
    rows, heads, d_v = 262_145, 16, 512
    room(16)
    out = torch.zeros(rows, heads, d_v, device="cuda", dtype=torch.float16)
    lse = torch.zeros(rows, heads, device="cuda")
    part = torch.ones(1, heads, d_v, device="cuda", dtype=torch.float16).expand(rows, -1, -1)
    sparse_mla.merge([part, part], [lse, lse.clone()], out=out)
    assert (out[-1] == 1).all()
    assert (out[rows // 2] == 1).all()
    assert out.view(-1)[2**31 - 1] == 1


@pytest.mark.gpu
def test_merge_is_repeatable_and_captured():
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [torch.bfloat16], 33, 16, 512, 5)
    first = sparse_mla.merge(outs, lses)
    for _ in range(5):
        again = sparse_mla.merge(outs, lses)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
    out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla.merge(outs, lses, out=out, lse=lse)
    lses[0].fill_(-float("inf"))
    expected = sparse_mla.merge(outs, lses)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


CAPTURE = """
import torch, sparse_mla
outs = [torch.ones(4, 8, 64, device="cuda") for _ in range(2)]
lses = [torch.zeros(4, 8, device="cuda") for _ in range(2)]
out, lse = torch.zeros(4, 8, 64, device="cuda"), torch.zeros(4, 8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    sparse_mla.merge(outs, lses, out=out, lse=lse)
graph.replay()
torch.cuda.synchronize()
print(float(out.min()), float(out.max()))
"""


@pytest.mark.gpu
def test_first_call_inside_a_capture():
    pytest.importorskip("torch")
    assert run(CAPTURE, None) == "1.0 1.0\n"


@pytest.mark.gpu
def test_merge_on_two_streams():
    torch = pytest.importorskip("torch")
    cases = [merge_case(torch, [torch.bfloat16], 64, 16, 512, 4, seed) for seed in range(2)]
    expected = [sparse_mla.merge(*case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results = []
    for stream, case in zip(streams, cases, strict=True):
        with torch.cuda.stream(stream):
            results.append(sparse_mla.merge(*case))
    torch.cuda.synchronize()
    for result, each in zip(results, expected, strict=True):
        assert torch.equal(result[0], each[0])
        assert torch.equal(result[1], each[1])


@pytest.mark.gpu
@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_two_devices():
    torch = pytest.importorskip("torch")
    outs, lses = merge_case(torch, [torch.float32], 5, 6, 32, 2)
    expected = sparse_mla.merge(outs, lses)
    there = sparse_mla.merge([out.to("cuda:1") for out in outs], [lse.to("cuda:1") for lse in lses])
    assert there[0].device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(there[0].cpu(), expected[0].cpu())
    assert torch.equal(there[1].cpu(), expected[1].cpu())
