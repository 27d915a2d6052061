"""On which stream a call is launched, and what waits for what.

On any machine with the made-up driver, which writes down what it is asked for; on a GPU with work
that is late: a result must wait for it, and nothing that comes later may overtake the call.
"""

from __future__ import annotations

import numpy as np
import pytest

import sparse_mla
import test_gpu_driver
from test_gpu_driver import needs_kernels, run

fake = test_gpu_driver.fake

# ------------------------------------------------------------------- with the made-up driver

# Stand-ins with as much of CuPy and JAX as the exchange looks at; 11 is CuPy's current stream.
SCRIPT = """
import sys
import types
import sparse_mla
from capsules import Producer
from fake_gpu import capture, calls, order, tensor
import numpy as np

class Cupy(Producer): pass

class Jax(Producer):
    adopted = 0

    def __dlpack_device__(self):
        return 2, 0

def from_dlpack(buffer):
    Jax.adopted += buffer.__dlpack_device__() == (2, 0)
    return buffer.__dlpack__(stream=5)

def get_current_stream(device):
    return types.SimpleNamespace(ptr=11)

cupy = types.ModuleType("cupy")
cupy.ndarray = Cupy
cupy.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
jax = types.ModuleType("jax")
jax.Array = Jax
jax.dlpack = types.SimpleNamespace(from_dlpack=from_dlpack)
sys.modules |= {"cupy": cupy, "jax": jax}

def attend(q=Producer, cache=Producer, indices=Producer, out=Producer, topk=4096, **keywords):
    slots = indices(np.zeros((1, topk), np.int32), device=(2, 0))
    made = {"out": tensor(1, 1, 4, kind=out), "lse": tensor(1, 1, kind=out)} if out else {}
    return sparse_mla.attend(tensor(1, 1, 8, kind=q), tensor(4, 2, 8, kind=cache), slots,
                             softmax_scale=1.0, head_dim_v=4, **made, **keywords)

sparse_mla.load("cuda:0")
"""


def orders(fake, code: str, **environment: str) -> list[str]:
    """What the driver was asked for, one list of lines for each `print(order())` of the code."""
    printed = run(SCRIPT + code, fake, **environment)
    return [" ".join(part.split("\n")).strip() for part in printed.split("\n\n")]


@needs_kernels
def test_one_framework_waits_for_nothing(fake):
    said = orders(fake, "attend(Cupy, Cupy, Cupy, Cupy, topk=8)\nprint(order())")
    assert said == ["11 runs", ""]


@needs_kernels
def test_two_frameworks_wait_for_each_other(fake):
    code = """
attend(Cupy, Producer, Cupy, Cupy, topk=8)
print(order())
attend(Producer, Cupy, Cupy, Producer, topk=8)
print(order())
sparse_mla.merge([tensor(1, 1, 4, kind=Cupy)], [tensor(1, 1, kind=Cupy)],
                 out=tensor(1, 1, 4), lse=tensor(1, 1))
print(order())
slots = Cupy(np.zeros(1, np.int64), device=(2, 0))
sparse_mla.append(tensor(4, 2, 8), slots, tensor(1, 8), cache_format="dense")
print(order())
import ctypes, fake_gpu
print(ctypes.c_int.in_dll(fake_gpu.driver, "fake_events").value)
"""
    assert orders(fake, code) == [
        "11 waits for 0 11 runs 0 waits for 11",
        "0 waits for 11 0 runs 11 waits for 0",
        "11 waits for 0 11 runs 0 waits for 11",
        "0 waits for 11 0 runs 11 waits for 0",
        "0",
    ]


