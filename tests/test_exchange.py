"""Objects of every kind become tensors, and are given back: DLPack, NumPy, PyTorch, JAX."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest

import capsules
import sparse_mla
from capsules import Producer

KINDS = {"versioned": (1, 3), "newer": (1, 9), "legacy": None}
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
TOO_MUCH = pytest.mark.skipif(SANITIZED, reason="AddressSanitizer ends at an allocation this large")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def ml_dtypes():
    return pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")


@pytest.fixture
def jnp():
    return pytest.importorskip("jax.numpy", reason="JAX is not installed")


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def version(request):
    return request.param


def numbers(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


def read(tensor) -> np.ndarray:
    """The numbers that the package sees in a float tensor of (slots, row)."""
    return np.asarray(sparse_mla.unpack(tensor, cache_format="dense"))


def problem(tokens=3, heads=2, blocks=4, block_size=2, width=8, topk=5):
    """q, kv_cache, indices and keywords of a small dense call, in NumPy."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((tokens, heads, width), np.float32)
    cache = rng.standard_normal((blocks, block_size, width), np.float32)
    indices = rng.integers(-1, blocks * block_size, (tokens, topk)).astype(np.int32)
    return q, cache, indices, {"softmax_scale": 0.5, "head_dim_v": 4}


def same(results, expected) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), wanted)


# ------------------------------------------------------------------------------ capsules


def test_capsule_is_read_in_place_and_given_back_once(version):
    producer = Producer(numbers(6, 8), version=version)
    np.testing.assert_array_equal(read(producer), producer.array)
    assert (producer.made, producer.deleted) == (1, 1)
    assert producer.keywords == {"max_version": (1, 3)}


def test_deleter_may_be_null(version):
    producer = Producer(numbers(6, 8), version=version, deleter=False)
    np.testing.assert_array_equal(read(producer), producer.array)
    assert (producer.made, producer.deleted) == (1, 0)


@pytest.mark.parametrize("major", [0, 2, 2**31])
def test_of_another_major_version_only_the_deleter_is_touched(major):
    producer = Producer(numbers(6, 8), version=(major, 5), poison=True)
    with pytest.raises(BufferError, match=rf"kv_cache: expected DLPack 1.x, got .* {major}\.5"):
        read(producer)
    assert (producer.made, producer.deleted) == (1, 1)

    producer = Producer(numbers(6, 8), version=(major, 5), poison=True, deleter=False)
    with pytest.raises(BufferError, match=r"DLPack"):
        read(producer)


def test_null_strides_are_row_major(version):
    producer = Producer(numbers(3, 2, 8), version=version, strides=None)
    np.testing.assert_array_equal(read(producer), producer.array.reshape(6, 8))


def test_byte_offset(version):
    array = numbers(6, 8)
    producer = Producer(array, version=version, byte_offset=2 * 8 * 4, shape=(4, 8))
    np.testing.assert_array_equal(read(producer), array[2:])


def test_negative_strides(version):
    producer = Producer(numbers(6, 8)[::-1], version=version)
    np.testing.assert_array_equal(read(producer), producer.array)


@pytest.mark.parametrize("stride", [0, -7, 2**62, -(2**63)])
def test_strides_of_size_1_mean_nothing(version, stride):
    array = numbers(3, 1, 8)
    producer = Producer(array, version=version, strides=(8, stride, 1))
    np.testing.assert_array_equal(read(producer), array[:, 0])
    producer = Producer(numbers(1, 1, 1), version=version, strides=(stride, stride, stride))
    assert read(producer).shape == (1, 1)


def test_without_elements_data_may_be_null(version):
    producer = Producer(numbers(0, 2, 8), version=version, data=None, strides=(2**62, 3, 5))
    assert read(producer).shape == (0, 8)
    assert producer.deleted == 1


