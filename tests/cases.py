"""The table of cases, as data, and the one function that makes tensors of a case.

A `Case` says everything about one call of `attend`: shapes, dtypes, layouts, which optional arrays
there are, what is wrong with them on purpose. `make(case, seed)` draws the arrays. Slots that no
valid entry selects, and the bytes between rows, hold NaN or random bytes, and whatever stands
behind `topk_lens` is random; so a result that used any of it shows. Tests, fuzzer and benchmark
build their inputs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from sparse_mla import reference

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True)
class Source:
    """A cache and the entries that select from it."""

    cache_format: str = "dense"
    num_blocks: int = 8
    block_size: int = 16
    topk: int | None = 40  # None: indices=None, every position
    index_dtype: str = "int32"  # of indices, block_table and all lengths
    paged: bool = False
    max_blocks: int = 4
    seq_lens: bool = False
    topk_lens: str | None = None  # "row", "batch"
    padding: float = 0.1  # share of -1 among the indices
    holes: float = 0.1  # share of -1 in the block table
    faults: tuple[str, ...] = ()  # of: index, slot, logical, block, topk, seq
    magnitude: float = 1.0  # of the cache's numbers
    scales: str = "amax"  # "wild": 0, 2^60 and 2^-60 in one packed row; "far": of few rows 2^±40
    layout: str = "contiguous"  # of the cache, see LAYOUTS
    ndim: int = 3  # 2: (num_slots, row), only with block_size 1; 4: a 1 before the row
    byte_dtype: str = "uint8"  # or float8_e4m3fn
    unused: str = "nan"  # or "random": what unused slots and gaps hold


@dataclass(frozen=True)
class Case:
    """One call of `attend`."""

    name: str = ""
    leading: tuple[int, ...] = (3,)  # (tokens,) or (batch, s_q)
    heads: int = 4
    d_qk: int = 576
    d_v: int | None = None  # None: head_dim_v is not passed
    dtype: str = "bfloat16"
    main: Source = field(default_factory=Source)
    extra: Source | None = None
    q_rope: int = 0  # width of the second part of a pair
    q_layout: str = "contiguous"  # "transposed", "sliced", "zero"
    requests: int | None = None  # rows of the block tables; None: the batch
    request_ids: bool = False
    query_positions: bool = False
    shard: tuple[int, int, int] | None = None
    max_seq_len: bool = False
    flat: bool = False  # per-row arrays are flattened
    bad_request: bool = False
    sink: str | None = None  # "normal", "large", "infinite"
    logit_cap: float = 0.0
    spread: float = 1.0  # standard deviation of the scores: 0.2 flat, 8 sharply peaked, 1e5 huge
    nan: str | None = None  # "q", "entry"
    small_layout: str = "contiguous"  # of all small arrays: "columns", "zero"
    out: str | None = None  # "own", "float32", "strided"
    lse: str | None = None  # "given", "strided"
    max_logits: str | None = None
    validate: str = "mask"
    batch_invariant: bool = False

    def __str__(self) -> str:
        return self.name


CACHE_LAYOUTS = ("contiguous", "interleaved", "gapped", "padded", "offset", "reversed", "zero")


def entries(case: Case) -> int:
    """Entries of one row, an upper bound for `indices=None`."""
    return sum(
        source.max_blocks * source.block_size if source.topk is None else source.topk
        for source in (case.main, case.extra)
        if source
    )


def bounded(case: Case) -> int:
    """The `max_seq_len` of a case that has one: three quarters of what the table holds."""
    positions = max(1, case.main.max_blocks * case.main.block_size * 3 // 4)
    return reference.longest(positions, *(case.shard or (0, 1, 1)))


# --------------------------------------------------------------------------- layouts


def strided(array: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers in another layout: every second column of a wider array, or stride 0."""
    if layout == "columns":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        wide[..., 1] = 99
        return wide[..., 0]
    if layout == "zero" and array.ndim and array.shape[0] > 0:
        return as_strided(array[:1].copy(), array.shape, (0, *array[:1].copy().strides[1:]))
    return array


