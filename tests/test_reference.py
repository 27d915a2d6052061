"""The oracle against definitions written out number by number."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cases
from compare import INDEXING, expected
from sparse_mla import reference
from sparse_mla.reference import Cause

RANDOM = np.random.default_rng(0)


def numbers_of_every_kind(count: int = 200_000) -> np.ndarray:
    """Random float32 bit patterns, ordinary numbers, and every number between two e4m3."""
    bits = RANDOM.integers(0, 2**32, count, np.uint32).view(np.float32)
    between = (reference.E4M3[:126] + reference.E4M3[1:127]) / 2
    grid = np.concatenate([reference.E4M3[:127], between]).astype(np.float32)
    return np.concatenate([bits, RANDOM.normal(0, 100, count).astype(np.float32), grid, -grid])


def test_e4m3_is_ml_dtypes() -> None:
    table = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(reference.E4M3, table)


def test_rounding_is_ml_dtypes() -> None:
    numbers = numbers_of_every_kind()
    numbers = numbers[~np.isnan(numbers)]
    clamped = np.clip(numbers, -448, 448)
    want = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(reference.to_e4m3(numbers), want)
    with np.errstate(over="ignore"):
        want = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(reference.to_bfloat16(numbers), want)


@pytest.mark.parametrize("name", reference.FORMATS)
def test_decode_reads_bytes(name: str) -> None:
    """One number after the other, by the layout in words."""
    fmt = reference.FORMATS[name]
    raw = RANDOM.integers(0, 256, (2, 3, fmt.row_bytes), np.uint8)
    rows = reference.decode(raw, name, 0.37)
    for token, row in enumerate(raw.reshape(6, -1)):
        for d in (0, 1, 127, 128, 383, 384, 511):
            scale = np.float32(0.37)
            if name != "fp8_tensor":
                scale = np.frombuffer(row[512:528].tobytes(), "<f4")[d // 128]
            with np.errstate(over="ignore", invalid="ignore"):
                want = float(row[d : d + 1].view(ml_dtypes.float8_e4m3fn)[0]) * float(scale)
            np.testing.assert_equal(rows[token, d], want)
        if name == "fp8_ds_mla":
            rope = np.frombuffer(row[528:].tobytes(), ml_dtypes.bfloat16)
            np.testing.assert_array_equal(rows[token, 512:], rope.astype(np.float64))


@pytest.mark.parametrize("name", reference.FORMATS)
def test_encode_then_decode(name: str) -> None:
    """Half a step of e4m3 at most, and the largest number of a group exactly."""
    fmt = reference.FORMATS[name]
    rows = RANDOM.normal(size=(50, fmt.d_qk)).astype(np.float32)
    rows[:, :128] *= 1e-3
    rows[7, :128] = 0
    scale = float(np.abs(rows).max() / 448)
    back = reference.decode(reference.encode(rows, name, scale)[:, None], name, scale)
    groups = np.abs(rows[:, : fmt.quantised]).reshape(50, -1, fmt.group)
    amax = groups.max(axis=2) if name != "fp8_tensor" else np.full((50, 1), scale * 448)
    step = np.repeat(amax, fmt.group, axis=1)
    error = np.abs(back - rows)[:, : fmt.quantised]
    assert (error <= np.abs(rows[:, : fmt.quantised]) * 2.0**-4 + step * 2.0**-10 / 448).all()
    assert (np.abs(back - rows)[:, fmt.quantised :] <= np.abs(rows[:, fmt.quantised :]) / 256).all()


def slot_of(arguments: dict, prefix: str, row: int, j: int, leading: tuple[int, ...]) -> int:
    """The slot of one entry, or minus its cause, by the words of the contract."""

    def array(name: str) -> np.ndarray | None:
        return arguments.get(prefix + name)

    def per_row(values: np.ndarray) -> int:
        return int(values.reshape(-1)[row])

    s_q = leading[1] if len(leading) == 2 else 1
    num_blocks, block_size = reference._blocks(array("kv_cache")).shape[:2]
    table, indices = array("block_table"), array("indices")
    tables = [arguments.get(name) for name in ("block_table", "extra_block_table")]
    requests = max([len(t) for t in tables if t is not None], default=0)
    rank, size, interleave = (arguments.get("shard") if not prefix else None) or (0, 1, 1)

    request = row // s_q
    if "request_ids" in arguments:
        request = per_row(arguments["request_ids"])
        if request == -1:
            return -Cause.PADDING_ROW
        if not 0 <= request < requests:
            return -Cause.FAULT_REQUEST
    if array("topk_lens") is not None:
        lens = array("topk_lens")
        length = per_row(lens) if lens.size == math.prod(leading) else int(lens[row // s_q])
        if j >= length:
            return -Cause.PAST_TOPK_LEN
    limit = math.inf
    if table is not None and array("seq_lens") is not None:
        local = table.shape[1] * block_size
        legal = 0  # the longest sequence of which this rank holds no more than its table can
        if size == 1:
            legal = local
        else:
            held = 0
            while held < local or (legal // interleave) % size != rank:
                held += (legal // interleave) % size == rank
                legal += 1
        if not prefix and "max_seq_len" in arguments:
            legal = min(legal, arguments["max_seq_len"])
        limit = min(max(int(array("seq_lens")[request]), 0), legal)
    last = math.inf
    if not prefix and "query_positions" in arguments:
        last = per_row(arguments["query_positions"])

    if indices is None:
        mine = [p for p in range(min(limit, last + 1)) if (p // interleave) % size == rank]
        if j >= len(mine):
            return -Cause.PAST_TOPK_LEN
        position = mine[j]
    else:
        position = int(indices.reshape(-1, indices.shape[-1])[row, j])
        if position < 0:
            return -Cause.PADDING if position == -1 else -Cause.FAULT_INDEX
        if table is None:
            capacity = num_blocks * block_size
            return position if position < capacity else -Cause.FAULT_SLOT
        if position > last:
            return -Cause.AFTER_QUERY
        if position >= limit:
            return -Cause.PAST_SEQ_LEN
        if (position // interleave) % size != rank:
            return -Cause.OTHER_SHARD
    position = position // (interleave * size) * interleave + position % interleave
    if position // block_size >= table.shape[1]:
        return -Cause.FAULT_LOGICAL
    block = int(table[request, position // block_size])
    if block == -1:
        return -Cause.UNALLOCATED
    if not 0 <= block < num_blocks:
        return -Cause.FAULT_BLOCK
    return block * block_size + position % block_size


SMALL_ENOUGH = [
    case for case in cases.CASES if math.prod(case.leading) * cases.entries(case) < 3000
]


@pytest.mark.parametrize("case", SMALL_ENOUGH, ids=str)
def test_resolve_entry_by_entry(case: cases.Case) -> None:
    for seed in range(3):
        arguments = cases.make(case, seed)
        found = reference.resolve(
            arguments["kv_cache"],
            arguments["indices"],
            leading=case.leading,
            **{name: arguments[name] for name in INDEXING if name in arguments},
        )
        for prefix, slots in zip(("", "extra_"), found, strict=False):
            for row, line in enumerate(slots.reshape(math.prod(case.leading), slots.shape[-1])):
                for j, slot in enumerate(line):
                    assert slot == slot_of(arguments, prefix, row, j, case.leading), (
                        prefix,
                        row,
                        j,
                    )


def test_attention_number_by_number() -> None:
    """One head of one row, by the formulas of the operation."""
    case = cases.Case(
        main=replace(cases.SMALL, cache_format="fp8_ds_mla"), sink="normal", logit_cap=3.0
    )
    arguments = cases.make(case, 5)
    want = expected(arguments)
    rows = reference.decode(arguments["kv_cache"], "fp8_ds_mla")
    scale, cap = arguments["softmax_scale"], arguments["logit_cap"]
    for t, h in ((0, 0), (2, 3)):
        k = [rows[i] for i in arguments["indices"][t] if i >= 0]
        s = [
            scale
            * math.fsum(a * b for a, b in zip(arguments["q"][t, h].astype(float), x, strict=True))
            for x in k
        ]
        s = [cap * math.tanh(x / cap) for x in s]
        lse = math.log(math.fsum(math.exp(x) for x in s))
        sink = 1 / (1 + math.exp(float(arguments["attn_sink"][h]) - lse))
        p = [sink * math.exp(x - lse) for x in s]
        out = [math.fsum(x * v[d] for x, v in zip(p, k, strict=True)) for d in range(512)]
        np.testing.assert_allclose(want.lse[t, h], lse, rtol=1e-12)
        np.testing.assert_allclose(want.max_logits[t, h], max(s), rtol=1e-12)
        np.testing.assert_allclose(want.out[t, h], out, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sink", [None, "normal", "infinite"])
def test_merged_shards_are_the_whole(sink: str | None) -> None:
    whole = cases.Case(leading=(3, 2), main=cases.PAGED, sink=sink, query_positions=True)
    arguments = cases.make(whole, 3)
    want = expected(arguments)
    size, interleave, table = 3, 5, arguments["block_table"]
    sinks = arguments.pop("attn_sink", None)
    seen = reference.decode(arguments["kv_cache"])
    block_size, capacity = whole.main.block_size, whole.main.max_blocks * whole.main.block_size
    parts = []
    for rank in range(size):  # every rank with a cache of one-token blocks of its own
        own = [p for p in range(capacity) if p // interleave % size == rank]
        held = table[:, np.array(own) // block_size]
        local = np.where(held < 0, -1, held * block_size + np.array(own) % block_size)
        parts.append(
            reference.attend(
                arguments["q"],
                seen[:, None].astype(cases.DTYPES[whole.dtype]),
                arguments["indices"],
                softmax_scale=arguments["softmax_scale"],
                block_table=local,
                seq_lens=arguments["seq_lens"],
                query_positions=arguments["query_positions"],
                shard=(rank, size, interleave),
            )
        )
    out, lse = reference.merge([p[0] for p in parts], [p[1] for p in parts], attn_sink=sinks)
    np.testing.assert_allclose(out, want.out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-12)
