"""The operation in NumPy and float64: what every kernel is compared with.

Written for reading and independent of the compiled code: its own translation of indices, its own
reading of packed bytes, its own table of e4m3. It takes NumPy arrays only (bfloat16 and float8 by
`ml_dtypes`), never writes to them, and masks faults silently; `fault` tells which one there is.

    rows = decode(kv_cache, cache_format)           what the bytes of a cache mean
    kv_cache = encode(rows, cache_format, ...)      the bytes that `pack` must give
    slots, = resolve(kv_cache, indices, ...)        where an entry points, or why it is masked
    out, lse = attend(q, kv_cache, indices, ...)
    out, lse = merge(outs, lses)

`attention` is `attend` with all that is needed to judge another result: how far it may be away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

# --------------------------------------------------------------------------- cache formats


@dataclass(frozen=True)
class Format:
    """A packed row: e4m3 numbers from byte 0, float32 scales, bfloat16 rope; counts, not bytes."""

    row_bytes: int
    quantised: int
    group: int
    scale_offset: int | None  # None: one scale for the whole cache
    rope: int
    rope_offset: int

    @property
    def d_qk(self) -> int:
        return self.quantised + self.rope


FORMATS = {
    "fp8_ds_mla": Format(656, 512, 128, 512, 64, 528),
    "fp8_ds_mla_norope": Format(528, 512, 128, 512, 0, 528),
    "fp8_tensor": Format(576, 576, 576, None, 0, 576),
}

D_V = 512  # of every packed format, and of dense rows of 512 and 576 unless said otherwise


def _e4m3(byte: int) -> float:
    """Bias 7, three bits of mantissa, no infinities, NaN where all bits but the sign are set."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3(byte) for byte in range(256)])


def _cache_format(kv_cache: np.ndarray, cache_format: str | None) -> str:
    if cache_format is None or cache_format == "dense":
        if kv_cache.dtype.itemsize == 1:
            raise ValueError("a cache of bytes needs the name of its cache_format")
        return "dense"
    if cache_format not in FORMATS:
        raise ValueError(f"unknown cache_format {cache_format!r}")
    return cache_format


def _blocks(kv_cache: np.ndarray) -> np.ndarray:
    """(num_blocks, block_size, row) of any of the three shapes that a cache may have."""
    if kv_cache.ndim == 2:
        return kv_cache[:, None, :]
    if kv_cache.ndim == 4:
        return kv_cache[:, :, 0, :]
    return kv_cache


