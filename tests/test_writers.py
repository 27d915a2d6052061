"""The cache writers: pack, unpack and append, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import sparse_mla
from cases import Source
from compare import snapshot, to_framework, to_numpy
from sparse_mla import reference

BF16 = cases.DTYPES["bfloat16"]
DTYPES = ["bfloat16", "float16", "float32"]
PACKED = list(reference.FORMATS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_FORMAT = pytest.mark.parametrize("name", ["dense", *PACKED])
SCALE = 0.037


def width(name: str) -> int:
    return reference.FORMATS[name].d_qk if name in PACKED else 576


def scale(name: str) -> dict[str, float]:
    return {"cache_scale": SCALE} if name == "fp8_tensor" else {}


def rows_of_every_kind(name: str, dtype: str, count: int = 40, seed: int = 0) -> np.ndarray:
    """Groups of ordinary numbers, zeros, huge and tiny ones, subnormal scales, ties, NaN and
    infinities."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, width(name))).astype(np.float32)
    rows[1] = 0
    rows[2, :128] = 0
    rows[3] *= 1e30
    rows[4] *= 1e-30
    rows[5, 128:256] *= 1e-42
    rows[6] = -0.0
    rows[7, :256] = np.nan
    rows[8, 5] = np.inf
    rows[9, 5] = -np.inf
    rows[10, 300] = np.nan
    rows[11] = rng.integers(-448, 449, width(name))  # with amax 448 the scale is 1
    rows[11, ::64] = 448
    rows[12] = rng.integers(0, 2**32, width(name), np.uint32).view(np.float32)
    rows[13] = 3.4e38
    rows[14, :64] = np.float32(2.0**-149)
    with np.errstate(all="ignore"):
        return rows.astype(cases.DTYPES[dtype])


def assert_same_rows(got: np.ndarray, want: np.ndarray, name: str) -> None:
    """Equal bytes; of a NaN in a number that is no byte only that it is one."""
    got, want = got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1])
    if name in PACKED:
        end = reference.FORMATS[name].rope_offset
        np.testing.assert_array_equal(got[:, :end], want[:, :end])
        got, want = got[:, end:].view(BF16), want[:, end:].view(BF16)
    kind = f"u{got.dtype.itemsize}"
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        both = np.isnan(got) & np.isnan(want)
    np.testing.assert_array_equal(
        np.where(both, 0, got.view(kind)), np.where(both, 0, want.view(kind))
    )


# --------------------------------------------------------------------------- pack


@EVERY_DTYPE
@EVERY_FORMAT
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_pack_writes_the_bytes_of_the_oracle(name: str, dtype: str, block_size: int) -> None:
    rows = rows_of_every_kind(name, dtype)
    before = rows.tobytes()
    cache = sparse_mla.pack(rows, cache_format=name, block_size=block_size, **scale(name))
    blocks = -(-len(rows) // block_size)
    want = reference.encode(rows, name, SCALE)
    assert cache.shape == (blocks, block_size, want.shape[1])
    assert cache.dtype == (rows.dtype if name == "dense" else np.uint8)
    flat = cache.reshape(blocks * block_size, -1)
    assert_same_rows(flat[: len(rows)], want, name)
    assert not flat[len(rows) :].view(np.uint8).any()
    assert rows.tobytes() == before


def test_pack_on_random_bits() -> None:
    """Every rounding on random float32 patterns: to e4m3 through a scale, and to bfloat16."""
    bits = np.random.default_rng(1).integers(0, 2**32, (600, 576), np.uint32).view(np.float32)
    for name in PACKED:
        rows = bits[:, : width(name)]
        for factor in (SCALE, 1e-38, 1e38, -2.5, 0.0):
            if name != "fp8_tensor" and factor != SCALE:
                continue
            keywords = {"cache_scale": factor} if name == "fp8_tensor" else {}
            cache = sparse_mla.pack(rows, cache_format=name, block_size=8, **keywords)
            assert_same_rows(cache, reference.encode(rows, name, factor), name)


def test_scales_are_amax_over_448() -> None:
    """The stored scale is the float32 quotient, not a power of two, and the largest number of a
    group comes back as it was, within one rounding."""
    rows = np.random.default_rng(2).standard_normal((9, 576)).astype(np.float32)
    cache = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=3)
    scales = cache.reshape(9, 656)[:, 512:528].copy().view("<f4")
    amax = np.abs(rows[:, :512]).reshape(9, 4, 128).max(axis=2)
    np.testing.assert_array_equal(scales, amax / np.float32(448))
    assert (np.frexp(scales)[0] != 0.5).all()
    back = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
    largest = np.abs(back[:, :512]).reshape(9, 4, 128).max(axis=2)
    np.testing.assert_allclose(largest, amax, rtol=2**-23)