BAD_CAPSULES = {
    "lanes": (ValueError, "vectors of 2", {"lanes": 2}),
    "no lanes": (ValueError, "vectors of 0", {"lanes": 0}),
    "bits 0": (TypeError, "float0", {"bits": 0}),
    "6 dimensions": (ValueError, "at most 5 dimensions, got 6", {"ndim": 6}),
    "-1 dimensions": (ValueError, "at most 5 dimensions, got -1", {"ndim": -1}),
    "no shape": (ValueError, "without a shape", {"shape": None}),
    "negative size": (ValueError, "negative size -3", {"shape": (-3, 8)}),
    "too many elements": (ValueError, r"2\^63", {"shape": (2**62, 8), "strides": (0, 1)}),
    "far row-major": (ValueError, r"2\^47", {"shape": (2**44, 8), "strides": None}),
    "CuPy's negative stride": (ValueError, r"2\^47", {"strides": (2**62 - 8, 1)}),
    "most negative stride": (ValueError, r"2\^47", {"strides": (-(2**63), 1)}),
    "far stride": (ValueError, r"2\^47", {"strides": (2**43, 1)}),
    "below address 0": (ValueError, r"2\^47", {"strides": (-(2**42), 1), "data": 2**20}),
    "far offset": (ValueError, "byte offset", {"byte_offset": 2**63}),
    "misaligned": (ValueError, "misaligned.*multiple of 4 bytes", {"byte_offset": 2}),
    "no data": (BufferError, "no data", {"data": None}),
    "ROCm": (BufferError, "ROCm", {"device": (capsules.ROCM, 0)}),
    "unknown device": (BufferError, "unknown device.*type 99", {"device": (99, 0)}),
    "int16": (TypeError, "int16", {"code": 0, "bits": 16}),
    "float64": (TypeError, "float64", {"bits": 64, "shape": (3, 8)}),
    "complex64": (TypeError, "complex64", {"code": 5, "bits": 64, "shape": (3, 8)}),
    "bool": (TypeError, "bool", {"code": 6, "bits": 8}),
    "float8_e5m2": (TypeError, "float8_e5m2", {"code": capsules.FLOAT8_E5M2, "bits": 8}),
    "unknown dtype": (TypeError, "DLPack dtype 77", {"code": 77, "bits": 8}),
}


@pytest.mark.parametrize(("error", "match", "fields"), BAD_CAPSULES.values(), ids=BAD_CAPSULES)
def test_bad_capsules_are_refused_by_name_and_given_back(version, error, match, fields):
    producer = Producer(numbers(6, 8), version=version, **fields)
    with pytest.raises(error, match=f"(?s)kv_cache: .*{match}"):
        read(producer)
    gc.collect()
    assert (producer.made, producer.deleted) == (1, 1)


def test_pinned_memory_counts_as_cpu(version):
    producer = Producer(numbers(6, 8), version=version, device=(capsules.CUDA_HOST, 0))
    np.testing.assert_array_equal(read(producer), producer.array)


def test_dtypes_of_capsules(version, ml_dtypes):
    half = numbers(6, 8, dtype=np.float16)
    np.testing.assert_array_equal(read(Producer(half, version=version)), half)
    bfloat16 = numbers(6, 8, dtype=ml_dtypes.bfloat16)
    producer = Producer(bfloat16, version=version, code=capsules.BFLOAT)
    np.testing.assert_array_equal(read(producer), bfloat16.astype(np.float32))


def test_all_arguments_of_a_call(version):
    q, cache, indices, keywords = problem()
    expected = sparse_mla.attend(q, cache, indices, **keywords)
    producers = [Producer(array, version=version) for array in (q, cache, indices)]
    same(sparse_mla.attend(*producers, **keywords), expected)
    same(
        sparse_mla.attend(q, producers[1], producers[2].array.astype(np.int64), **keywords),
        expected,
    )
    assert [producer.deleted for producer in producers] == [1, 2, 1]


def test_everything_is_given_back_when_a_later_argument_is_bad(version):
    q, cache, indices, keywords = problem()
    producers = [Producer(array, version=version) for array in (q, cache, indices)]
    with pytest.raises(TypeError, match=r"attn_sink"):
        sparse_mla.attend(*producers, attn_sink="a sink", **keywords)
    with pytest.raises(ValueError, match=r"softmax_scale"):
        sparse_mla.attend(*producers, softmax_scale=-1.0, head_dim_v=4)
    bad = Producer(np.full_like(indices, 99), version=version)
    with pytest.raises(sparse_mla.IndexFault):
        sparse_mla.attend(*producers[:2], bad, **keywords)
    assert bad.deleted == 1
    for producer in producers:
        assert producer.made == producer.deleted


def test_capsules_as_outputs():
    q, cache, indices, keywords = problem()
    expected = sparse_mla.attend(q, cache, indices, **keywords)
    out, lse = np.empty_like(expected[0]), np.empty_like(expected[1])
    given = Producer(out), Producer(lse)
    results = sparse_mla.attend(q, cache, indices, out=given[0], lse=given[1], **keywords)
    assert results == given
    same((out, lse), expected)
    assert [producer.deleted for producer in given] == [1, 1]