@needs_kernels
def test_a_given_stream(fake):
    """The order of tensors is the caller's, new memory is ordered before the launch and behind it,
    the workspace is the pool's."""
    code = """
import types
cupy.empty = lambda shape, dtype: tensor(*shape, kind=Cupy)
cupy.dtype = np.dtype
import contextlib
Cupy.device = contextlib.nullcontext()
attend(Cupy, Cupy, Cupy, Cupy, topk=8, stream=7)
print(order())
attend(Cupy, Cupy, Cupy, None, topk=8, stream=7)
print(order())
attend(Cupy, Cupy, Cupy, Cupy, stream=7)
print(order())
attend(Cupy, Cupy, Cupy, None, stream=11)
print(order())
attend(Cupy, Producer, Cupy, Cupy, topk=8, stream=7)
print(order())
attend(Producer, Producer, Producer, Producer, topk=8, stream=1)
print(order())
"""
    assert orders(fake, code) == [
        "7 runs",
        "7 waits for 11 7 runs 11 waits for 7",
        "7 takes memory 7 runs 7 runs 7 gives memory back",
        "11 runs 11 runs",
        "7 waits for 0 7 runs",
        "0 runs",
        "",
    ]


@needs_kernels
def test_jax_is_waited_for(fake):
    code = """
out, lse = attend(Jax, Jax, Jax, None)
print(order())
attend(Cupy, Cupy, Jax, Cupy, topk=8)
print(order())
sparse_mla.merge([tensor(1, 1, 4, kind=Jax)], [tensor(1, 1, kind=Jax)])
print(order())
sparse_mla.unpack(tensor(4, 2, 8, kind=Jax))
print(order())
held = calls("cuMemFree")
del out, lse
print(Jax.adopted, held, calls("cuMemFree"))
"""
    assert orders(fake, code) == [
        "0 takes memory 0 runs 0 runs 0 gives memory back host waits for 0",
        "11 runs host waits for 11",
        "0 runs host waits for 0",
        "0 runs host waits for 0",
        "5 3 5",
    ]


@needs_kernels
def test_captures(fake):
    code = """
capture(11)
attend(Cupy, Producer, Cupy, Cupy, topk=8)
print(order())
for keywords in ({"q": Producer, "cache": Cupy}, {"q": Cupy, "cache": Jax}):
    try:
        attend(indices=Producer, out=Producer, topk=8, **keywords)
    except ValueError as error:
        print(error, order(), sep="")
"""
    said = orders(fake, code)
    assert said[0] == "11 runs"
    assert said[1].startswith("stream: a tensor's framework is capturing its current stream")
    assert "stream: a call with JAX arrays waits for the GPU, which a capture" in said[1]
    assert "runs" not in said[1]


@needs_kernels
@pytest.mark.parametrize(
    "function", ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing"]
)
def test_failures_of_ordering_are_told(fake, function):
    code = """
import fake_gpu
for _ in range(2):
    try:
        attend(Cupy, Producer, Cupy, Cupy, topk=8)
    except sparse_mla.CudaError as error:
        print(error, fake_gpu.driver.fake_depth(), "runs" in order())
"""
    line = f"{function} failed: CUDA_ERROR_FAKE (999): made up 0 False"
    assert run(SCRIPT + code, fake, FAKE_CUDA_FAIL=f"{function}=999") == f"{line}\n{line}\n"


@needs_kernels
def test_out_of_memory(fake):
    code = """
try:
    attend(Jax, Jax, Jax, None, topk=8)
except MemoryError as error:
    print(error)
"""
    # Loading allocates too; the failure is switched on after it.
    late = "import ctypes\nctypes.CDLL(None).setenv(b'FAKE_CUDA_FAIL', b'cuMemAlloc=2', 1)\n"
    said = run(SCRIPT + late + code, fake)
    assert said.startswith("out: 16 bytes of GPU memory: cuMemAlloc failed")

    late = "import ctypes\nctypes.CDLL(None).setenv(b'FAKE_CUDA_FAIL', b'cuMemAllocAsync=2', 1)\n"
    code = """
try:
    attend(Cupy, Cupy, Cupy, Cupy, stream=7)
except sparse_mla.CudaError as error:
    print(error.code, "runs" in order())
"""
    assert run(SCRIPT + late + code, fake) == "2 False\n"


# ------------------------------------------------------------------------------- on a GPU