def empty_cache(source: Source, width: int, dtype: np.dtype, rng: np.random.Generator):
    """(num_blocks, block_size, width) in the source's layout, poisoned everywhere."""
    blocks, size, item = source.num_blocks, source.block_size, dtype.itemsize
    shape = (blocks, size, width)

    def pool(count: int) -> np.ndarray:
        if source.unused == "nan":
            return np.full(count * item, 0xFF, np.uint8)
        return rng.integers(0, 256, count * item, np.uint8)

    if source.layout == "interleaved":  # three layers share every block
        return pool(blocks * 3 * size * width).view(dtype).reshape(blocks, 3, size, width)[:, 1]
    if source.layout == "gapped":  # something else stands behind every token
        return pool(blocks * size * 2 * width).view(dtype).reshape(blocks, size, 2, width)[:, :, 0]
    if source.layout == "padded":  # a block ends with a few numbers that are not a whole row
        stride = size * width + 5
        flat = pool(blocks * stride).view(dtype)
        return as_strided(flat, shape, (stride * item, width * item, item))
    if source.layout == "offset":  # aligned to one element only
        return pool(blocks * size * width + 1).view(dtype)[1:].reshape(shape)
    if source.layout == "zero":  # all blocks are one
        flat = pool(size * width).view(dtype)
        return as_strided(flat, shape, (0, width * item, item))
    array = pool(blocks * size * width).view(dtype).reshape(shape)
    return array[::-1] if source.layout == "reversed" else array