@pytest.mark.parametrize(
    "fields",
    [{"version": None}, {"flags": capsules.READ_ONLY}, {"flags": capsules.IS_COPIED}],
    ids=["legacy", "read-only", "copied"],
)
def test_capsules_that_cannot_be_written(fields):
    q, cache, indices, keywords = problem()
    out = Producer(np.full((3, 2, 4), 7, np.float32), **fields)
    with pytest.raises(ValueError, match=r"out: .*read-only"):
        sparse_mla.attend(q, cache, indices, out=out, **keywords)
    assert out.deleted == 1
    assert (out.array == 7).all()


def test_old_producers_are_asked_twice_only_once():
    class Old(Producer):
        asked = 0

        def __dlpack__(self, *args, **keywords):
            Old.asked += 1
            return self.old(*args, **keywords)

        def old(self, stream=None):
            assert stream is None
            return self.capsule()

    producer = Old(numbers(6, 8), version=None)
    for asked in (2, 3, 4):
        np.testing.assert_array_equal(read(producer), producer.array)
        assert Old.asked == asked
    assert producer.made == producer.deleted == 3


def test_a_type_error_of_a_producer_that_has_worked_is_its_own():
    class Producers(Producer):
        broken = False

        def __dlpack__(self, **keywords):
            if self.broken:
                raise TypeError("broken today")
            return super().__dlpack__(**keywords)

    producer = Producers(numbers(6, 8))
    read(producer)
    producer.broken = True
    with pytest.raises(TypeError, match=r"broken today"):
        read(producer)


def test_errors_of_producers():
    class Refuses:
        def __init__(self, error):
            self.error = error

        def __dlpack__(self, **keywords):
            raise self.error

    error = BufferError("not now")
    with pytest.raises(BufferError, match=r"^kv_cache: not now$") as caught:
        read(Refuses(error))
    assert caught.value.__cause__ is error
    for error in (KeyError("key"), KeyboardInterrupt(), MemoryError("none left"), TypeError("odd")):
        with pytest.raises(type(error)) as caught:
            read(Refuses(error))
        assert caught.value is error


def test_what_dlpack_returns_must_be_an_unused_capsule():
    class Constant:
        def __init__(self, value):
            self.value = value

        def __dlpack__(self, **keywords):
            return self.value

    with pytest.raises(BufferError, match=r"kv_cache: .*unused DLPack capsule, got 3"):
        read(Constant(3))
    producer = Producer(numbers(6, 8))
    once = Constant(producer.capsule())
    np.testing.assert_array_equal(read(once), producer.array)
    with pytest.raises(BufferError, match=r"kv_cache: .*used_dltensor_versioned"):
        read(once)
    assert producer.deleted == 1


@pytest.mark.parametrize(
    "thing",
    [[[1.0]], ((1.0,),), 3, 2.5, "text", b"bytes", object(), np.float32(1), np.ndarray, Producer],
    ids=lambda thing: type(thing).__name__,
)
def test_things_that_are_no_tensors(thing):
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"kv_cache: expected a tensor .*__dlpack__.*, got {name}$"):
        read(thing)
    q, cache, _, keywords = problem()
    with pytest.raises(TypeError, match=f"indices: expected a tensor .*, got {name}$"):
        sparse_mla.attend(q, cache, thing, **keywords)


def test_more_types_than_are_remembered():
    types = [type(f"Producer{i}", (Producer,), {}) for i in range(40)]
    for _ in range(2):
        for made in types:
            producer = made(numbers(6, 8))
            np.testing.assert_array_equal(read(producer), producer.array)
            assert producer.deleted == 1
    gone = weakref.ref(types[0])
    del types, made, producer
    gc.collect()
    assert gone() is None


def test_threads():
    q, cache, indices, keywords = problem()
    expected = sparse_mla.attend(q, cache, indices, **keywords)
    failures = []

    def work(seed: int) -> None:
        made = [type(f"Thread{seed}_{i}", (Producer,), {}) for i in range(5)]
        try:
            for i in range(50):
                given = [made[(i + j) % 5](array) for j, array in enumerate((q, cache, indices))]
                same(sparse_mla.attend(*given, **keywords), expected)
                assert all(producer.deleted == 1 for producer in given)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ------------------------------------------------------------------------------ NumPy