def _read(raw: np.ndarray, name: str, cache_scale: float | None) -> np.ndarray:
    """Float64 numbers of rows as they are stored, (n, d_qk) of (n, row)."""
    if name == "dense":
        return raw.astype(np.float64)
    fmt = FORMATS[name]
    raw = raw.view(np.uint8)
    numbers = E4M3[raw[:, : fmt.quantised]]
    if fmt.scale_offset is None:
        numbers = numbers * float(np.float32(cache_scale))
    else:
        end = fmt.scale_offset + 4 * (fmt.quantised // fmt.group)
        scales = np.ascontiguousarray(raw[:, fmt.scale_offset : end]).view("<f4")
        numbers = numbers * np.repeat(scales.astype(np.float64), fmt.group, axis=1)
    if not fmt.rope:
        return numbers
    end = fmt.rope_offset + 2 * fmt.rope
    bits = np.ascontiguousarray(raw[:, fmt.rope_offset : end]).view("<u2")
    rope = (bits.astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([numbers, rope.astype(np.float64)], axis=1)


def decode(
    kv_cache: np.ndarray, cache_format: str | None = None, cache_scale: float | None = None
) -> np.ndarray:
    """All rows of a cache, exactly as their bytes say: float64, (num_slots, d_qk)."""
    blocks = _blocks(kv_cache)
    raw = np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1])
    with np.errstate(all="ignore"):
        return _read(raw, _cache_format(kv_cache, cache_format), cache_scale)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits (uint16) of float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), (bits >> 16 | 0x40).astype(np.uint16), rounded)


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """The bytes of float32 numbers clamped to ±448 and rounded to the nearest, ties to even."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        size = np.minimum(np.abs(numbers.astype(np.float64)), 448.0)
    high = np.clip(np.searchsorted(E4M3[:127], size), 1, 126)  # E4M3[high - 1] < size <= E4M3[high]
    below, above = size - E4M3[high - 1], E4M3[high] - size
    up = (above < below) | ((above == below) & (high % 2 == 0))
    byte = np.where(up, high, high - 1).astype(np.uint8) | np.signbit(numbers).astype(np.uint8) << 7
    return np.where(np.isnan(numbers), np.uint8(0x7F), byte)


def encode(
    rows: np.ndarray,
    cache_format: str = "dense",
    cache_scale: float | None = None,
    dtype: Any = None,
) -> np.ndarray:
    """The stored rows that a writer makes of rows (n, d_qk): (n, row).

    Of a packed format uint8: a group's scale is amax / 448 in float32, amax over its finite
    numbers; a number is divided by its scale in float32, clamped and rounded to nearest even. Under
    a scale of 0 all numbers are 0. A dense row is rounded to `dtype`, by default the rows' own. NaN
    stays NaN; its payload is not part of the format.
    """
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        numbers = rows.astype(np.float32)
    if cache_format == "dense":
        dtype = np.dtype(rows.dtype if dtype is None else dtype)
        if dtype.name == "bfloat16":
            return to_bfloat16(numbers).view(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(dtype)

    fmt = FORMATS[cache_format]
    raw = np.zeros((len(numbers), fmt.row_bytes), np.uint8)
    groups = numbers[:, : fmt.quantised].reshape(-1, fmt.quantised // fmt.group, fmt.group)
    if fmt.scale_offset is None:
        scales = np.full(groups.shape[:2], cache_scale, np.float32)
    else:
        amax = np.where(np.isfinite(groups), np.abs(groups), np.float32(0)).max(axis=2)
        scales = amax / np.float32(448)
        end = fmt.scale_offset + 4 * scales.shape[1]
        raw[:, fmt.scale_offset : end] = scales.view(np.uint8)
    with np.errstate(all="ignore"):
        scaled = groups / scales[:, :, None]
    zero = (scales == 0)[:, :, None]
    scaled = np.where(zero, np.where(np.isnan(groups), groups, np.float32(0)), scaled)
    raw[:, : fmt.quantised] = to_e4m3(scaled).reshape(-1, fmt.quantised)
    if fmt.rope:
        rope = to_bfloat16(numbers[:, fmt.quantised :])
        raw[:, fmt.rope_offset : fmt.rope_offset + 2 * fmt.rope] = rope.view(np.uint8)
    return raw


# --------------------------------------------------------------------------- entries -> slots


class Cause(IntEnum):
    """Why an entry is masked."""

    VALID = 0
    PADDING = 1
    PAST_TOPK_LEN = 2
    PAST_SEQ_LEN = 3
    AFTER_QUERY = 4
    OTHER_SHARD = 5
    UNALLOCATED = 6
    PADDING_ROW = 7
    FAULT_INDEX = 8
    FAULT_SLOT = 9
    FAULT_LOGICAL = 10
    FAULT_BLOCK = 11
    FAULT_REQUEST = 12
    FAULT_TOPK = 13
    FAULT_SEQ = 14


@dataclass(frozen=True)
class Fault:
    """The first fault of a call and how many there are in the same array."""

    tensor: str
    position: tuple[int, ...]
    value: int
    bound: int  # the first value that is too large
    cause: Cause
    count: int


LAST = np.iinfo(np.int64).max


def owned(length: Any, rank: int, size: int, interleave: int) -> Any:
    """How many of the positions [0, length) belong to this rank."""
    rounds, rest = np.divmod(length, interleave * size)
    return rounds * interleave + np.clip(rest - rank * interleave, 0, interleave)


def longest(capacity: int, rank: int, size: int, interleave: int) -> int:
    """The largest length of which a rank with room for `capacity` positions holds its share."""
    if size == 1:
        return capacity
    rounds, rest = divmod(capacity, interleave)
    return rounds * interleave * size + rank * interleave + rest


@dataclass
class _Source:
    """One cache's entries, translated: `slots` (rows, topk) holds a slot or minus the cause."""

    slots: np.ndarray
    faults: list[tuple[int, int, int, Fault]]  # row, rank within the row, entry, fault


