"""The same call from NumPy, PyTorch, CuPy and JAX: no copy, results in the caller's framework.

test_exchange.py has the single objects and what is refused; here are whole calls on real arrays,
on the CPU and on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import sparse_mla

TOKENS, HEADS, D_QK, D_V, BLOCKS, BLOCK_SIZE, TOPK = 6, 4, 96, 64, 8, 16, 40
KEYWORDS = {"softmax_scale": 0.2, "head_dim_v": D_V}

gpu = pytest.mark.gpu


class Framework:
    """How tensors are made, read and found in memory in one framework on one device."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.module = importlib.import_module({"jax": "jax.numpy"}.get(name, name))

    def tensor(self, array: np.ndarray) -> Any:
        if self.name == "torch":
            return self.module.from_numpy(array.copy()).to(self.device)
        return self.module.asarray(array.copy())

    def numpy(self, tensor: Any) -> np.ndarray:
        if self.name == "torch":
            return tensor.float().cpu().numpy()
        if self.name == "cupy":
            return tensor.astype(np.float32).get()
        return np.asarray(tensor).astype(np.float32)

    def address(self, tensor: Any) -> int:
        match self.name:
            case "torch":
                return tensor.data_ptr()
            case "cupy":
                return tensor.data.ptr
            case "jax":
                return tensor.unsafe_buffer_pointer()
        return tensor.ctypes.data

    def owns(self, tensor: Any) -> bool:
        if self.name == "jax":
            import jax

            wanted = jax.devices("cpu" if self.device == "cpu" else "gpu")[0]
            return isinstance(tensor, jax.Array) and tensor.devices() == {wanted}
        if self.name == "torch":
            return type(tensor) is self.module.Tensor and tensor.device.type == self.device
        return type(tensor) is self.module.ndarray

    def half(self, tensor: Any) -> Any:
        """bfloat16."""
        if self.name == "torch":
            return tensor.bfloat16()
        import ml_dtypes

        return tensor.astype(ml_dtypes.bfloat16)


@pytest.fixture(
    params=[
        ("numpy", "cpu"),
        ("torch", "cpu"),
        ("jax", "cpu"),
        pytest.param(("torch", "cuda"), marks=gpu),
        pytest.param(("cupy", "cuda"), marks=gpu),
        pytest.param(("jax", "cuda"), marks=gpu),
    ],
    ids="-".join,
)
def framework(request) -> Framework:
    name, device = request.param
    pytest.importorskip(name, reason=f"{name} is not installed")
    made = Framework(name, device)
    if name != "jax":
        yield made
        return
    import jax

    try:
        where = jax.devices("cpu" if device == "cpu" else "gpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no GPU here")
    with jax.default_device(where):
        yield made


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(17)
    return {
        "q": rng.standard_normal((TOKENS, HEADS, D_QK), np.float32),
        "kv_cache": rng.standard_normal((BLOCKS, BLOCK_SIZE, D_QK), np.float32),
        "indices": rng.integers(-1, BLOCKS * BLOCK_SIZE, (TOKENS, TOPK)).astype(np.int32),
        "topk_lens": rng.integers(0, TOPK, TOKENS).astype(np.int32),
        "attn_sink": rng.standard_normal(HEADS, np.float32),
    }