def test_views_of_ndarrays():
    array = numbers(4, 6, 8)
    for view in (array[::-1], array[:, ::-2], array.transpose(1, 0, 2), array[:, 1:3]):
        np.testing.assert_array_equal(read(view), view.reshape(-1, 8))
    broadcast = np.broadcast_to(array[0], (3, 6, 8))
    np.testing.assert_array_equal(read(broadcast), broadcast.reshape(-1, 8))


def test_memmap(tmp_path):
    array = numbers(6, 8)
    array.tofile(tmp_path / "cache")
    cache = np.memmap(tmp_path / "cache", np.float32, "r", shape=(6, 8))
    rows = sparse_mla.unpack(cache)
    assert type(rows) is np.ndarray
    np.testing.assert_array_equal(rows, array)


def test_masked_arrays():
    with pytest.raises(TypeError, match=r"kv_cache: a masked array .*\.filled\(value\) or \.data"):
        read(np.ma.masked_array(numbers(6, 8), numbers(6, 8) > 3))


def test_byte_swapped_arrays():
    with pytest.raises(ValueError, match=r"kv_cache: a byte-swapped array of float32"):
        read(numbers(6, 8).astype(np.dtype(np.float32).newbyteorder("S")))


def test_misaligned_arrays():
    memory = np.zeros(6 * 8 * 4 + 1, np.uint8)
    with pytest.raises(ValueError, match=r"kv_cache: misaligned"):
        read(memory[1:].view(np.float32).reshape(6, 8))
    records = np.zeros((6, 8), [("mark", np.int16), ("number", np.float32)])
    with pytest.raises(ValueError, match=r"kv_cache: misaligned: .* stride of 6 bytes"):
        read(records["number"])
    assert read(memory[1:1].view(np.float32).reshape(0, 8)).shape == (0, 8)


def test_read_only_arrays():
    q, cache, indices, keywords = problem()
    expected = sparse_mla.attend(q, cache, indices, **keywords)
    out = np.zeros_like(expected[0])
    for array in (q, cache, indices, out):
        array.flags.writeable = False
    same(sparse_mla.attend(q, cache, indices, **keywords), expected)
    with pytest.raises(ValueError, match=r"out: .*read-only"):
        sparse_mla.attend(q, cache, indices, out=out, **keywords)
    assert not out.any()


@pytest.mark.parametrize("dtype", ["int16", "float64", "complex64", "bool", "S3", "O", "M8[s]"])
def test_other_dtypes_of_ndarrays(dtype):
    with pytest.raises(TypeError, match=f"kv_cache: .*{np.dtype(dtype).name.partition('[')[0]}"):
        read(np.zeros((6, 8), dtype))


def test_ml_dtypes(ml_dtypes):
    cache = numbers(6, 8, dtype=ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read(cache), cache.astype(np.float32))
    for name in ("float8_e5m2", "float8_e4m3", "int4"):
        with pytest.raises(TypeError, match=f"kv_cache: .*{name}"):
            read(np.zeros((6, 8), getattr(ml_dtypes, name)))

    q, cache, indices, keywords = problem()
    out, lse = sparse_mla.attend(
        q.astype(ml_dtypes.bfloat16), cache.astype(ml_dtypes.bfloat16), indices, **keywords
    )
    assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)


def test_packed_rows_may_be_uint8_or_e4m3(ml_dtypes):
    rows = np.random.default_rng(1).standard_normal((6, 576), np.float32)
    packed = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=2)
    assert packed.dtype == np.uint8
    expected = sparse_mla.unpack(packed, cache_format="fp8_ds_mla")
    for view in (packed.view(ml_dtypes.float8_e4m3fn), Producer(packed)):
        np.testing.assert_array_equal(sparse_mla.unpack(view, cache_format="fp8_ds_mla"), expected)


def test_six_dimensions():
    with pytest.raises(ValueError, match=r"kv_cache: expected at most 5 dimensions, got 6"):
        read(np.zeros((1, 1, 1, 1, 6, 8), np.float32))


@TOO_MUCH
def test_memory_error_is_numpys_own():
    with pytest.raises(MemoryError, match=r"(?i)allocate"):
        sparse_mla.unpack(np.broadcast_to(numbers(1, 1, 8), (2**43, 1, 8)))


# ------------------------------------------------------------------------------ PyTorch


