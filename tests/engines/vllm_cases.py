"""Batches as vLLM lays them out, and what the oracle says about them.

A `Batch` says what a step of vLLM holds: requests with so many tokens computed and so many to
compute, padded to a captured size, the cache of one of several layers that share every block, block
tables whose tails are stale, the indexer's shared buffer with -1, stale and foreign positions in
it. `make` draws the tensors. A cache is spread over the ranks of a context-parallel group by the
rule of vLLM's slot mapping, which is written here once more: a block of the table stands for
block_size positions of every rank, and a rank has `interleave` of them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from compare import to_framework
from sparse_mla import reference

LATENT = 512
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Batch:
    """One step."""

    computed: tuple[int, ...]  # tokens that each request has in the cache already
    queries: tuple[int, ...]  # tokens of each request in this step
    padding: int = 0  # rows behind them, of a captured graph
    heads: int = 8
    rope: int = 64
    cache_dtype: str = "auto"
    block_size: int = 64
    topk: int = 256
    query: str = "transposed"  # "token-major", "single"
    layers: int = 3  # that share every block
    ranks: int = 1
    interleave: int = 1


BATCHES = {
    "decode": Batch((70, 3, 400, 0), (1, 1, 1, 1)),
    "decode, one head": Batch((70, 3), (1, 1), heads=1),
    "decode, 128 heads, block size 128": Batch((200, 30), (1, 1), heads=128, block_size=128),
    "two drafts each, padded": Batch((70, 3, 400), (3, 3, 3), padding=7, query="token-major"),
    "prefill": Batch((0, 64), (90, 40), heads=4),
    "decode and prefill": Batch((300, 5, 100, 0), (1, 1, 30, 65), heads=5, topk=64),
    "one tensor": Batch((70, 3), (1, 1), query="single"),
    "packed": Batch((70, 3, 400), (1, 1, 1), cache_dtype="fp8_ds_mla", padding=5),
    "packed prefill": Batch((0, 64), (70, 40), heads=4, cache_dtype="fp8_ds_mla"),
    "packed, one tensor": Batch((70, 3), (1, 1), cache_dtype="fp8_ds_mla", query="single"),
    "without rope": Batch((70, 3, 400), (1, 1, 2), rope=0),
    "packed without rope": Batch((70, 3, 400), (1, 1, 2), rope=0, cache_dtype="fp8_ds_mla"),
}
SHARDED = {
    "two ranks": Batch((70, 3, 400, 0), (1, 1, 1, 1), ranks=2, query="single"),
    "four ranks, interleaved by 16, packed": Batch(
        (300, 5, 100), (1, 2, 40), ranks=4, interleave=16, query="single", cache_dtype="fp8_ds_mla"
    ),
    "two ranks, without rope, packed": Batch(
        (300, 5), (1, 1), ranks=2, query="single", rope=0, cache_dtype="fp8_ds_mla"
    ),
}
SCALE = 1 / 16


def where(batch: Batch, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank, the column of the block table and the offset in the block of positions."""
    column, offset = np.divmod(position, batch.block_size * batch.ranks)
    turn, within = np.divmod(offset, batch.interleave)
    return turn % batch.ranks, column, turn // batch.ranks * batch.interleave + within