def _translate(
    leading: tuple[int, ...],
    num_blocks: int,
    block_size: int,
    indices: np.ndarray | None,
    block_table: np.ndarray | None,
    request_ids: np.ndarray | None,
    requests: int,
    seq_lens: np.ndarray | None,
    query_positions: np.ndarray | None,
    shard: tuple[int, int, int] | None,
    max_seq_len: int | None,
    topk_lens: np.ndarray | None,
    prefix: str,
) -> _Source:
    rows = int(np.prod(leading))
    batch, s_q = leading if len(leading) == 2 else (leading[0], 1)
    rank, size, interleave = shard or (0, 1, 1)
    faults: list[tuple[int, int, int, Fault]] = []

    def report(
        bad: np.ndarray, rank_in_row: int, cause: Cause, array: str, bound: int, place, value
    ) -> None:
        """`bad` is per row or per entry; place and value tell of one of them what to say."""
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            fault = Fault(array, place(*where), int(value(*where)), bound, cause, int(bad.sum()))
            faults.append((where[0], rank_in_row, where[1] if len(where) > 1 else 0, fault))

    def row_position(row: int) -> tuple[int, ...]:
        return (row // s_q, row % s_q) if len(leading) == 2 else (row,)

    def per_row(array: np.ndarray) -> np.ndarray:
        return np.asarray(array).astype(np.int64).reshape(rows)

    # the row: its request, how many entries count, which positions it may see
    request = np.arange(rows) // s_q if request_ids is None else per_row(request_ids)
    row_cause = np.zeros(rows, np.int64)
    if request_ids is not None:
        foreign = (request < -1) | (request >= requests)
        row_cause[request == -1] = Cause.PADDING_ROW
        row_cause[foreign] = Cause.FAULT_REQUEST
        position = row_position if np.ndim(request_ids) == len(leading) else lambda row: (row,)
        report(
            foreign,
            0,
            Cause.FAULT_REQUEST,
            "request_ids",
            requests,
            position,
            lambda row: request[row],
        )
    alive = row_cause == 0
    request = np.where(alive, request, 0)

    paged = block_table is not None
    capacity = block_table.shape[1] * block_size if paged else num_blocks * block_size
    legal = longest(capacity, rank, size, interleave)
    if max_seq_len is not None:
        legal = min(legal, max_seq_len)
    limit = np.full(rows, LAST)
    if seq_lens is not None:
        lengths = np.zeros(rows, np.int64)
        lengths[alive] = seq_lens.astype(np.int64)[request[alive]]
        limit = np.clip(lengths, 0, legal)
        report(
            (limit != lengths) & alive,
            2,
            Cause.FAULT_SEQ,
            prefix + "seq_lens",
            legal + 1,
            lambda row: (int(request[row]),),
            lambda row: lengths[row],
        )
    last = np.full(rows, LAST) if query_positions is None else per_row(query_positions)

    if indices is None:
        topk = int(owned(legal, rank, size, interleave))
        visible = np.maximum(np.where(last < limit, last + 1, limit), 0)
        entries = np.clip(owned(visible, rank, size, interleave), 0, topk)
    else:
        topk = indices.shape[-1]
        entries = np.full(rows, topk)
    if topk_lens is not None:
        array = np.asarray(topk_lens).astype(np.int64)
        whole = array.size == rows
        lengths = array.reshape(rows) if whole else np.repeat(array.reshape(batch), s_q)
        entries = np.clip(lengths, 0, topk)
        position = row_position if array.ndim == len(leading) else lambda row: (row,)
        report(
            (entries != lengths) & alive,
            1,
            Cause.FAULT_TOPK,
            prefix + "topk_lens",
            topk + 1,
            position if whole else lambda row: (row // s_q,),
            lambda row: lengths[row],
        )
    entries = np.where(alive, entries, 0)

    # the entry: bounds of its position, then its block
    if indices is None:
        index = np.broadcast_to(np.arange(topk), (rows, topk))
    else:
        index = indices.astype(np.int64).reshape(rows, topk)
    tests = [
        (np.broadcast_to(~alive[:, None], index.shape), row_cause[:, None]),
        (np.arange(topk) >= entries[:, None], Cause.PAST_TOPK_LEN),
        (index == -1, Cause.PADDING),
        (index < -1, Cause.FAULT_INDEX),
    ]
    position = np.maximum(index, 0)
    if not paged:
        block = position // block_size
        tests.append((block >= num_blocks, Cause.FAULT_SLOT))
    else:
        if indices is not None:
            tests.append((position > last[:, None], Cause.AFTER_QUERY))
            tests.append((position >= limit[:, None], Cause.PAST_SEQ_LEN))
            chunk = position // interleave
            tests.append((chunk % size != rank, Cause.OTHER_SHARD))
            position = chunk // size * interleave + position % interleave
        logical = position // block_size
        held = logical < block_table.shape[1]
        tests.append((~held, Cause.FAULT_LOGICAL))
        block = np.full(index.shape, -1)
        if block_table.size and rows:
            table = block_table.astype(np.int64)
            block = np.where(held, table[request[:, None], np.where(held, logical, 0)], -1)
        tests.append((block == -1, Cause.UNALLOCATED))
        tests.append(((block < -1) | (block >= num_blocks), Cause.FAULT_BLOCK))
    cause = np.zeros(index.shape, np.int64)
    for holds, name in reversed(tests):
        cause = np.where(holds, name, cause)
    valid = cause == 0
    slots = np.where(valid, np.where(valid, block, 0) * block_size + position % block_size, -cause)

    bad_index = (
        (cause == Cause.FAULT_INDEX) | (cause == Cause.FAULT_SLOT) | (cause == Cause.FAULT_LOGICAL)
    )
    if bad_index.any():
        row, entry = np.argwhere(bad_index)[0]
        report(
            bad_index,
            3,
            Cause(int(cause[row, entry])),
            prefix + "indices",
            legal if paged else capacity,
            lambda row, entry: (*row_position(row), entry),
            lambda row, entry: index[row, entry],
        )
    if paged:
        report(
            cause == Cause.FAULT_BLOCK,
            3,
            Cause.FAULT_BLOCK,
            prefix + "block_table",
            num_blocks,
            lambda row, entry: (int(request[row]), int(logical[row, entry])),
            lambda row, entry: block[row, entry],
        )
    return _Source(slots, faults)


def _sources(
    kv_cache: np.ndarray,
    indices: np.ndarray | None,
    leading: tuple[int, ...] | None,
    *,
    block_table: np.ndarray | None = None,
    request_ids: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
    query_positions: np.ndarray | None = None,
    shard: tuple[int, int, int] | None = None,
    max_seq_len: int | None = None,
    topk_lens: np.ndarray | None = None,
    extra_kv_cache: np.ndarray | None = None,
    extra_indices: np.ndarray | None = None,
    extra_topk_lens: np.ndarray | None = None,
    extra_block_table: np.ndarray | None = None,
    extra_seq_lens: np.ndarray | None = None,
) -> tuple[list[_Source], tuple[int, ...]]:
    if leading is None:
        if indices is not None:
            leading = indices.shape[:-1]
        else:
            per_row = [query_positions, request_ids, seq_lens]
            leading = next(array.shape for array in per_row if array is not None)
    tables = [table for table in (block_table, extra_block_table) if table is not None]
    sources = []
    for which, (cache, index, table, lens, most) in enumerate(
        [
            (kv_cache, indices, block_table, seq_lens, topk_lens),
            (extra_kv_cache, extra_indices, extra_block_table, extra_seq_lens, extra_topk_lens),
        ]
    ):
        if cache is None:
            continue
        num_blocks, block_size = _blocks(cache).shape[:2]
        sources.append(
            _translate(
                leading,
                num_blocks,
                block_size,
                index,
                table,
                request_ids,
                (tables[0] if table is None else table).shape[0] if tables else 0,
                lens,
                None if which else query_positions,
                None if which else shard,
                None if which else max_seq_len,
                most,
                "extra_" if which else "",
            )
        )
    if len(sources) == 2 and request_ids is not None:
        # a row that one source finds empty is empty in both
        for one, other in (sources, sources[::-1]):
            for cause in (Cause.PADDING_ROW, Cause.FAULT_REQUEST):
                if one.slots.shape[1]:
                    empty = one.slots[:, 0] == -cause
                    other.slots[empty] = -cause
    return sources, leading


def resolve(
    kv_cache: np.ndarray,
    indices: np.ndarray | None,
    *,
    leading: tuple[int, ...] | None = None,
    **arrays: Any,
) -> tuple[np.ndarray, ...]:
    """Where every entry points: one int64 array per cache, of the shape of its indices.

    Takes `check`'s keywords and q's leading shape, which only `indices=None` needs. An element is
    the slot, or minus the `Cause` for which the entry is masked. Without indices the last dimension
    counts the positions that a row can have at most.
    """
    sources, leading = _sources(kv_cache, indices, leading, **arrays)
    return tuple(source.slots.reshape(*leading, source.slots.shape[1]) for source in sources)


def fault(
    kv_cache: np.ndarray,
    indices: np.ndarray | None,
    *,
    leading: tuple[int, ...] | None = None,
    **arrays: Any,
) -> Fault | None:
    """The first fault in the order row, cache, request and lengths before entries, entry.

    Takes `check`'s keywords and q's leading shape, which only `indices=None` needs.
    """
    sources, _ = _sources(kv_cache, indices, leading, **arrays)
    found = [
        (row, which, place, entry, fault)
        for which, source in enumerate(sources)
        for row, place, entry, fault in source.faults
    ]
    return min(found, key=lambda item: item[:4])[4] if found else None


# --------------------------------------------------------------------------- the operation

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-21}


@dataclass
class Attention:
    """The result of `attention`; leading is q's shape without its last two dimensions.

    With u = 2^-8 (bfloat16), 2^-11 (float16), 2^-21 (float32) by q's dtype, p the weights and
    delta = 2^-20 · max_j(softmax_scale · sum_d |q_d k_jd|), another result may differ by

        bound_out = 1e-5 (float32: 1e-7) + u |out| + 2u sqrt(sum_j (p_j v_j)²)
                    + 2 delta sum_j p_j |v_j|
        bound_lse = 1e-6 + 8.01/65536 |lse| + delta
    """

    out: np.ndarray  # (*leading, heads, d_v)
    lse: np.ndarray  # (*leading, heads)
    max_logits: np.ndarray  # (*leading, heads)
    bound_out: np.ndarray  # (*leading, heads, d_v)
    bound_lse: np.ndarray  # (*leading, heads)
    bound_max_logits: np.ndarray  # (*leading, heads)
    entries: np.ndarray  # (*leading): how many entries were attended


def attention(
    q: np.ndarray | tuple[np.ndarray, np.ndarray],
    kv_cache: np.ndarray,
    indices: np.ndarray | None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    head_dim_v: int | None = None,
    attn_sink: np.ndarray | None = None,
    logit_cap: float = 0.0,
    cache_scale: float | None = None,
    extra_cache_format: str | None = None,
    extra_cache_scale: float | None = None,
    **arrays: Any,
) -> Attention:
    """`sparse_mla.attend` and how far another result may be away from it.

    The arguments are those of `sparse_mla.attend`, as NumPy arrays, less the outputs and what only
    concerns how it is run (validate, batch_invariant, stream). Results are float64.
    """
    parts = q if isinstance(q, tuple | list) else (q,)
    unit = UNIT[parts[0].dtype.name]
    query = np.concatenate([part.astype(np.float64) for part in parts], axis=-1)
    *leading, heads, d_qk = query.shape
    query = query.reshape(-1, heads, d_qk)
    rows = len(query)
    d_v = head_dim_v or D_V
    leading = tuple(leading)

    sources, _ = _sources(kv_cache, indices, leading, **arrays)
    caches = [(_blocks(kv_cache), _cache_format(kv_cache, cache_format), cache_scale)]
    if len(sources) == 2:
        extra = arrays["extra_kv_cache"]
        name = _cache_format(extra, extra_cache_format)
        caches.append((_blocks(extra), name, extra_cache_scale))

    out = np.zeros((rows, heads, d_v))
    lse = np.full((rows, heads), -np.inf)
    most = np.full((rows, heads), -np.inf)
    delta = np.zeros((rows, heads))
    spread = np.zeros((rows, heads, d_v))
    weight = np.zeros((rows, heads, d_v))
    entries = np.zeros(rows, np.int64)
    with np.errstate(all="ignore"):
        for row in range(rows):
            chosen = []
            for source, (blocks, name, scale) in zip(sources, caches, strict=True):
                slots = source.slots[row]
                block, offset = np.divmod(slots[slots >= 0], blocks.shape[1])
                if block.size:
                    chosen.append(_read(blocks[block, offset], name, scale))
            if not chosen:
                continue
            k = np.concatenate(chosen) if len(chosen) > 1 else chosen[0]
            v = k[:, :d_v]
            entries[row] = len(k)

            s = softmax_scale * (query[row] @ k.T)
            if logit_cap > 0:
                s = logit_cap * np.tanh(s / logit_cap)
            most[row] = s.max(axis=1)
            e = np.exp(s - most[row][:, None])
            lse[row] = most[row] + np.log(e.sum(axis=1))
            p = e / e.sum(axis=1, keepdims=True)
            if attn_sink is not None:
                p = p / (1 + np.exp(attn_sink.astype(np.float64) - lse[row]))[:, None]
            out[row] = p @ v
            delta[row] = 2.0**-20 * (softmax_scale * (np.abs(query[row]) @ np.abs(k.T))).max(axis=1)
            spread[row] = np.sqrt((p * p) @ (v * v))
            weight[row] = p @ np.abs(v)

        bound_out = (1e-7 if unit < 2.0**-12 else 1e-5) + unit * np.abs(out) + 2 * unit * spread
        bound_out += 2 * delta[..., None] * weight
        bound_lse = 1e-6 + 8.01 / 65536 * np.where(np.isinf(lse), 0, np.abs(lse)) + delta
    return Attention(
        out.reshape(*leading, heads, d_v),
        lse.reshape(*leading, heads),
        most.reshape(*leading, heads),
        bound_out.reshape(*leading, heads, d_v),
        bound_lse.reshape(*leading, heads),
        (1e-6 + delta).reshape(*leading, heads),
        entries.reshape(leading),
    )


def attend(
    q: np.ndarray | tuple[np.ndarray, np.ndarray],
    kv_cache: np.ndarray,
    indices: np.ndarray | None,
    **arguments: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out (*leading, heads, d_v) and lse (*leading, heads); the arguments are `attention`'s."""
    result = attention(q, kv_cache, indices, **arguments)
    return result.out, result.lse


def merge(
    outs: Sequence[np.ndarray], lses: Sequence[np.ndarray], *, attn_sink: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Joins partial results over disjoint sets of entries; the sink is applied once, here.

    outs are (*leading, heads, d_v), lses (*leading, heads) with natural logarithms. A part whose
    lse is -inf has no entries and contributes nothing, whatever its out holds.
    """
    lse = np.stack([part.astype(np.float64) for part in lses])
    out = np.stack([part.astype(np.float64) for part in outs])
    most = lse.max(axis=0)
    with np.errstate(all="ignore"):
        weight = np.where(lse == -np.inf, 0, np.exp(lse - most))
        total = weight.sum(axis=0)
        joined = np.where(total == 0, -np.inf, most + np.log(total))
        share = np.where(total == 0, 0, weight / total)
        if attn_sink is not None:
            share = share / (1 + np.exp(attn_sink.astype(np.float64) - joined))
        share = np.where(lse == -np.inf, 0, share)[..., None]
        return np.where(share == 0, 0, share * out).sum(axis=0), joined