def test_pytorch_tensors(torch):
    arrays = problem()
    q, cache, indices = (torch.from_numpy(array) for array in arrays[:3])
    keywords = arrays[3]
    expected = sparse_mla.attend(*arrays[:3], **keywords)
    results = sparse_mla.attend(q, cache, indices, **keywords)
    assert all(type(result) is torch.Tensor for result in results)
    same(results, expected)

    out, lse = torch.empty(3, 2, 4), torch.empty(3, 2)
    given = sparse_mla.attend(q, cache, indices.long(), out=out, lse=lse, **keywords)
    assert given[0] is out
    assert given[1] is lse
    same(given, expected)
    same(sparse_mla.attend(q, arrays[1], Producer(arrays[2]), **keywords), expected)


def test_pytorch_dtypes(torch):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cache = torch.arange(48.0).reshape(6, 8).to(dtype)
        rows = sparse_mla.unpack(cache)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, cache.float())
    for dtype in (torch.float64, torch.int16, torch.float8_e5m2, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"kv_cache: .*{str(dtype).removeprefix('torch.')}"):
            read(torch.zeros(6, 8, dtype=dtype))


def test_pytorch_views(torch):
    tensor = torch.arange(192.0).reshape(4, 6, 8)
    for view in (tensor.transpose(0, 1), tensor[:, ::2], tensor[:1].expand(3, 6, 8), tensor[2:]):
        assert torch.equal(sparse_mla.unpack(view), view.reshape(-1, 8))


def test_pytorch_gradients(torch):
    parameter = torch.nn.Parameter(torch.ones(6, 8))
    for tensor in (parameter, torch.ones(6, 8, requires_grad=True), parameter * 2):
        with pytest.raises(BufferError, match=r"kv_cache: .*requires grad.*kv_cache\.detach\(\)"):
            read(tensor)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                rows = sparse_mla.unpack(tensor)
            assert type(rows) is torch.Tensor
            assert not rows.requires_grad
        assert torch.equal(sparse_mla.unpack(tensor.detach()), tensor.detach())