def draw_indices(
    batch: Batch, request: np.ndarray, position: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The indexer's buffer, longer than the batch: what a row may see in any order, -1 among it,
    and now and then a position past its request's end, as a row holds that was not written."""
    rows = len(request)
    total = np.array(batch.computed) + np.array(batch.queries)
    buffer = rng.integers(-1, 5000, (rows + batch.padding + 9, batch.topk)).astype(np.int32)
    for row in range(rows):
        chosen = rng.permutation(position[row] + 1)[: batch.topk - 2]
        entries = np.full(batch.topk, -1)
        entries[: len(chosen)] = chosen
        stale = rng.integers(0, batch.topk, 3)
        entries[stale] = total[request[row]] + rng.integers(0, 3000, 3)
        buffer[row] = rng.permutation(entries)
    buffer[rows // 2] = -1
    return buffer


def make(batch: Batch, seed: int = 0) -> SimpleNamespace:
    """The tensors of a step, as NumPy arrays. For each rank of `caches` and `tables` one; with
    several ranks `whole` has the arguments of the same attention over one cache."""
    rng = np.random.default_rng(seed)
    queries, computed = np.array(batch.queries), np.array(batch.computed)
    requests, rows = len(queries), int(queries.sum())
    seq_lens = (computed + queries).astype(np.int32)
    request = np.repeat(np.arange(requests), queries)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    position = computed[request] + np.arange(rows) - starts[request]
    padded = rows + batch.padding

    columns = int(-(-seq_lens.max() // (batch.block_size * batch.ranks))) + 2
    blocks = requests * columns + 3
    # Every block of the pool is in the table of some request: what is past a request's end is
    # stale, and another request's or nobody's now.
    table = rng.permutation(blocks)[: requests * columns].reshape(requests, columns)

    d_qk = LATENT + batch.rope
    row_bytes = 656 if batch.cache_dtype == "fp8_ds_mla" else d_qk * 2
    pools = [
        np.full((blocks, batch.layers, batch.block_size, row_bytes), 0xFF, np.uint8)
        for _ in range(batch.ranks)
    ]
    caches = [pool[:, batch.layers // 2] for pool in pools]
    slots = []
    stored = []
    for each in range(requests):
        numbers = rng.standard_normal((seq_lens[each], d_qk)).astype(np.float32)
        if batch.cache_dtype == "fp8_ds_mla":
            numbers = np.pad(numbers, ((0, 0), (0, 576 - d_qk)))  # vLLM writes zeros for no rope
            raw = reference.encode(numbers, "fp8_ds_mla")
        else:
            raw = numbers.astype(BFLOAT16).view(np.uint8)
        rank, column, offset = where(batch, np.arange(seq_lens[each]))
        for one, cache in enumerate(caches):
            mine = rank == one
            cache[table[each, column[mine]], offset[mine]] = raw[mine]
        stored.append(raw)
        slots.append(table[each, column] * batch.block_size + offset)
    if batch.cache_dtype != "fp8_ds_mla":
        caches = [cache.view(BFLOAT16) for cache in caches]

    q = (rng.standard_normal((padded, batch.heads, d_qk)) / 2).astype(BFLOAT16)
    latent, rope = q[..., :LATENT], q[..., LATENT:]
    latent = np.ascontiguousarray(latent)
    if batch.query == "transposed":  # what a product batched over heads leaves
        latent = np.ascontiguousarray(latent.swapaxes(0, 1)).swapaxes(0, 1)
    query = q if batch.query == "single" else (latent, np.ascontiguousarray(rope))

    one_cache = np.concatenate(stored)
    if batch.cache_dtype != "fp8_ds_mla":
        one_cache = one_cache.view(BFLOAT16)
    return SimpleNamespace(
        batch=batch,
        q=query,
        caches=caches,
        tables=[table.astype(np.int32)] * batch.ranks,
        seq_lens=seq_lens,
        query_start_loc=starts,
        request=np.concatenate([request, np.zeros(batch.padding)]).astype(np.int32),
        slot_mapping=np.concatenate(
            [slots[i][computed[i] : seq_lens[i]] for i in range(requests)]
            + [np.full(batch.padding, -1)]
        ),
        topk_buffer=draw_indices(batch, request, position, rng),
        one_cache=one_cache[:, None],
        # every position is a block of its own; past a request's end comes the next one
        one_table=((np.cumsum(seq_lens) - seq_lens)[:, None] + np.arange(seq_lens.max())).astype(
            np.int32
        )
        % len(one_cache),
    )


def expected(step: SimpleNamespace) -> reference.Attention:
    """What the oracle says of the whole step: one cache in which every position is a block, and
    queries in one piece, with zeros for the rope of a packed row that has none."""
    batch = step.batch
    q = step.q if isinstance(step.q, np.ndarray) else np.concatenate(step.q, -1)
    packed = batch.cache_dtype == "fp8_ds_mla"
    if packed and not batch.rope:
        q = np.concatenate([q, np.zeros((*q.shape[:-1], 64), q.dtype)], -1)
    return reference.attention(
        q,
        step.one_cache,
        step.topk_buffer[: len(q)],
        softmax_scale=SCALE,
        cache_format="fp8_ds_mla" if packed else None,
        head_dim_v=LATENT,
        block_table=step.one_table,
        request_ids=step.request,
        seq_lens=step.seq_lens,
    )


def expected_of_rank(step: SimpleNamespace, rank: int) -> reference.Attention:
    """What the oracle says of one rank's part, by the rule for shards that `attend` documents."""
    batch = step.batch
    q = step.q
    packed = batch.cache_dtype == "fp8_ds_mla"
    if packed and not batch.rope:
        q = np.concatenate([q, np.zeros((*q.shape[:-1], 64), q.dtype)], -1)
    return reference.attention(
        q,
        step.caches[rank],
        step.topk_buffer[: len(q)],
        softmax_scale=SCALE,
        cache_format="fp8_ds_mla" if packed else None,
        head_dim_v=LATENT,
        block_table=step.tables[rank],
        request_ids=step.request,
        seq_lens=step.seq_lens,
        shard=(rank, batch.ranks, batch.interleave),
    )


def tensors(step: SimpleNamespace, device: str = "cpu") -> SimpleNamespace:
    """The same step as PyTorch tensors with the same strides."""
    return SimpleNamespace(
        **{
            name: to_framework(value, "torch", device)
            for name, value in vars(step).items()
            if name not in ("one_cache", "one_table")
        }
    )


def metadata(step: SimpleNamespace, rank: int = 0) -> SimpleNamespace:
    """What the call reads of vLLM's metadata, rebuilt by hand of `tensors`."""
    return SimpleNamespace(
        block_table=step.tables[rank],
        req_id_per_token=step.request,
        seq_lens=step.seq_lens,
        cp_kv_cache_interleave_size=step.batch.interleave,
    )