LATE = 40_000_000  # cycles that a stream sleeps, some 20 ms
ROWS, HEADS, TOPK, SLOTS = 4, 16, 2048, 4096
KEYWORDS = {"softmax_scale": 0.1, "head_dim_v": 512}


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    torch.cuda.synchronize()
    yield torch
    torch.cuda.synchronize()


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def case():
    """q, kv_cache, indices in NumPy, and what comes out."""
    rng = np.random.default_rng(11)
    q = rng.standard_normal((ROWS, HEADS, 576), np.float32)
    cache = rng.standard_normal((SLOTS // 64, 64, 576), np.float32)
    indices = rng.integers(-1, SLOTS, (ROWS, TOPK)).astype(np.int32)
    return q, cache, indices, sparse_mla.attend(q, cache, indices, **KEYWORDS)


def close(results, expected) -> None:
    for result, wanted in zip(results, expected, strict=True):
        result = result.get() if hasattr(result, "get") else result
        result = result.cpu() if hasattr(result, "cpu") else result
        np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-3, atol=1e-4)


def sleep(torch, stream: int) -> None:
    """Work on any framework's stream that takes a while."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else None):
        torch.cuda._sleep(LATE)


def on_gpu(torch, case):
    return [torch.from_numpy(array).cuda() for array in case[:3]]


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_pytorch_work_that_is_late(torch, case, side):
    q, cache, indices = on_gpu(torch, case)
    late = q.clone()
    q.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        q.copy_(late)
        results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        q.zero_()
        results = [result.clone() for result in results]
    stream.synchronize()
    close(results, case[3])


@pytest.mark.gpu
def test_pytorch_cache_writers_on_a_side_stream(torch, case):
    _, cache, _ = on_gpu(torch, case)
    rows = torch.randn(128, 576, device="cuda")
    late = rows.clone()
    rows.zero_()
    slots = torch.arange(128, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(LATE)
        rows.copy_(late)
        sparse_mla.append(cache, slots, rows, cache_format="dense")
        packed = sparse_mla.pack(rows, cache_format="dense", block_size=64)
        unpacked = sparse_mla.unpack(packed)
        rows.zero_()
        written = cache[:2].clone()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(unpacked, late)
    assert torch.equal(written.reshape(128, 576), late)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_cupy_work_that_is_late(torch, cupy, case, side):
    q, cache, indices = (cupy.asarray(array) for array in case[:3])
    late = q.copy()
    q[...] = 0
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null as stream:
        sleep(torch, stream.ptr)
        q[...] = late
        results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        assert all(type(result) is cupy.ndarray for result in results)
        q[...] = 0
        results = [result * 1 for result in results]
        stream.synchronize()
    close(results, case[3])


@pytest.mark.gpu
def test_jax_work_that_is_late(case):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    jnp = jax.numpy
    q, cache, indices = (jnp.asarray(array) for array in case[:3])

    @jax.jit
    def slow(q, matrix):
        for _ in range(60):
            matrix = matrix @ matrix
        return q + 0 * matrix[0, 0]

    matrix = jnp.eye(8192, dtype=jnp.float32) / 2
    slow(q, matrix).block_until_ready()
    out, lse = sparse_mla.attend(slow(q, matrix), cache, indices, **KEYWORDS)
    assert isinstance(out, jax.Array)
    assert out.devices() == q.devices()
    doubled = jax.jit(lambda x: 2 * x)(out)
    close([np.asarray(doubled) / 2, lse], case[3])
    del out, lse, q
    again = [jnp.full((ROWS, HEADS, 512), jnp.nan) for _ in range(20)]
    assert all(jnp.isnan(each).all() for each in again)
    close([np.asarray(doubled) / 2], case[3][:1])


@pytest.mark.gpu
@pytest.mark.parametrize("late_framework", ["torch", "cupy"])
def test_two_frameworks_on_two_streams(torch, cupy, case, late_framework):
    """Each stream's work before the call is waited for, and its work after the call waits."""
    q, cache, indices = on_gpu(torch, case)
    right_q, right = q.clone(), indices.clone()
    q.zero_()
    indices.fill_(-1)
    out = cupy.zeros((ROWS, HEADS, 512), np.float32)
    slots, right_slots = cupy.from_dlpack(indices), cupy.from_dlpack(right)
    torch.cuda.synchronize()
    ours, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(ours), theirs:
        sleep(torch, ours.cuda_stream if late_framework == "torch" else theirs.ptr)
        q.copy_(right_q)
        slots[...] = right_slots
        _, lse = sparse_mla.attend(q, cache, slots, out=out, **KEYWORDS)
        slots[...] = -1
        read = out * 1
        lse = lse.clone()
        q.zero_()
        theirs.synchronize()
        ours.synchronize()
    close([read, lse], case[3])


@pytest.mark.gpu
def test_mixed_frameworks_with_jax(torch, cupy, case):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    q, cache, _ = on_gpu(torch, case)
    close(sparse_mla.attend(q, cache, jax.numpy.asarray(case[2]), **KEYWORDS), case[3])
    out, lse = sparse_mla.attend(
        jax.numpy.asarray(case[0]), cache, cupy.asarray(case[2]), **KEYWORDS
    )
    assert isinstance(out, jax.Array)
    close([out, lse], case[3])


def given_streams(torch, cupy, stream) -> list:
    forms = [stream.cuda_stream]
    forms += [stream] if hasattr(stream, "__cuda_stream__") else []
    return forms + ([cupy.cuda.ExternalStream(stream.cuda_stream)] if cupy else [])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")
def test_a_given_stream_is_used(torch, cupy, case):
    q, cache, indices = on_gpu(torch, case)
    right = q.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in given_streams(torch, cupy, side):
        q.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            q.copy_(right)
        results = sparse_mla.attend(q, cache, indices, stream=stream, **KEYWORDS)
        side.synchronize()
        close(results, case[3])
    for stream in (0, 1, torch.cuda.default_stream().cuda_stream):
        close(sparse_mla.attend(q, cache, indices, stream=stream, **KEYWORDS), case[3])


@pytest.mark.gpu
def test_new_outputs_under_a_given_stream_wait_for_the_memorys_last_use(torch, case):
    q, cache, indices = on_gpu(torch, case)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        # Freed with work pending: the allocator gives the same memory to `out`.
        last_use = torch.empty(ROWS, HEADS, 512, device="cuda")
        address = last_use.data_ptr()
        torch.cuda._sleep(LATE)
        last_use.fill_(7)
        del last_use
        out, lse = sparse_mla.attend(q, cache, indices, stream=side.cuda_stream, **KEYWORDS)
        torch.cuda.synchronize()
        close([out, lse], case[3])
        if out.data_ptr() == address:
            return
    pytest.skip("the allocator did not use the memory again")


@pytest.mark.gpu
def test_the_workspace_of_a_given_stream_is_not_used_again_too_early(torch, cupy, case):
    plan = sparse_mla.plan(batch=ROWS, heads=HEADS, topk=TOPK, dtype="float32", device="cuda:0")
    assert plan["workspace_bytes"] > 0
    q, cache, indices = on_gpu(torch, case)
    out = torch.empty(ROWS, HEADS, 512, device="cuda")
    lse = torch.empty(ROWS, HEADS, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
    sparse_mla.attend(q, cache, indices, out=out, lse=lse, stream=side.cuda_stream, **KEYWORDS)
    floats = plan["workspace_bytes"] // 4
    taken = [torch.full((floats,), float("nan"), device="cuda") for _ in range(8)]
    taken += [cupy.full((floats,), np.nan, np.float32) for _ in range(8)]
    torch.cuda.synchronize()
    close([out, lse], case[3])
    del taken


@pytest.mark.gpu
def test_freed_at_once_after_a_call_on_the_current_side_stream(torch, case):
    """Inputs and workspace of the side stream's own memory are used again in its order."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        q, cache, indices = on_gpu(torch, case)
        torch.cuda._sleep(LATE)
        results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        sizes = [(each.numel(), each.dtype) for each in (q, cache, indices)]
        del q, cache, indices
        taken = [torch.ones(size, device="cuda").to(dtype) for size, dtype in sizes for _ in "ab"]
    side.synchronize()
    close(results, case[3])
    del taken


@pytest.mark.gpu
def test_freed_at_once_by_the_other_framework(torch, cupy, case):
    """CuPy's memory, read by a launch on PyTorch's stream, is used again after the launch."""
    q, cache, _ = on_gpu(torch, case)
    torch.cuda.synchronize()
    ours, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(ours), theirs:
        indices = cupy.asarray(case[2])
        torch.cuda._sleep(LATE)
        results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        del indices
        taken = [cupy.full((ROWS, TOPK), -1, np.int32) for _ in range(4)]
        ours.synchronize()
        theirs.synchronize()
    close(results, case[3])
    del taken


# ----------------------------------------------------------------------------- captures


@pytest.mark.gpu
def test_capture_in_pytorch(torch, case):
    q, cache, indices = on_gpu(torch, case)
    sparse_mla.attend(q, cache, indices, **KEYWORDS)
    right, other = q.clone(), torch.randn_like(q)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        grown = torch.cuda.memory_allocated() - before
    assert ROWS * HEADS * 513 * 4 <= grown < ROWS * HEADS * 513 * 4 + 4096
    for wanted in (other, right):
        q.copy_(wanted)
        graph.replay()
        torch.cuda.synchronize()
        close(results, [each.cpu() for each in sparse_mla.attend(q, cache, indices, **KEYWORDS)])
    close(results, case[3])


@pytest.mark.gpu
def test_capture_in_pytorch_with_tensors_of_cupy(torch, cupy, case):
    """CuPy's current stream is not part of the capture: the graph's replays are not ordered with
    it, and the capture works."""
    q, cache, _ = on_gpu(torch, case)
    indices = cupy.asarray(case[2])
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        cupy.cuda.Device().synchronize()
        graph = torch.cuda.CUDAGraph()
        with stream, torch.cuda.graph(graph):
            results = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        graph.replay()
        torch.cuda.synchronize()
        close(results, case[3])


@pytest.mark.gpu
def test_capture_of_a_given_stream(torch, case):
    """The workspace becomes a node of the graph."""
    q, cache, indices = on_gpu(torch, case)
    out = torch.empty(ROWS, HEADS, 512, device="cuda")
    lse = torch.empty(ROWS, HEADS, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        sparse_mla.attend(q, cache, indices, out=out, lse=lse, stream=side.cuda_stream, **KEYWORDS)
        current.wait_stream(side)
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        close([out, lse], case[3])


@pytest.mark.gpu
def test_capture_in_cupy(cupy, case):
    q, cache, indices = (cupy.asarray(array) for array in case[:3])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out, lse = sparse_mla.attend(q, cache, indices, **KEYWORDS)
        right, other = q.copy(), -q
        stream.synchronize()
        stream.begin_capture()
        sparse_mla.attend(q, cache, indices, out=out, lse=lse, **KEYWORDS)
        graph = stream.end_capture()
        for wanted in (other, right):
            q[...] = wanted
            graph.launch(stream)
            stream.synchronize()
            expected = sparse_mla.attend(q, cache, indices, **KEYWORDS)
            stream.synchronize()
            close([out, lse], [each.get() for each in expected])
    close([out, lse], case[3])


FIRST_CALL = """
import torch, sparse_mla
q = torch.ones(2, 16, 576, device="cuda", dtype=torch.bfloat16)
cache = torch.ones(64, 64, 576, device="cuda", dtype=torch.bfloat16)
indices = torch.zeros(2, 2048, device="cuda", dtype=torch.int32)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = sparse_mla.attend(q, cache, indices, softmax_scale=0.1)
graph.replay()
torch.cuda.synchronize()
print(float(out.min()), float(out.max()))
"""


@pytest.mark.gpu
def test_first_call_inside_a_capture():
    pytest.importorskip("torch")
    assert run(FIRST_CALL, None) == "1.0 1.0\n"