def close(framework: Framework, results: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(
            framework.numpy(result), np.asarray(want, np.float32), rtol=tolerance, atol=tolerance
        )


# ------------------------------------------------------------------------------ every framework


def test_results_are_the_callers(framework, arrays):
    tensors = {name: framework.tensor(array) for name, array in arrays.items()}
    results = sparse_mla.attend(**tensors, **KEYWORDS)
    assert all(framework.owns(result) for result in results)
    assert results[0].shape == (TOKENS, HEADS, D_V)
    assert results[1].shape == (TOKENS, HEADS)
    close(framework, results, sparse_mla.attend(**arrays, **KEYWORDS))


def test_given_outputs_are_written_in_place(framework, arrays):
    if framework.name == "jax":
        pytest.skip("JAX arrays are immutable: test_jax_arrays_are_never_written")
    tensors = {name: framework.tensor(array) for name, array in arrays.items()}
    out = framework.tensor(np.zeros((TOKENS, HEADS, D_V), np.float32))
    lse = framework.tensor(np.zeros((TOKENS, HEADS), np.float32))
    max_logits = framework.tensor(np.zeros((TOKENS, HEADS), np.float32))
    addresses = [framework.address(each) for each in (out, lse)]
    results = sparse_mla.attend(**tensors, out=out, lse=lse, max_logits=max_logits, **KEYWORDS)
    assert results[0] is out
    assert results[1] is lse
    assert [framework.address(each) for each in results] == addresses
    close(framework, results, sparse_mla.attend(**arrays, **KEYWORDS))
    assert framework.numpy(max_logits)[arrays["topk_lens"] > 20].all()


def test_inputs_are_read_where_they_are(framework, arrays):
    """What is changed in the cache's own memory is seen, views included."""
    if framework.name == "jax":
        pytest.skip("JAX arrays are immutable")
    tensors = {name: framework.tensor(array) for name, array in arrays.items()}
    whole = tensors["kv_cache"]
    tensors["kv_cache"] = whole[::2]
    indices = arrays["indices"] % (BLOCKS * BLOCK_SIZE // 2)
    tensors["indices"] = framework.tensor(indices.astype(np.int32))
    whole[2] = 0.0
    changed = arrays["kv_cache"].copy()
    changed[2] = 0.0
    wanted = arrays | {"kv_cache": changed[::2], "indices": indices.astype(np.int32)}
    results = sparse_mla.attend(**tensors, **KEYWORDS)
    close(framework, results, sparse_mla.attend(**wanted, **KEYWORDS))


def test_bfloat16(framework, arrays):
    pytest.importorskip("ml_dtypes")
    tensors = {name: framework.tensor(array) for name, array in arrays.items()}
    for name in ("q", "kv_cache"):
        tensors[name] = framework.half(tensors[name])
    out, lse = sparse_mla.attend(**tensors, **KEYWORDS)
    assert "bfloat16" in str(out.dtype)
    assert "float32" in str(lse.dtype)
    close(framework, (out, lse), sparse_mla.attend(**arrays, **KEYWORDS), 0.05)


def test_caches_and_merge(framework, arrays):
    rows = framework.tensor(np.random.default_rng(2).standard_normal((40, 576), np.float32))
    cache = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=16)
    assert framework.owns(cache)
    assert cache.shape == (3, 16, 656)
    assert "uint8" in str(cache.dtype)
    numbers = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
    assert framework.owns(numbers)
    close(framework, [numbers[:40]], [framework.numpy(rows)], 0.07)

    q = framework.tensor(np.random.default_rng(3).standard_normal((2, 4, 576), np.float32) / 8)
    slots = np.arange(40, dtype=np.int32).reshape(1, 40).repeat(2, 0)
    keywords = {"softmax_scale": 0.1, "cache_format": "fp8_ds_mla"}
    half = framework.half(q)
    whole = sparse_mla.attend(half, cache, framework.tensor(slots), **keywords)
    parts = [
        sparse_mla.attend(half, cache, framework.tensor(slots[:, part].copy()), **keywords)
        for part in (slice(0, 15), slice(15, 40))
    ]
    merged = sparse_mla.merge([out for out, _ in parts], [lse for _, lse in parts])
    assert all(framework.owns(each) for each in merged)
    close(framework, merged, [framework.numpy(each) for each in whole], 0.02)

    report = sparse_mla.check(cache, framework.tensor(slots + 30), cache_format="fp8_ds_mla")
    assert report.faults
    if framework.name != "jax":
        sparse_mla.append(
            cache, framework.tensor(np.array([1, -1])), rows[:2], cache_format="fp8_ds_mla"
        )
        again = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
        close(framework, [again[1]], [framework.numpy(numbers[0])], 0.0)


def test_faults_name_the_entry(framework, arrays):
    tensors = {name: framework.tensor(array) for name, array in arrays.items()}
    bad = arrays["indices"].copy()
    bad[2, 0] = 4096
    tensors["indices"] = framework.tensor(bad)
    del tensors["topk_lens"]
    with pytest.raises(sparse_mla.IndexFault, match=r"indices\[2, 0\] = 4096"):
        sparse_mla.attend(**tensors, validate="raise", **KEYWORDS)


# ------------------------------------------------------------------------------ several at once


def test_mixed_frameworks_on_the_cpu(arrays):
    torch = pytest.importorskip("torch")
    wanted = sparse_mla.attend(**arrays, **KEYWORDS)
    mixed = arrays | {
        "q": torch.from_numpy(arrays["q"]),
        "indices": jax_array(arrays["indices"], "cpu"),
    }
    out, lse = sparse_mla.attend(**mixed, **KEYWORDS)
    assert type(out) is type(lse) is torch.Tensor
    np.testing.assert_array_equal(out.numpy(), wanted[0])


@gpu
@pytest.mark.parametrize("first", ["torch", "cupy", "jax"])
def test_mixed_frameworks_on_a_gpu(arrays, first):
    pytest.importorskip("torch"), pytest.importorskip("cupy"), pytest.importorskip("jax")
    order = {"torch": "tcj", "cupy": "cjt", "jax": "jtc"}[first]
    made = {
        each: Framework({"t": "torch", "c": "cupy", "j": "jax"}[each], "cuda") for each in "tcj"
    }
    tensors = {
        name: made[order[i % 3]].tensor(array) for i, (name, array) in enumerate(arrays.items())
    }
    results = sparse_mla.attend(**tensors, **KEYWORDS)
    assert all(made[order[0]].owns(result) for result in results)
    close(made[order[0]], results, sparse_mla.attend(**arrays, **KEYWORDS))


@gpu
@pytest.mark.parametrize("name", ["kv_cache", "indices", "attn_sink", "out"])
def test_mixed_devices_are_refused_by_name(arrays, name):
    torch = pytest.importorskip("torch")
    arrays = arrays | {"out": np.zeros((TOKENS, HEADS, D_V), np.float32)}
    tensors = {each: torch.from_numpy(array) for each, array in arrays.items()}
    here = {each: tensor.cuda() for each, tensor in tensors.items()} | {name: tensors[name]}
    with pytest.raises(ValueError, match=rf"{name}: .*cuda:0.*cpu"):
        sparse_mla.attend(**here, **KEYWORDS)
    there = tensors | {name: tensors[name].cuda()}
    with pytest.raises(ValueError, match=rf"{name}: .*cpu.*cuda:0"):
        sparse_mla.attend(**there, **KEYWORDS)
    assert not here["out"].any()
    assert not there["out"].any()


# ------------------------------------------------------------------------------ PyTorch


@gpu
def test_pytorch_allocates_the_results_and_nothing_else(arrays):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
    sparse_mla.attend(**tensors, **KEYWORDS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = sparse_mla.attend(**tensors, **KEYWORDS)
    held = sum(-(-each.numel() * each.element_size() // 512) * 512 for each in results)
    assert torch.cuda.memory_allocated() - before == held


@gpu
def test_what_pytorch_tensors_on_a_gpu_are_refused_for(arrays):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
    gradient = tensors["q"].clone().requires_grad_()
    with pytest.raises(BufferError, match=r"q: .*requires grad.*q\.detach\(\)"):
        sparse_mla.attend(**(tensors | {"q": gradient}), **KEYWORDS)
    with torch.no_grad():
        sparse_mla.attend(**(tensors | {"q": gradient}), **KEYWORDS)
    negative = torch.complex(tensors["attn_sink"], tensors["attn_sink"]).conj().imag
    assert negative.is_neg()
    with pytest.raises(BufferError, match=r"attn_sink: .*negative bit.*resolve_neg\(\)"):
        sparse_mla.attend(**(tensors | {"attn_sink": negative}), **KEYWORDS)
    turned = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"q: .*contiguous"):
        sparse_mla.attend(**(tensors | {"q": turned}), **KEYWORDS)
    with pytest.raises(BufferError, match=r"q: .*to_dense"):
        sparse_mla.attend(**(tensors | {"q": tensors["q"].to_sparse()}), **KEYWORDS)


@gpu
def test_pytorch_subclasses_on_a_gpu(arrays):
    torch = pytest.importorskip("torch")

    class Plain(torch.Tensor):
        pass

    tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
    expected = sparse_mla.attend(**tensors, **KEYWORDS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        q = (tensors["q"] * 1).as_subclass(Plain)
        results = sparse_mla.attend(**(tensors | {"q": q}), **KEYWORDS)
    torch.cuda.synchronize()
    assert torch.equal(results[0], expected[0])
    parameter = torch.nn.Parameter(tensors["attn_sink"], requires_grad=False)
    results = sparse_mla.attend(**(tensors | {"attn_sink": parameter}), **KEYWORDS)
    assert torch.equal(results[0], expected[0])


@gpu
def test_memory_errors_are_the_frameworks_own():
    torch = pytest.importorskip("torch")
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory"):
        sparse_mla.unpack(torch.ones(1, 1, 8, device="cuda").expand(2**38, 1, 8))
    cupy = pytest.importorskip("cupy")
    wide = cupy.broadcast_to(cupy.ones((1, 1, 8), np.float32), (2**38, 1, 8))
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        sparse_mla.unpack(wide)


@gpu
def test_pinned_memory_is_the_cpus(arrays):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array).pin_memory() for name, array in arrays.items()}
    results = sparse_mla.attend(**tensors, **KEYWORDS)
    wanted = sparse_mla.attend(**arrays, **KEYWORDS)
    np.testing.assert_array_equal(results[0].numpy(), wanted[0])


# ------------------------------------------------------------------------------ JAX


def jax_array(array: np.ndarray, device: str) -> Any:
    jax = pytest.importorskip("jax")
    try:
        return jax.device_put(array, jax.devices("cpu" if device == "cpu" else "gpu")[0])
    except RuntimeError:
        pytest.skip("JAX has no GPU here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_jax_arrays_are_never_written(arrays, device):
    tensors = {name: jax_array(array, device) for name, array in arrays.items()}
    out = jax_array(np.zeros((TOKENS, HEADS, D_V), np.float32), device)
    with pytest.raises(ValueError, match=r"out: .*read-only"):
        sparse_mla.attend(**tensors, out=out, **KEYWORDS)
    assert not np.asarray(out).any()
    cache = jax_array(np.zeros((2, 4, 8), np.float32), device)
    slots, rows = (jax_array(each, device) for each in (np.arange(2), np.ones((2, 8), np.float32)))
    with pytest.raises(ValueError, match=r"kv_cache: .*read-only"):
        sparse_mla.append(cache, slots, rows, cache_format="dense")
    assert not np.asarray(cache).any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_jax_inputs_may_go_at_once(arrays, device):
    """Results stand on their own: nothing of them is memory of an input or of another call."""
    import gc

    wanted = sparse_mla.attend(**arrays, **KEYWORDS)
    kept = []
    for _ in range(20):
        tensors = {name: jax_array(array, device) for name, array in arrays.items()}
        kept.append(sparse_mla.attend(**tensors, **KEYWORDS))
        del tensors
        gc.collect()
    for out, lse in kept:
        np.testing.assert_allclose(np.asarray(out), wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_jax_tracers_get_a_way_out(arrays, device):
    jax = pytest.importorskip("jax")
    tensors = {name: jax_array(array, device) for name, array in arrays.items()}
    with pytest.raises(TypeError, match=r"q: a JAX tracer .* outside jax\.jit.*pure_callback"):
        jax.jit(lambda q: sparse_mla.attend(**(tensors | {"q": q}), **KEYWORDS))(tensors["q"])

    def on_the_host(q):
        return sparse_mla.attend(**(arrays | {"q": np.asarray(q)}), **KEYWORDS)

    shapes = (
        jax.ShapeDtypeStruct((TOKENS, HEADS, D_V), np.float32),
        jax.ShapeDtypeStruct((TOKENS, HEADS), np.float32),
    )
    out, _ = jax.jit(lambda q: jax.pure_callback(on_the_host, shapes, q))(tensors["q"])
    wanted = sparse_mla.attend(**arrays, **KEYWORDS)
    np.testing.assert_allclose(np.asarray(out), wanted[0], rtol=1e-5, atol=1e-5)