def test_pytorch_lazy_bits(torch):
    q, cache, indices, keywords = problem()
    sink = torch.complex(torch.ones(2), torch.tensor([1.0, 2.0])).conj().imag
    for negative in (sink, torch._neg_view(torch.ones(2))):
        assert negative.is_neg()
        with pytest.raises(BufferError, match=r"attn_sink: .*negative bit.*resolve_neg\(\)"):
            sparse_mla.attend(q, cache, indices, attn_sink=negative, **keywords)
    same(
        sparse_mla.attend(q, cache, indices, attn_sink=sink.resolve_neg(), **keywords),
        sparse_mla.attend(q, cache, indices, attn_sink=-np.array([1, 2], np.float32), **keywords),
    )
    with pytest.raises(BufferError, match=r"kv_cache: .*conjugate bit.*resolve_conj\(\)"):
        read(torch.zeros(6, 8, dtype=torch.complex64).conj())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_pytorch_tensors_without_strided_memory(torch):
    tensor = torch.eye(8)
    for other in (tensor.to_sparse(), tensor.to_sparse_csr(), tensor.to_mkldnn()):
        with pytest.raises(BufferError, match=f"kv_cache: .*{other.layout}.*to_dense") as caught:
            read(other)
        assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(BufferError, match=r"kv_cache: .*meta tensor has no data"):
        read(tensor.to("meta"))
    with pytest.raises(BufferError, match=r"kv_cache: .*no data"):
        read(torch._efficientzerotensor((6, 8)))
    with pytest.raises(BufferError, match=r"kv_cache: [^\n]*storage$"):
        torch.vmap(read)(torch.zeros(3, 6, 8))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_pytorch_fake_tensors(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(6, 8)
    with pytest.raises(BufferError, match=r"kv_cache: .*fake"):
        read(fake)


def test_pytorch_subclasses_go_by_dlpack(torch):
    class Scaled(torch.Tensor):
        exported = 0

        def __dlpack__(self, **keywords):
            Scaled.exported += 1
            return (self.as_subclass(torch.Tensor) * 2).__dlpack__(**keywords)

    tensor = torch.ones(6, 8)
    rows = sparse_mla.unpack(tensor.as_subclass(Scaled))
    assert type(rows) is torch.Tensor
    assert torch.equal(rows, tensor * 2)
    assert Scaled.exported == 1

    class Plain(torch.Tensor):
        pass

    assert torch.equal(sparse_mla.unpack(tensor.as_subclass(Plain)), tensor)
    with pytest.raises(BufferError, match=r"kv_cache: .*detach"):
        read(torch.ones(6, 8, requires_grad=True).as_subclass(Plain))

    q, cache, indices, keywords = problem()
    out = torch.zeros(3, 2, 4).as_subclass(Plain)
    assert sparse_mla.attend(q, cache, indices, out=out, **keywords)[0] is out
    same([out], [sparse_mla.attend(q, cache, indices, **keywords)[0]])


@TOO_MUCH
def test_memory_error_is_pytorchs_own(torch):
    with pytest.raises(RuntimeError, match=r"allocate memory"):
        sparse_mla.unpack(torch.ones(1, 1, 8).expand(2**43, 1, 8))


# ------------------------------------------------------------------------------ JAX


def test_jax_arrays(jnp):
    import jax

    arrays = problem()
    cpu = jax.devices("cpu")[0]
    q, cache, indices = (jax.device_put(array, cpu) for array in arrays[:3])
    expected = sparse_mla.attend(*arrays[:3], **arrays[3])
    results = sparse_mla.attend(q, cache, indices, **arrays[3])
    assert all(isinstance(result, jax.Array) for result in results)
    assert results[0].devices() == q.devices()
    same(results, expected)

    half = sparse_mla.attend(
        q.astype(jnp.bfloat16), cache.astype(jnp.bfloat16), indices, **arrays[3]
    )
    assert half[0].dtype == jnp.bfloat16


def test_jax_arrays_are_not_written(jnp):
    q, cache, indices, keywords = problem()
    out = jnp.zeros((3, 2, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"out: .*read-only"):
        sparse_mla.attend(q, cache, indices, out=out, **keywords)
    assert not np.asarray(out).any()


def test_jax_tracers(jnp):
    import jax

    for transform in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match=r"kv_cache: a JAX tracer .*pure_callback"):
            transform(sparse_mla.unpack)(jnp.zeros((2, 6, 8)))


# ------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("stream", [0, 1, -1, True, "main", object()])
def test_streams_are_for_gpus(stream):
    q, cache, indices, keywords = problem()
    with pytest.raises(ValueError, match=r"stream: expected None, .* on the CPU"):
        sparse_mla.attend(q, cache, indices, stream=stream, **keywords)
    sparse_mla.attend(q, cache, indices, stream=None, **keywords)


# On a GPU in name only: the calls below end at softmax_scale, after the stream and before a launch.


def end_at_the_scale(q, kv_cache, indices, **keywords) -> None:
    with pytest.raises(ValueError, match=r"softmax_scale"):
        sparse_mla.attend(q, kv_cache, indices, softmax_scale=-1.0, head_dim_v=4, **keywords)


def on_gpu(kind=Producer, **fields):
    return [kind(array, device=(capsules.CUDA, 1), **fields) for array in problem()[:3]]


class CudaStream:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


def test_streams():
    for stream in (None, 0, 1, 2, 2**64 - 1, CudaStream((0, 1234))):
        end_at_the_scale(*on_gpu(), stream=stream)


@pytest.mark.parametrize(
    ("error", "stream"),
    [
        (ValueError, -1),
        (ValueError, 2**64),
        (TypeError, True),
        (TypeError, 1.0),
        (TypeError, "main"),
        (ValueError, CudaStream((1, 1234))),
        (ValueError, CudaStream((0, -1))),
        (TypeError, CudaStream((0, 1.5))),
        (TypeError, CudaStream(1234)),
    ],
)
def test_bad_streams(error, stream):
    producers = on_gpu()
    with pytest.raises(error, match=r"stream: expected"):
        sparse_mla.attend(*producers, softmax_scale=1.0, head_dim_v=4, stream=stream)
    assert all(producer.made == producer.deleted for producer in producers)


def test_unknown_producers_order_their_work_before_the_legacy_stream():
    producers = on_gpu()
    end_at_the_scale(*producers)
    assert all(producer.keywords == {"max_version": (1, 3)} for producer in producers)


def test_cupy(monkeypatch):
    """A stand-in for CuPy, with as much of it as the exchange looks at."""
    asked = []

    def get_current_stream(device):
        asked.append(device)
        return types.SimpleNamespace(ptr=1234)

    class ndarray(Producer):
        pass

    cupy = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    producers = on_gpu(ndarray)
    end_at_the_scale(*producers)
    assert asked == [1]
    for producer in producers:
        assert producer.keywords == {"max_version": (1, 3), "stream": -1}
        assert producer.made == producer.deleted

    q, cache, indices, keywords = problem()
    out = ndarray(np.empty((3, 2, 4), np.float32), version=None)
    sparse_mla.attend(q, cache, indices, out=out, **keywords)
    same([out.array], [sparse_mla.attend(q, cache, indices, **keywords)[0]])


def test_attributes_of_cupy(monkeypatch):
    """Another stand-in, for NVIDIA's GPUs: an ndarray is read by its attributes alone."""

    class ndarray:
        def __init__(self, array):
            self.array = array
            self.data = types.SimpleNamespace(ptr=array.ctypes.data, device_id=1)
            self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype

    stream = types.SimpleNamespace(ptr=1234)
    runtime = types.ModuleType("cupy.cuda.runtime")
    runtime.is_hip = False
    cupy = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda device: stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", runtime)

    q, cache, indices, keywords = problem()
    end_at_the_scale(ndarray(q), ndarray(cache[::-1]), ndarray(indices))
    records = np.zeros((6, 8), [("mark", np.int16), ("number", np.float32)])
    for error, match, bad in (
        (ValueError, "at most 5 dimensions, got 6", np.zeros((1,) * 6, np.float32)),
        (ValueError, "misaligned.*stride of 6 bytes", records["number"]),
        (ValueError, "float64", cache.astype(np.float64)),
        (ValueError, "expected a tensor on cuda:1 as q is, got one on cpu:0", None),
    ):
        given = cache if bad is None else ndarray(bad)
        with pytest.raises(error, match=f"kv_cache: .*{match}|float64"):
            sparse_mla.attend(ndarray(q), given, ndarray(indices), **keywords)


def test_managed_memory_is_of_the_device_that_the_driver_names():
    producer = Producer(numbers(6, 8), device=(capsules.CUDA_MANAGED, 0))
    with pytest.raises(BufferError, match=r"kv_cache: CUDA managed memory of an unknown device: "):
        read(producer)
    assert producer.deleted == 1


# ------------------------------------------------------------------------------ leaks, imports


def test_references_are_given_back():
    q, cache, indices, keywords = problem()
    out = np.empty((3, 2, 4), np.float32)
    producers = [Producer(array) for array in (q, cache, indices)]
    swapped = cache.astype(">f4")
    held = [q, cache, indices, out, swapped, *producers, np.dtype(np.float32), np.ndarray, Producer]

    def calls() -> None:
        sparse_mla.attend(q, cache, indices, out=out, **keywords)
        sparse_mla.attend(*producers, **keywords)
        sparse_mla.unpack(cache)
        with pytest.raises(ValueError, match=r"byte-swapped"):
            sparse_mla.attend(q, swapped, indices, **keywords)
        with pytest.raises(TypeError, match=r"indices"):
            sparse_mla.attend(q, cache, [1], **keywords)
        with pytest.raises(ValueError, match=r"softmax_scale"):
            sparse_mla.attend(*producers, softmax_scale=0.0, head_dim_v=4)

    calls()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in held]
    for _ in range(1000):
        calls()
    gc.collect()
    assert [sys.getrefcount(thing) for thing in held] == before
    assert all(producer.made == producer.deleted == 2002 for producer in producers)