def test_pack_of_nothing() -> None:
    for name in ("dense", *PACKED):
        rows = np.zeros((0, width(name)), np.float32)
        cache = sparse_mla.pack(rows, cache_format=name, block_size=16, **scale(name))
        assert cache.shape[:2] == (0, 16)
        assert sparse_mla.unpack(cache, cache_format=name, **scale(name)).shape == (0, width(name))


@EVERY_DTYPE
def test_pack_dense_of_any_width(dtype: str) -> None:
    for d in (1, 3, 67, 512):
        rows = np.random.default_rng(d).standard_normal((10, d)).astype(cases.DTYPES[dtype])
        cache = sparse_mla.pack(rows, cache_format="dense", block_size=4)
        np.testing.assert_array_equal(cache.reshape(12, d)[:10].astype(float), rows.astype(float))


def test_pack_in_torch() -> None:
    torch = pytest.importorskip("torch")
    rows = np.random.default_rng(0).standard_normal((10, 576)).astype(np.float32)
    tensor = torch.from_numpy(rows).to(torch.bfloat16)
    cache = sparse_mla.pack(tensor, cache_format="fp8_ds_mla", block_size=4)
    assert isinstance(cache, torch.Tensor)
    assert cache.dtype == torch.uint8
    want = sparse_mla.pack(to_numpy(tensor), cache_format="fp8_ds_mla", block_size=4)
    np.testing.assert_array_equal(to_numpy(cache), want)
    back = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
    assert isinstance(back, torch.Tensor)
    assert back.dtype == torch.float32


def test_rows_may_have_strides() -> None:
    wide = np.random.default_rng(0).standard_normal((20, 600)).astype(np.float32)
    for rows in (wide[::2, 12:588], wide[::-1, :576], np.broadcast_to(wide[0, :576], (5, 576))):
        cache = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=4)
        want = sparse_mla.pack(np.ascontiguousarray(rows), cache_format="fp8_ds_mla", block_size=4)
        np.testing.assert_array_equal(cache, want)


# --------------------------------------------------------------------------- unpack


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("layout", cases.CACHE_LAYOUTS)
def test_unpack_reads_bytes_as_they_are(name: str, dtype: str, layout: str) -> None:
    """Random bytes, NaN and infinite scales among them: float32 of e4m3 times scale, exactly."""
    kind = cases.DTYPES[dtype] if name == "dense" else np.dtype(np.uint8)
    row = 576 if name == "dense" else reference.FORMATS[name].row_bytes
    source = Source(num_blocks=5, block_size=7, layout=layout, unused="random")
    cache = cases.empty_cache(source, row, kind, np.random.default_rng(3))
    rows = sparse_mla.unpack(cache, cache_format=name, **scale(name))
    want = reference.decode(cache, name, SCALE)
    assert rows.dtype == np.float32
    assert rows.shape == (35, width(name))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(rows, want.astype(np.float32))


def test_unpack_takes_every_shape_of_a_cache() -> None:
    cache = np.random.default_rng(0).standard_normal((6, 4, 48)).astype(np.float32)
    want = cache.reshape(24, 48)
    for shape in ((6, 4, 48), (6, 4, 1, 48), (24, 48)):
        np.testing.assert_array_equal(sparse_mla.unpack(cache.reshape(shape)), want)


@EVERY_FORMAT
def test_pack_and_unpack(name: str) -> None:
    """What comes back is as near as the format is: half a step of e4m3."""
    rows = np.random.default_rng(4).standard_normal((50, width(name))).astype(np.float32)
    cache = sparse_mla.pack(rows, cache_format=name, block_size=16, **scale(name))
    back = sparse_mla.unpack(cache, cache_format=name, **scale(name))
    error = np.abs(back[:50] - rows)
    step = (SCALE if name == "fp8_tensor" else np.abs(rows).max() / 448) * 2.0**-9
    assert (error <= np.abs(rows) / 16 + step).all()
    assert (back[50:] == 0).all()