def empty_output(shape: tuple[int, ...], dtype: np.dtype, layout: str) -> np.ndarray:
    """An output full of a pattern that no result has. "strided": heads first, rows with a gap."""
    if layout != "strided":
        return (
            np.full(int(np.prod(shape)) * dtype.itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
        )
    *leading, heads, width = shape
    wide = empty_output((heads, *leading, width + 3), dtype, "own")
    return np.moveaxis(wide, 0, -2)[..., :width]


# --------------------------------------------------------------------------- small arrays


def _spoil(array: np.ndarray, values: list[int], rng: np.random.Generator) -> None:
    """Puts some of `values`, as far as they fit, into random places."""
    info = np.iinfo(array.dtype)
    values = [value for value in values if info.min <= value <= info.max]
    flat = array.reshape(-1)
    if flat.size:
        for place in rng.integers(0, flat.size, 1 + flat.size // 20):
            flat[place] = values[rng.integers(len(values))]


def _make_source(
    case: Case, source: Source, requests: int, rng: np.random.Generator, main: bool
) -> dict[str, np.ndarray]:
    """indices, topk_lens, block_table and seq_lens of one source, those that it has."""
    dtype = np.dtype(source.index_dtype)
    rows, batch = int(np.prod(case.leading)), case.leading[0]
    arrays: dict[str, np.ndarray] = {}
    capacity = source.num_blocks * source.block_size
    high = capacity
    if source.paged:
        shard = case.shard if main and case.shard else (0, 1, 1)
        high = reference.longest(source.max_blocks * source.block_size, *shard)
        shape = (requests, source.max_blocks)
        if source.num_blocks:
            table = rng.integers(0, source.num_blocks, shape)
            if table.size <= source.num_blocks:
                table = rng.permutation(source.num_blocks)[: table.size].reshape(shape)
        else:
            table = np.full(shape, -1)
        table[rng.random(shape) < source.holes] = -1
        arrays["block_table"] = table.astype(dtype)
        if "block" in source.faults:
            bad = [-2, source.num_blocks, source.num_blocks + 9, 2**31 - 1, -(2**31)]
            bad += [2**32, 2**32 + 1, 2**62]
            _spoil(arrays["block_table"], bad, rng)
        if source.seq_lens:
            if main and case.max_seq_len:
                high = bounded(case)
            lens = rng.integers(0, high + 1, requests)
            lens[rng.random(requests) < 0.15] = 0
            lens[rng.random(requests) < 0.15] = high
            arrays["seq_lens"] = lens.astype(dtype)
            if "seq" in source.faults:
                bad = [-1, high + 1, high + 100, 2**31 - 1, -(2**31), 2**32 + 1, 2**62, -(2**62)]
                _spoil(arrays["seq_lens"], bad, rng)
    if source.topk is None:
        return arrays

    shape = (*case.leading, source.topk)
    indices = rng.integers(0, high, shape) if high else np.full(shape, -1)
    indices[rng.random(shape) < source.padding] = -1
    indices = indices.astype(dtype)
    bad = []
    if "index" in source.faults:
        bad += [-2, -3, -(2**31), -(2**32) - 1, -(2**63)]
    if "slot" in source.faults or "logical" in source.faults:
        bad += [high, high + 1, high + 1000, 2**31 - 1, 2**32, 2**32 + 5, 2**40, 2**62, 2**63 - 1]
    if bad:
        _spoil(indices, bad, rng)
    if source.topk_lens:
        lens = rng.integers(0, source.topk + 1, rows if source.topk_lens == "row" else batch)
        lens[rng.random(lens.shape) < 0.15] = 0
        lens = lens.astype(dtype)
        if "topk" in source.faults:
            bad = [-1, source.topk + 1, source.topk + 64, 2**31 - 1, -(2**31), 2**32 + 1, -(2**62)]
            _spoil(lens, bad, rng)
        per_row = lens if lens.size == rows else np.repeat(lens, rows // batch)
        behind = np.arange(source.topk) >= per_row.reshape(*case.leading, 1)
        garbage = rng.integers(-(2**31), 2**31, shape).astype(dtype)
        indices = np.where(behind, garbage, indices)
        if source.topk_lens == "row" and not case.flat:
            lens = lens.reshape(case.leading)
        arrays["topk_lens"] = lens
    arrays["indices"] = indices
    return arrays


# --------------------------------------------------------------------------- caches and queries


def _rows(source: Source, d_qk: int, dtype: np.dtype, count: int, rng: np.random.Generator):
    """`count` stored rows with finite numbers: (count, row) of the cache's dtype."""
    numbers = rng.standard_normal((count, d_qk), np.float32) * np.float32(source.magnitude)
    if source.cache_format == "dense":
        return numbers.astype(dtype)
    raw = reference.encode(numbers, source.cache_format, tensor_scale(source))
    if source.scales == "wild":
        scales = np.tile(np.array([0.0, 0.0, 2.0**60, 2.0**-60], "<f4"), (count, 1))
        scales[:, 0] = rng.uniform(0.3, 3, count) * source.magnitude / 448
        raw[:, 512:528] = scales.view(np.uint8)
    if source.scales == "far":
        scales = raw[:, 512:528].copy().view("<f4")
        far = rng.random(count) < 0.01
        scales[far, 2] *= np.float32(2.0) ** rng.integers(-40, 40, np.count_nonzero(far))
        raw[:, 512:528] = scales.view(np.uint8)
    return raw


def tensor_scale(source: Source) -> float | None:
    """The `cache_scale` that fits the source's numbers."""
    return source.magnitude * 4.5 / 448 if source.cache_format == "fp8_tensor" else None


def _make_cache(
    case: Case, source: Source, slots: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The cache with finite rows in the slots named and poison everywhere else."""
    if source.cache_format == "dense":
        dtype, width = DTYPES[case.dtype], case.d_qk
    else:
        dtype = np.dtype(getattr(ml_dtypes, source.byte_dtype, source.byte_dtype))
        width = reference.FORMATS[source.cache_format].row_bytes
    cache = empty_cache(source, width, dtype, rng)
    used = np.unique(slots[slots >= 0])
    rows = _rows(source, case.d_qk, dtype, len(used), rng)
    block, offset = np.divmod(used, source.block_size)
    cache[block, offset] = rows.view(dtype)
    if case.nan == "entry" and used.size:
        pick = rng.integers(used.size)
        place = (block[pick], offset[pick])
        if dtype.itemsize == 1:
            cache.view(np.uint8)[(*place, rng.integers(512))] = 0x7F
        else:
            cache[(*place, rng.integers(width))] = np.nan
    if source.ndim == 2:
        return cache[:, 0]
    return cache[:, :, None] if source.ndim == 4 else cache


def _make_query(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    dtype = DTYPES[case.dtype]
    shape = (*case.leading, case.heads, case.d_qk)
    numbers = rng.standard_normal(shape, np.float32)
    if any(source and source.scales != "amax" for source in (case.main, case.extra)):
        # the group of the largest scales must not decide the scores alone
        numbers[..., 256:384] = 0
    if case.nan == "q" and numbers.size:
        numbers[tuple(rng.integers(0, n) for n in shape)] = np.nan
    numbers = numbers.astype(dtype)
    cut = case.d_qk - case.q_rope
    parts = (numbers[..., :cut], numbers[..., cut:]) if case.q_rope else (numbers,)

    def lay(part: np.ndarray, index: int) -> np.ndarray:
        if case.q_layout == "transposed" and index == 0:  # as a batched product over heads gives it
            return np.moveaxis(np.ascontiguousarray(np.moveaxis(part, -2, 0)), 0, -2)
        if case.q_layout in ("sliced", "transposed"):  # behind another part of the same projection
            wide = np.full((*part.shape[:-1], part.shape[-1] + 3), np.nan, dtype)
            wide[..., 3:] = part
            return wide[..., 3:]
        return strided(np.ascontiguousarray(part), case.q_layout)

    return tuple(lay(part, index) for index, part in enumerate(parts))


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """The arguments of `attend` as NumPy arrays; the same case and seed give the same bits."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    rows, batch = int(np.prod(case.leading)), case.leading[0]
    requests = batch if case.requests is None else case.requests
    main = _make_source(case, case.main, requests, rng, main=True)
    arrays = dict(main)
    if case.extra:
        extra = _make_source(case, case.extra, requests, rng, main=False)
        arrays.update({f"extra_{name}": array for name, array in extra.items()})
    index_dtype = np.dtype(case.main.index_dtype)
    row_shape = (rows,) if case.flat else case.leading
    if case.request_ids:
        ids = rng.integers(0, requests, rows) if requests else np.full(rows, -1)
        ids[rng.random(rows) < 0.15] = -1
        ids = ids.astype(index_dtype)
        if case.bad_request:
            _spoil(ids, [-2, requests, requests + 5, 2**31 - 1, -(2**31), 2**32, 2**62], rng)
        arrays["request_ids"] = ids.reshape(row_shape)
    if case.query_positions:
        shard = case.shard or (0, 1, 1)
        high = reference.longest(case.main.max_blocks * case.main.block_size, *shard)
        positions = rng.integers(-1, high + 3, rows)
        arrays["query_positions"] = positions.astype(index_dtype).reshape(row_shape)
    arrays = {name: strided(array, case.small_layout) for name, array in arrays.items()}

    if case.shard:
        arrays["shard"] = case.shard
    if case.max_seq_len:
        arrays["max_seq_len"] = bounded(case)

    caches = {"kv_cache": np.empty((case.main.num_blocks, case.main.block_size, 0), np.uint8)}
    if case.extra:
        shape = (case.extra.num_blocks, case.extra.block_size, 0)
        caches["extra_kv_cache"] = np.empty(shape, np.uint8)
    arrays.setdefault("indices", None)
    slots = reference.resolve(leading=case.leading, **caches, **arrays)
    arguments = {name: array for name, array in arrays.items() if array is not None}
    arguments["indices"] = arrays["indices"]
    arguments["kv_cache"] = _make_cache(case, case.main, slots[0], rng)
    if case.extra:
        arguments["extra_kv_cache"] = _make_cache(case, case.extra, slots[1], rng)
    query = _make_query(case, rng)
    arguments["q"] = query if case.q_rope else query[0]

    for prefix, source in (("", case.main), ("extra_", case.extra)):
        if source and source.cache_format != "dense":
            arguments[prefix + "cache_format"] = source.cache_format
            if source.cache_format == "fp8_tensor":
                arguments[prefix + "cache_scale"] = tensor_scale(source)
    magnitude = max(source.magnitude for source in (case.main, case.extra) if source)
    arguments["softmax_scale"] = case.spread / (magnitude * case.d_qk**0.5)
    if case.d_v is not None:
        arguments["head_dim_v"] = case.d_v
    if case.logit_cap:
        arguments["logit_cap"] = case.logit_cap
    if case.sink:
        sink = rng.standard_normal(case.heads).astype(np.float32)
        if case.sink == "large":
            sink *= np.float32(1e4)
        if case.sink == "infinite":
            sink[rng.random(case.heads) < 0.5] = np.inf
            sink[rng.random(case.heads) < 0.3] = -np.inf
        layout = "columns" if case.small_layout == "columns" else "contiguous"
        arguments["attn_sink"] = strided(sink, layout)
    shape = (*case.leading, case.heads)
    if case.out:
        kind = np.dtype(np.float32) if case.out == "float32" else dtype
        arguments["out"] = empty_output((*shape, case.d_v or reference.D_V), kind, case.out)
    if case.lse:
        arguments["lse"] = empty_output((*shape, 1), np.dtype(np.float32), case.lse)[..., 0]
    if case.max_logits:
        arguments["max_logits"] = empty_output((*shape, 1), np.dtype(np.float32), case.max_logits)[
            ..., 0
        ]
    if case.validate != "deferred":
        arguments["validate"] = case.validate
    if case.batch_invariant:
        arguments["batch_invariant"] = True
    return arguments


# --------------------------------------------------------------------------- the table

PAGED = Source(paged=True, seq_lens=True)
SMALL = Source(topk=12, num_blocks=4, block_size=4, max_blocks=3)
FP8 = Source(cache_format="fp8_ds_mla")
NOROPE = Source(cache_format="fp8_ds_mla_norope")
TENSOR = Source(cache_format="fp8_tensor")
FAR = {"scales": "far", "topk": 700, "num_blocks": 64, "block_size": 16}
ALL = replace(PAGED, topk=None)

# A number in a comment is that of a public report: an input on which another decoder went wrong.
CASES = [
    # dtypes and formats
    Case("plain"),
    Case("plain_float16", dtype="float16"),
    Case("plain_float32", dtype="float32"),
    Case("fp8_ds_mla", main=FP8),  # 1: scales that are no powers of two
    Case("fp8_ds_mla_float16", main=FP8, dtype="float16"),
    Case("fp8_ds_mla_float32", main=FP8, dtype="float32"),
    Case("fp8_ds_mla_norope", main=NOROPE, d_qk=512),  # 73: a model without rope
    Case("fp8_tensor", main=TENSOR),
    Case("fp8_typed_bytes", main=replace(FP8, byte_dtype="float8_e4m3fn")),
    Case("wild_scales", main=replace(FP8, scales="wild"), out="float32"),  # 1, 57
    Case("wild_scales_norope", main=replace(NOROPE, scales="wild"), d_qk=512, out="float32"),
    # scales of 2^60 only behind a tile of usual ones, and with weights of 2^-60 and more
    Case(
        "wild_scales_late",
        leading=(2,),
        heads=64,
        main=replace(FP8, topk=64),
        extra=replace(FP8, topk=20, scales="wild"),
        spread=20,
        out="float32",
    ),
    Case("far_scales", heads=64, main=replace(FP8, **FAR), spread=8, out="float32"),
    Case("far_scales_of_32_heads", heads=32, main=replace(FP8, **FAR), spread=8, out="float32"),
    Case("far_scales_of_9_heads", heads=9, main=replace(FP8, **FAR), spread=8, out="float32"),
    Case("far_scales_norope", heads=40, main=replace(NOROPE, **FAR), d_qk=512, out="float32"),
    Case("random_unused_bytes", main=replace(FP8, unused="random")),  # 49, 68
    # heads and widths: 34, 35, 58
    *(Case(f"heads_{n}", heads=n, main=SMALL) for n in (1, 2, 6, 8, 12, 15, 17, 24, 33, 48, 96)),
    Case("heads_64", heads=64),
    Case("heads_128", heads=128, main=FP8),
    Case("heads_256", heads=256, leading=(1,)),
    Case("d_512", d_qk=512),  # 73
    Case("d_512_v_448", d_qk=512, d_v=448),
    Case("d_576_v_576", d_v=576),
    Case("d_128_v_128", d_qk=128, d_v=128),
    Case("d_67_v_31", d_qk=67, d_v=31, q_rope=3),
    Case("d_1_v_1", d_qk=1, d_v=1),
    Case("d_v_1", d_v=1),
    # lengths of a row: 3, 21
    *(
        Case(f"topk_{n}", leading=(2,), main=replace(Source(num_blocks=64), topk=n))
        for n in (0, 1, 7, 64, 192, 256, 512, 1152, 2048, 2051)
    ),
    Case("decode", leading=(2,), heads=16, main=Source(num_blocks=64, block_size=64, topk=2048)),
    Case("decode_fp8", leading=(2,), heads=16, main=replace(FP8, num_blocks=64, topk=2048)),
    # rows of several tiles and splits, with everything that is done per tile or once at the end
    *(
        Case(
            f"long_{name}",
            leading=(2,),
            dtype=dtype,
            main=replace(source, topk=700, num_blocks=40),
            extra=replace(source, topk=500, num_blocks=9, block_size=7),
            logit_cap=20.0,
            spread=15.0,
            sink="normal",
            max_logits="given",
        )
        for name, source, dtype in (
            ("bfloat16", Source(), "bfloat16"),
            ("float32", Source(), "float32"),
            ("fp8_float16", FP8, "float16"),
            ("fp8_float32", FP8, "float32"),
        )
    ),
    Case("no_rows", leading=(0,)),  # 27, 72
    Case("no_batch", leading=(0, 2)),
    Case("no_queries", leading=(2, 0)),
    Case("many_rows", leading=(300,), heads=2, main=SMALL),
    Case("all_padding", main=replace(SMALL, padding=1.0)),  # 7, 18
    Case("no_blocks", main=replace(SMALL, num_blocks=0)),  # 20, 80
    Case("no_table", main=replace(PAGED, max_blocks=0)),
    # block tables and lengths: 16, 50, 71
    Case("paged", main=PAGED),
    Case("paged_int64", main=replace(PAGED, index_dtype="int64")),
    Case("paged_fp8", main=replace(FP8, paged=True, seq_lens=True)),
    Case("paged_without_seq_lens", main=replace(PAGED, seq_lens=False)),
    Case("paged_batch", main=PAGED, leading=(3, 4)),
    Case("block_size_1", main=replace(PAGED, block_size=1, num_blocks=40, max_blocks=30)),
    Case("block_size_480", main=replace(PAGED, block_size=480, num_blocks=3, max_blocks=2)),  # 59
    Case("slots_as_rows", main=Source(block_size=1, num_blocks=60, ndim=2)),
    Case("cache_of_four_dimensions", main=replace(PAGED, ndim=4)),
    Case("topk_lens", main=replace(PAGED, topk_lens="row")),
    Case("topk_lens_batch", main=replace(PAGED, topk_lens="batch"), leading=(4, 2)),
    Case("request_ids", main=PAGED, leading=(9,), requests=3, request_ids=True),
    Case("request_ids_flat", main=PAGED, leading=(3, 3), requests=5, request_ids=True, flat=True),
    Case("causal", main=PAGED, leading=(2, 5), query_positions=True),
    Case("causal_flat", main=PAGED, leading=(2, 5), query_positions=True, flat=True),
    Case("shard", main=PAGED, shard=(1, 4, 8)),
    Case("shard_of_one", main=PAGED, shard=(0, 1, 1)),
    Case("shard_odd", main=PAGED, shard=(2, 3, 5), leading=(2, 3), query_positions=True),
    Case("every_position", main=ALL),
    Case("every_position_fp8", main=replace(FP8, paged=True, seq_lens=True, topk=None)),
    Case("every_position_causal", main=ALL, leading=(2, 5), query_positions=True),
    Case("every_position_shard", main=ALL, shard=(1, 2, 3), leading=(2, 2), query_positions=True),
    Case("every_position_bounded", main=ALL, max_seq_len=True),
    Case("every_position_bounded_shard", main=ALL, max_seq_len=True, shard=(2, 3, 4)),
    # two caches, each with a paging of its own: 84, 87
    Case("extra", extra=replace(SMALL, block_size=7), d_qk=512),
    Case("extra_paged", main=PAGED, extra=replace(PAGED, block_size=4, topk=30)),
    Case("extra_of_another_format", d_qk=512, extra=replace(NOROPE, topk_lens="row")),
    Case("extra_every_position", main=PAGED, extra=replace(ALL, max_blocks=2), leading=(2, 2)),
    Case("extra_alone_paged", extra=PAGED, request_ids=True, requests=4),
    Case("extra_empty", main=replace(SMALL, padding=1.0), extra=replace(SMALL, topk=0)),
    # sinks and caps: 65, 86
    Case("sink", sink="normal"),
    Case("sink_large", sink="large"),
    Case("sink_infinite", sink="infinite"),
    Case("sink_of_empty_rows", sink="infinite", main=replace(PAGED, topk_lens="row")),
    Case("logit_cap", logit_cap=30.0, spread=20.0),
    Case("logit_cap_small", logit_cap=0.5, dtype="float32"),
    # magnitudes: 75, 95
    *(
        Case(
            f"{kind}_k_{size}", spread=spread, main=Source(magnitude=size, topk=200, num_blocks=20)
        )
        for kind, spread in (("flat", 0.2), ("peaked", 8.0))
        for size in (0.1, 1.0, 5.0)
    ),
    Case("peaked_float32", spread=8.0, dtype="float32", main=Source(topk=200, num_blocks=20)),
    Case("huge_scores", spread=1e5),
    Case("huge_scores_float32", spread=1e8, dtype="float32"),
    # NaN: 17, 32
    Case("nan_in_q", nan="q"),
    Case("nan_in_an_entry", nan="entry", main=SMALL),
    Case("nan_in_an_fp8_entry", nan="entry", main=replace(SMALL, cache_format="fp8_ds_mla")),
    # layouts: 26, 56, 61, 70, 84
    *(
        Case(f"{layout}_{name}", main=replace(source, layout=layout))
        for layout in CACHE_LAYOUTS
        for name, source in (("dense", PAGED), ("fp8", replace(FP8, paged=True)))
        if layout != "contiguous"
    ),
    Case(
        "layouts_apart",
        main=replace(PAGED, layout="interleaved"),
        extra=replace(SMALL, layout="padded"),
    ),
    Case("q_pair", q_rope=64),
    Case("q_pair_transposed", q_rope=64, q_layout="transposed", leading=(2, 3)),
    Case("q_sliced", q_layout="sliced"),
    Case("q_repeated", q_layout="zero"),
    Case(
        "columns",
        main=replace(PAGED, topk_lens="row"),
        small_layout="columns",
        sink="normal",
        query_positions=True,
        request_ids=True,
        leading=(3, 2),
    ),
    Case(
        "stride_zero",
        main=replace(PAGED, topk_lens="row"),
        small_layout="zero",
        query_positions=True,
        request_ids=True,
        leading=(3, 2),
    ),
    # outputs: 28, 96
    Case("out", out="own", lse="given", max_logits="given", leading=(2, 3)),
    Case("out_float32", out="float32"),
    Case("out_strided", out="strided", lse="strided", max_logits="strided", leading=(2, 3)),
    Case("batch_invariant", batch_invariant=True, main=replace(PAGED, topk_lens="row")),
    # faults, masked: 2, 46, 82, 93
    Case("bad_slots", main=replace(SMALL, faults=("index", "slot"))),
    Case("bad_slots_int64", main=replace(SMALL, index_dtype="int64", faults=("index", "slot"))),
    Case("bad_slots_fp8", main=replace(FP8, faults=("index", "slot"))),
    Case("bad_positions", main=replace(PAGED, seq_lens=False, faults=("index", "logical"))),
    Case("bad_blocks", main=replace(PAGED, seq_lens=False, faults=("block",))),
    Case(
        "bad_blocks_int64",
        main=replace(PAGED, index_dtype="int64", faults=("block",)),
        leading=(9,),
    ),
    Case("bad_lengths", main=replace(PAGED, topk_lens="row", faults=("topk", "seq"))),
    Case("bad_lengths_everywhere", main=replace(ALL, faults=("seq",)), leading=(6,)),
    Case("bad_requests", main=PAGED, request_ids=True, bad_request=True, leading=(8,), requests=3),
]

# Cases that are cut into parts in different ways: their bits are compared with themselves.
REPEAT = [
    Case("decode", leading=(1,), heads=16, main=Source(topk=2048, num_blocks=64)),
    Case("fp8", leading=(1,), heads=128, main=replace(FP8, topk=500, num_blocks=32)),
    Case("rows", leading=(70,), heads=4, main=Source(topk=60)),
    Case("joined", leading=(2, 3), main=PAGED, extra=PAGED, sink="normal"),
    Case("float32", dtype="float32", heads=3, main=Source(topk=777, num_blocks=64)),
]