def test_references_to_pytorch_tensors_are_given_back(torch):
    q, cache, indices, keywords = problem()
    tensors = [torch.from_numpy(array) for array in (q, cache, indices)]
    gradient = torch.ones(3, 2, 8, requires_grad=True)
    held = [*tensors, gradient, torch.Tensor, torch.float32]

    def calls() -> None:
        sparse_mla.attend(*tensors, **keywords)
        with pytest.raises(BufferError, match=r"requires grad"):
            sparse_mla.attend(gradient, *tensors[1:], **keywords)
        with pytest.raises(TypeError, match=r"indices"):
            sparse_mla.attend(*tensors[:2], 3, **keywords)

    calls()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in held]
    for _ in range(1000):
        calls()
    gc.collect()
    assert [sys.getrefcount(thing) for thing in held] == before


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_NUMPY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import warnings
warnings.simplefilter("ignore")
import torch
import sparse_mla

q, cache = torch.randn(3, 2, 8), torch.randn(4, 2, 8)
indices = torch.tensor([[0, 3, -1], [7, 7, 1], [-1, -1, -1]], dtype=torch.int32)
out, lse = sparse_mla.attend(q, cache, indices, softmax_scale=0.5, head_dim_v=4)
for t in range(3):
    keys = cache.reshape(8, 8)[indices[t][indices[t] >= 0].long()]
    scores = 0.5 * q[t] @ keys.T
    torch.testing.assert_close(lse[t], scores.logsumexp(-1))
    torch.testing.assert_close(out[t], scores.softmax(-1) @ keys[:, :4])