# --------------------------------------------------------------------------- append


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_append(name: str, dtype: str, pair: bool, index_dtype: type) -> None:
    """The rows in their slots have the bytes of the oracle, every other byte is what it was."""
    kind = cases.DTYPES[dtype] if name == "dense" else np.dtype(np.uint8)
    rows = rows_of_every_kind(name, dtype)
    want_rows = reference.encode(rows, name, SCALE, dtype=kind)
    cut = width(name) - 64
    latent, rope = (rows[:, :cut], rows[:, cut:]) if pair else (rows, None)
    for layout in ("contiguous", "interleaved", "gapped", "padded", "offset"):
        source = Source(num_blocks=9, block_size=7, layout=layout, unused="random")
        cache, twin = (
            cases.empty_cache(source, want_rows.shape[1], kind, np.random.default_rng(5))
            for _ in "ab"
        )
        slots = np.random.default_rng(6).permutation(63)[: len(rows)].astype(index_dtype)
        assert (
            sparse_mla.append(cache, slots, latent, rope, cache_format=name, **scale(name)) is None
        )
        written = cache[slots // 7, slots % 7]
        assert_same_rows(written, want_rows, name)
        twin[slots // 7, slots % 7] = written
        np.testing.assert_array_equal(memory_of(cache), memory_of(twin))


def memory_of(array: np.ndarray) -> np.ndarray:
    """All bytes of the allocation that a view lies in."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


@EVERY_FORMAT
def test_append_skips_slots_out_of_range(name: str) -> None:
    """Padding and slots past the capacity are nobody's (report 66)."""
    rows = rows_of_every_kind(name, "float32")[:12]
    slots = np.array([3, -1, 12, 2**40, -(2**40), 0, -2, 2**31, 11, 2**32 + 5, 2**63 - 1, 13])
    row = 576 if name == "dense" else reference.FORMATS[name].row_bytes
    cache = np.zeros((4, 3, row), np.float32 if name == "dense" else np.uint8)
    sparse_mla.append(cache, slots, rows, cache_format=name, **scale(name))
    want = np.zeros_like(cache).reshape(12, -1)
    for slot, stored in zip(slots, reference.encode(rows, name, SCALE), strict=True):
        if 0 <= slot < 12:
            want[slot] = stored
    assert_same_rows(cache, want, name)


@pytest.mark.parametrize("tokens", [3, 500])
def test_append_of_duplicate_slots(tokens: int) -> None:
    """One whole row wins, the last one."""
    rows = np.random.default_rng(0).standard_normal((tokens, 576)).astype(np.float32)
    slots = np.random.default_rng(1).integers(0, 2 + tokens // 20, tokens)
    cache = np.zeros((50, 1, 656), np.uint8)
    sparse_mla.append(cache, slots, rows, cache_format="fp8_ds_mla")
    stored = reference.encode(rows, "fp8_ds_mla")
    for slot in np.unique(slots):
        np.testing.assert_array_equal(cache[slot, 0], stored[np.flatnonzero(slots == slot)[-1]])


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("latent_dtype", DTYPES)
@pytest.mark.parametrize("rope_dtype", DTYPES)
def test_append_converts(cache_dtype: str, latent_dtype: str, rope_dtype: str) -> None:
    """Latent, rope and cache may have three dtypes; each number is rounded once."""
    rng = np.random.default_rng(0)
    latent = (rng.standard_normal((8, 512)) * 100).astype(cases.DTYPES[latent_dtype])
    rope = (rng.standard_normal((8, 64)) * 1e-6).astype(cases.DTYPES[rope_dtype])
    cache = np.zeros((8, 1, 576), cases.DTYPES[cache_dtype])
    sparse_mla.append(cache, np.arange(8), latent, rope, cache_format="dense")
    both = np.concatenate([latent.astype(np.float32), rope.astype(np.float32)], axis=1)
    want = reference.encode(both, dtype=cache.dtype)
    np.testing.assert_array_equal(cache[:, 0].astype(float), want.astype(float))


def test_append_is_pack() -> None:
    rows = rows_of_every_kind("fp8_ds_mla", "bfloat16")
    packed = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=8)
    cache = np.zeros_like(packed)
    for part in (slice(0, 13), slice(13, 14), slice(14, 40)):
        slots = np.arange(40, dtype=np.int32)[part]
        sparse_mla.append(
            cache, slots, rows[part, :512], rows[part, 512:], cache_format="fp8_ds_mla"
        )
    np.testing.assert_array_equal(cache, packed)


def test_append_with_torch() -> None:
    pytest.importorskip("torch")
    rows = np.random.default_rng(0).standard_normal((6, 576)).astype(BF16)
    arguments = {
        "kv_cache": np.zeros((4, 4, 656), np.uint8),
        "slots": np.array([3, 7, 15, 0, 9, 2]),
        "latent": rows[:, :512],
        "rope": rows[:, 512:],
    }
    tensors = to_framework(arguments, "torch")
    sparse_mla.append(**tensors, cache_format="fp8_ds_mla")
    want = np.zeros((16, 656), np.uint8)
    want[arguments["slots"]] = reference.encode(rows, "fp8_ds_mla")
    np.testing.assert_array_equal(arguments["kv_cache"].reshape(16, 656), want)


def test_append_of_nothing() -> None:
    cache = np.ones((2, 2, 576), np.float32)
    none = np.zeros((0, 576), np.float32)
    sparse_mla.append(cache, np.zeros(0, np.int32), none, cache_format="dense")
    empty = np.zeros((0, 2, 576), np.float32)
    sparse_mla.append(
        empty, np.zeros(1, np.int32), np.ones((1, 576), np.float32), cache_format="dense"
    )
    assert (cache == 1).all()


def test_attend_reads_what_append_wrote() -> None:
    """Tokens appended one by one into shuffled blocks, then every position of the request."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((30, 576)).astype(BF16)
    cache = np.full((8, 8, 656), 0xFF, np.uint8)
    table = rng.permutation(8)[:4][None].astype(np.int32)
    for position, row in enumerate(rows):
        slot = table[0, position // 8] * 8 + position % 8
        sparse_mla.append(
            cache, np.array([slot]), row[None, :512], row[None, 512:], cache_format="fp8_ds_mla"
        )
    q = rng.standard_normal((1, 4, 576)).astype(BF16)
    arguments = {"cache_format": "fp8_ds_mla", "softmax_scale": 1 / 24}
    arguments |= {"block_table": table, "seq_lens": np.array([30], np.int32)}
    out, lse = sparse_mla.attend(q, cache, None, **arguments)
    want = reference.attention(q, cache, None, **arguments)
    assert want.entries == 30
    assert (np.abs(out.astype(float) - want.out) <= want.bound_out).all()
    assert (np.abs(lse - want.lse) <= want.bound_lse).all()


# --------------------------------------------------------------------------- errors

ROWS = np.zeros((4, 576), np.float32)
CACHE = np.zeros((2, 2, 656), np.uint8)


def bad(name: str, error: type[Exception], *words: str, **arguments: Any) -> Any:
    return pytest.param(arguments, error, words, id=name)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        bad("no_rows", TypeError, "rows: expected", rows=None),
        bad("float64", TypeError, "rows: expected", "float64", rows=ROWS.astype("f8")),
        bad("ints", TypeError, "rows: expected", "int32", rows=ROWS.astype("i4")),
        bad("ndim", ValueError, "rows: expected", "(2, 2, 576)", rows=ROWS.reshape(2, 2, 576)),
        bad(
            "columns",
            ValueError,
            "rows: expected a contiguous",
            rows=np.zeros((4, 1152), "f4")[:, ::2],
        ),
        bad(
            "width",
            ValueError,
            "rows: expected 576 numbers a token",
            "512",
            rows=ROWS[:, :512].copy(),
        ),
        bad("format", ValueError, "cache_format: expected one of", "'fp4'", cache_format="fp4"),
        bad("format_none", Exception, "cache_format", cache_format=None),
        bad("format_type", TypeError, "cache_format: expected a str", cache_format=1),
        bad("block_size_0", ValueError, "block_size: expected 1", "0", block_size=0),
        bad("block_size_float", TypeError, "block_size: expected an int", block_size=1.0),
        bad("block_size_2_32", ValueError, "block_size", "4294967297", block_size=2**32 + 1),
        bad("scale", ValueError, "cache_scale: expected none", cache_scale=1.0),
        bad("no_scale", ValueError, "cache_scale: required", cache_format="fp8_tensor"),
    ],
)
def test_pack_errors(arguments: dict[str, Any], error: type[Exception], words: tuple[str]) -> None:
    complete = {"rows": ROWS, "cache_format": "fp8_ds_mla", "block_size": 2} | arguments
    with pytest.raises(error) as raised:
        sparse_mla.pack(**complete)
    assert isinstance(raised.value, TypeError | ValueError)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        bad("no_format", ValueError, "cache_format: required", "uint8", cache_format=None),
        bad(
            "row",
            ValueError,
            "kv_cache: expected rows of 528 bytes",
            cache_format="fp8_ds_mla_norope",
        ),
        bad("no_cache", TypeError, "kv_cache: expected a tensor", kv_cache=None),
        bad("ndim", ValueError, "kv_cache: expected shape", "(656,)", kv_cache=CACHE[0, 0]),
        bad("dtype", TypeError, "kv_cache: expected bytes", "int64", kv_cache=CACHE.astype("i8")),
        bad("scale", ValueError, "cache_scale: expected none", cache_scale=2.0),
    ],
)
def test_unpack_errors(
    arguments: dict[str, Any], error: type[Exception], words: tuple[str]
) -> None:
    complete = {"kv_cache": CACHE, "cache_format": "fp8_ds_mla"} | arguments
    with pytest.raises(error) as raised:
        sparse_mla.unpack(**complete)
    for word in words:
        assert word in str(raised.value)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


POOL = np.zeros(4 * 656 * 8, np.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        bad("slots_none", TypeError, "slots: expected", slots=None),
        bad("latent_none", TypeError, "latent: expected", latent=None),
        bad(
            "slots_float",
            TypeError,
            "slots: expected int32 or int64",
            "float32",
            slots=np.zeros(4, "f4"),
        ),
        bad(
            "slots_shape", ValueError, "slots: expected shape (4,)", "(3,)", slots=np.zeros(3, "i4")
        ),
        bad(
            "slots_ndim",
            ValueError,
            "slots: expected shape (4,)",
            "(4, 1)",
            slots=np.zeros((4, 1), "i4"),
        ),
        bad("latent_dtype", TypeError, "latent: expected", "float64", latent=np.zeros((4, 512))),
        bad(
            "latent_width",
            ValueError,
            "latent: expected 576 numbers",
            "575",
            latent=ROWS[:, :511].copy(),
        ),
        bad(
            "latent_ndim", ValueError, "latent: expected shape", latent=np.zeros((4, 1, 512), "f4")
        ),
        bad(
            "latent_columns",
            ValueError,
            "latent: expected a contiguous",
            latent=np.zeros((4, 1024), "f4")[:, ::2],
        ),
        bad(
            "rope_tokens",
            ValueError,
            "rope: expected 4 tokens",
            "(3, 64)",
            rope=np.zeros((3, 64), "f4"),
        ),
        bad("rope_missing", ValueError, "latent: expected 576 numbers", "512", rope=None),
        bad("rope_too_much", ValueError, "576", "640", latent=ROWS),
        bad("read_only", ValueError, "kv_cache: expected a writable", kv_cache=read_only(CACHE)),
        bad(
            "overlap",
            ValueError,
            "kv_cache: expected rows",
            "overlap",
            kv_cache=np.lib.stride_tricks.as_strided(POOL, (2, 2, 656), (656, 656, 1)),
        ),
        bad(
            "over_latent",
            ValueError,
            "kv_cache: expected memory of its own",
            "latent",
            kv_cache=POOL[: 4 * 656].reshape(2, 2, 656),
            latent=POOL[: 4 * 512 * 4].view("f4").reshape(4, 512),
        ),
        bad(
            "format", ValueError, "kv_cache: expected rows of 528", cache_format="fp8_ds_mla_norope"
        ),
        bad("stream", ValueError, "stream: ", stream=1),
    ],
)
def test_append_errors(
    arguments: dict[str, Any], error: type[Exception], words: tuple[str]
) -> None:
    complete = {
        "kv_cache": CACHE,
        "slots": np.arange(4),
        "latent": np.ones((4, 512), np.float32),
        "rope": np.ones((4, 64), np.float32),
        "cache_format": "fp8_ds_mla",
    } | arguments
    images = snapshot(complete, skip=())
    with pytest.raises(error) as raised:
        sparse_mla.append(**complete)
    for word in words:
        assert word in str(raised.value)
    assert snapshot(complete, skip=()) == images


def test_cache_formats() -> None:
    """The table names every format, with the numbers that its rows have."""
    formats = sparse_mla.cache_formats()
    assert next(iter(formats)) == "dense"
    assert set(formats) == {"dense", *reference.FORMATS}
    for name, fmt in reference.FORMATS.items():
        entry = formats[name]
        assert entry["row_bytes"] == fmt.row_bytes
        assert entry["d_qk"] == fmt.d_qk
        assert entry["d_v"] == reference.D_V
        assert entry["scale"] == ("tensor" if fmt.scale_offset is None else "float32")
        assert isinstance(entry["layout"], str)
    assert formats["dense"]["row_bytes"] == 0
    assert formats["dense"]["scale"] == "none"