half = sparse_mla.attend(q.bfloat16(), cache.bfloat16(), indices, softmax_scale=0.5, head_dim_v=4)
assert half[0].dtype == torch.bfloat16
try:
    sparse_mla.attend(q, [1.0], indices, softmax_scale=0.5)
except TypeError as error:
    print(error)

class Foreign:
    def __dlpack__(self, **keywords):
        return cache.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return cache.__dlpack_device__()

try:
    sparse_mla.unpack(Foreign())
except ImportError as error:
    print(error)
assert "numpy" not in sys.modules
"""


def test_pytorch_where_numpy_is_not_installed(torch):
    said = run_python(WITHOUT_NUMPY).splitlines()
    assert said[0].startswith("kv_cache: expected a tensor")
    assert "NumPy is not installed" in said[1]


OTHER_EXCHANGE_APIS = """
import ctypes
import weakref
import numpy
import torch
import sparse_mla

FUNCTIONS = ("allocate", "export", "to_object", "lend", "stream")

class Api(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("older", *FUNCTIONS)]

pointer, capsule = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
capsule.restype = ctypes.py_object
capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
NAME = b"dlpack_exchange_api"
own = Api.from_address(pointer(torch.Tensor.__dlpack_c_exchange_api__, NAME))

# Of major version 2, whose functions must not be called, above one of 1 that lends nothing.
exports = Api.from_buffer_copy(own)
exports.lend = None
newer = Api(2, 0, ctypes.addressof(exports), *[1] * len(FUNCTIONS))
torch.Tensor.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(newer), NAME, None)
memory = numpy.arange(48, dtype=numpy.float32)
tensor = torch.from_numpy(memory).reshape(6, 8)
for _ in range(3):
    assert torch.equal(sparse_mla.unpack(tensor), tensor)
    gradient = tensor.detach().requires_grad_()
    for bad in (gradient, tensor.view(1, 1, 1, 1, 6, 8), tensor.to("meta")):
        try:
            sparse_mla.unpack(bad)
        except (BufferError, ValueError) as error:
            print(error)
memory = weakref.ref(memory)
assert memory() is not None
del tensor, gradient, bad
assert memory() is None

# Of major version 2 alone: by __dlpack__.
newest = Api(2, 0, None, *[1] * len(FUNCTIONS))
torch.nn.Parameter.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(newest), NAME, None)
exported = []
torch.nn.Parameter.__dlpack__ = lambda *args, **keywords: (
    exported.append(keywords), torch.Tensor.__dlpack__(*args, **keywords))[1]
parameter = torch.nn.Parameter(torch.ones(6, 8), requires_grad=False)
assert torch.equal(sparse_mla.unpack(parameter), parameter)
assert exported == [{"max_version": (1, 3)}]
"""


def test_other_versions_of_the_exchange_api(torch):
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no exchange API")
    said = run_python(OTHER_EXCHANGE_APIS).splitlines()
    assert len(said) == 9
    assert "requires grad" in said[0]
    assert "at most 5 dimensions" in said[1]
    assert "meta tensor" in said[2]


def test_no_framework_is_imported():
    code = "import sys, sparse_mla; print({'numpy', 'torch', 'jax', 'cupy'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"
    code = (
        "import sys, numpy, sparse_mla; sparse_mla.unpack(numpy.zeros((2, 8), 'float32'));"
        "print({'torch', 'jax', 'cupy', 'ml_dtypes'} & set(sys.modules))"
    )
    assert run_python(code).strip() == "set()"


def test_bfloat16_results_without_ml_dtypes():
    code = """
import sys
sys.modules["ml_dtypes"] = None
from sparse_mla._frameworks import numpy_dtype
try:
    numpy_dtype("bfloat16")
except ImportError as error:
    print(error)
"""
    assert "needs the package ml_dtypes" in run_python(code)
