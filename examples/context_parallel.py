"""Sparse attention over several GPUs: heads and long contexts spread over ranks.

    torchrun --nproc-per-node 2 examples/context_parallel.py                    NCCL, a GPU a rank
    torchrun --nproc-per-node 2 examples/context_parallel.py --backend gloo     on the CPU, small

Two ways to run the attention of one layer on N ranks, with the same arguments and results, so that
an engine can change from one to the other. A rank has the queries of its own heads and wants their
outputs; what comes before and after (projections, the sum over heads) is split by heads as usual.

- `head_parallel`: every rank attends with its heads over a cache of its own that holds everything.
  Nothing is exchanged, but the cache, which has no heads to split, is there N times.
- `context_parallel`: the cache is there once. Position p of a request is held by rank
  (p // interleave) % N; a rank attends with the heads of all ranks over the positions that it
  holds, and `sparse_mla.merge` joins the parts by their lse:

      gather_queries   all-gather of q              (N - 1) * rows * heads/N * 1152 bytes received
      attend_shard     all heads, topk/N entries of a row on average
      exchange         all-to-all of the parts      (N - 1) * rows * heads/N * 2064 bytes received
      join             N parts of heads/N heads

The parts go by an all-to-all, and every rank merges the parts of its own heads: an all-gather of
the parts moves N times the bytes and has every rank merge everything; a reduce-scatter moves the
same bytes, but only after another collective has told the ranks their common lse, and it rounds in
an order of its own. Here one message holds out and lse, `attend` writes into it where it is to be
sent from, `merge` reads it where it arrives, and the one rounding is that of the result: it is as
near to the exact one as that of one GPU. `--parts bfloat16` halves the bytes and rounds twice,
which shows where the parts cancel each other.

Both ways combine: with `--group-size` smaller than the number of ranks, groups split the heads and
the ranks of a group split its heads and the context.

The second half of this file tries it out: it fills caches, compares the result with one GPU that
holds everything and with the reference in float64, and reports times and bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

import sparse_mla
from sparse_mla import reference

D_QK, D_V = 576, 512
LSE_BYTES = 16  # behind each out: a float32, and room so that the next one is aligned

Shard = tuple[int, int, int]  # rank, number of ranks, interleave

# PyTorch 2.13 gave it this name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------------------------ for an engine


def local_slots(
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    shard: Shard,
) -> torch.Tensor:
    """The slots (int64) in this rank's cache of positions of requests, -1 where another has them.

    positions and requests have one shape; block_table (requests, blocks) lists this rank's blocks.
    `sparse_mla.append` skips -1, so that every rank can be given every token.
    """
    rank, size, interleave = shard
    owned = positions // interleave % size == rank
    local = positions // (interleave * size) * interleave + positions % interleave
    local = torch.where(owned, local, 0)
    slots = block_table[requests, local // block_size].long() * block_size + local % block_size
    return torch.where(owned, slots, -1)


def head_parallel(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    attn_sink: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (rows, heads, 512) and lse (rows, heads) of this rank's heads, over a whole cache.

    q (rows, heads, 576) and attn_sink (heads,) are of this rank's heads; further arguments as
    `sparse_mla.attend` takes them.
    """
    return sparse_mla.attend(q, kv_cache, indices, attn_sink=attn_sink, **arguments)


def context_parallel(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    group: dist.ProcessGroup,
    shard: Shard,
    part_dtype: torch.dtype = torch.float32,
    attn_sink: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `head_parallel` gives, over a cache that the ranks of a group share.

    kv_cache and block_table are of the positions that this rank holds; q and attn_sink of its
    heads; indices, seq_lens and query_positions count all positions and are the same on all ranks.
    part_dtype: float32 or q's own. At most 32 ranks.
    """
    everyones = gather_queries(q, group)
    parts = attend_shard(everyones, kv_cache, indices, shard, part_dtype, **arguments)
    return join(exchange(parts, group), part_dtype, shard[1], q.dtype, attn_sink)


def gather_queries(q: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(rows, heads of all ranks, 576) of every rank's (rows, heads, 576).

    Heads come first in memory, as a product per head leaves them: then nothing has to be copied
    here and nothing to be put in order there, since `attend` takes any strides.
    """
    own = q.transpose(0, 1).contiguous()
    everyones = own.new_empty((own.shape[0] * dist.get_world_size(group), *own.shape[1:]))
    all_gather(everyones, own, group=group)
    return everyones.transpose(0, 1)


def attend_shard(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor | None,
    shard: Shard,
    part_dtype: torch.dtype,
    **arguments: Any,
) -> torch.Tensor:
    """A message (heads, rows, bytes) of each head's out and lse over this rank's positions.

    A row of which this rank holds nothing has the lse -inf and weighs nothing in the end. The sink
    is not passed here: it counts once, in `join`.
    """
    rows, heads = q.shape[:2]
    width = D_V * part_dtype.itemsize + LSE_BYTES
    message = torch.empty((heads, rows, width), dtype=torch.uint8, device=q.device)
    out, lse = out_and_lse(message, part_dtype)
    sparse_mla.attend(q, kv_cache, indices, shard=shard, out=out, lse=lse, **arguments)
    return message


def out_and_lse(message: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out (rows, heads, 512) and lse (rows, heads) in the memory of a message."""
    end = message.shape[-1] - LSE_BYTES
    out = message[..., :end].view(dtype)
    lse = message[..., end : end + 4].view(torch.float32).squeeze(-1)
    return out.transpose(0, 1), lse.transpose(0, 1)


def exchange(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's part of this rank's heads, one behind the other: heads first, so the parts of
    rank r's heads are the r-th piece of each message."""
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    return received


def join(
    received: torch.Tensor,
    part_dtype: torch.dtype,
    size: int,
    dtype: torch.dtype,
    attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (rows, heads, 512), heads first in memory, and lse (rows, heads) of the parts of `size`
    ranks. All ranks join in the same order, so a row's result does not depend on who computes it.
    """
    outs, lses = zip(*(out_and_lse(part, part_dtype) for part in received.chunk(size)), strict=True)
    rows, heads = lses[0].shape
    out = torch.empty((heads, rows, D_V), dtype=dtype, device=received.device).transpose(0, 1)
    return sparse_mla.merge(outs, lses, attn_sink=attn_sink, out=out)


# ------------------------------------------------------------------------------ trying it out


@dataclass(frozen=True)
class Case:
    """One decoding step of one layer: a query row for each of `rows` requests."""

    rows: int
    heads: int  # of the layer
    cache_format: str
    context: int  # positions of the longest request
    topk: int
    interleave: int
    block_size: int
    parts: str  # dtype of the parts

    @property
    def row_bytes(self) -> int:
        return sparse_mla.cache_formats()[self.cache_format]["row_bytes"] or D_QK * 2

    @property
    def softmax_scale(self) -> float:
        return 1 / 16


@dataclass(frozen=True)
class Ranks:
    """This rank among all, and in the group that shares a cache."""

    rank: int
    world: int
    group: dist.ProcessGroup
    device: torch.device

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def shard(self, case: Case) -> Shard:
        return dist.get_rank(self.group), self.size, case.interleave

    def heads(self, case: Case) -> slice:
        each = case.heads // self.world
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE: Shard = (0, 1, 1)


@dataclass
class Cache:
    """A paged cache of all requests' positions, or of a shard of them."""

    kv_cache: torch.Tensor  # (blocks, block_size, row)
    block_table: torch.Tensor  # (requests, blocks of a request), int32
    shard: Shard

    @classmethod
    def empty(cls, case: Case, shard: Shard, device: torch.device) -> Cache:
        _, size, interleave = shard
        held = -(-case.context // (interleave * size)) * interleave
        blocks = -(-held // case.block_size)
        table = torch.randperm(case.rows * blocks, generator=torch.Generator().manual_seed(1))
        shape = (case.rows * blocks, case.block_size)
        if case.cache_format == "dense":
            kv_cache = torch.empty((*shape, D_QK), dtype=torch.bfloat16, device=device)
        else:
            kv_cache = torch.empty((*shape, case.row_bytes), dtype=torch.uint8, device=device)
        return cls(kv_cache, table.reshape(case.rows, blocks).int().to(device), shard)

    def write(self, case: Case, request: int, rows: torch.Tensor) -> None:
        """The latent rows (positions, 576) of a request, those that this cache is to hold."""
        positions = torch.arange(len(rows), device=rows.device)
        requests = torch.full_like(positions, request)
        slots = local_slots(positions, requests, self.block_table, case.block_size, self.shard)
        sparse_mla.append(self.kv_cache, slots, rows, cache_format=case.cache_format)


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def fill(case: Case, caches: list[Cache], device: torch.device) -> None:
    """Writes the same random rows into every cache, on every rank."""
    random = generator(device, 2)
    for request in range(case.rows):
        rows = torch.randn((case.context, D_QK), generator=random, device=device)
        for cache in caches:
            cache.write(case, request, rows.bfloat16())


def draw_lengths(case: Case, device: torch.device) -> torch.Tensor:
    """(rows,) int32: request 0 has one position, which only one rank holds, the others many."""
    lengths = torch.linspace(case.context, case.context / 2, case.rows).int()
    lengths[0] = 1
    return lengths.to(device)


def draw_indices(case: Case, lengths: torch.Tensor, seed: int) -> torch.Tensor:
    """(rows, topk) int32: distinct random positions; behind those of a short request stands -1."""
    random = generator(lengths.device, seed)
    score = torch.rand((case.rows, case.context), generator=random, device=lengths.device)
    score.masked_fill_(torch.arange(case.context, device=lengths.device) >= lengths[:, None], -1)
    best, positions = score.topk(min(case.topk, case.context), dim=1)
    return torch.where(best >= 0, positions, -1).int()


def seconds(call: Callable[[int], Any], calls: int, replays: int, device: torch.device) -> float:
    """Of one call, the median of several runs of `calls` calls that follow each other; on a GPU as
    a CUDA graph, so that what Python does is not in it."""
    for i in range(calls):
        call(i)
    if device.type == "cpu":
        runs = []
        for _ in range(replays):
            dist.barrier()
            begin = time.perf_counter()
            for i in range(calls):
                call(i)
            runs.append((time.perf_counter() - begin) / calls)
        return slowest(statistics.median(runs), device)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Another thread of PyTorch's watches the collectives and may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            call(i)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runs = []
    for _ in range(1 + replays):
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end) / 1e3 / calls)
    return slowest(statistics.median(runs[1:]), device)


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    most = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def share_of_bound(
    case: Case,
    cache: Cache,
    q: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    attn_sink: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """The largest error of four rows as a share of what the reference in float64 allows."""
    picked = torch.tensor(sorted({0, 1, case.rows // 2, case.rows - 1})).to(q.device)
    picked = picked[picked < case.rows]
    positions = indices[picked].long()
    counts = (positions >= 0) & (positions < lengths[picked, None])
    requests = picked[:, None].expand_as(positions)
    slots = local_slots(
        positions.clamp(min=0), requests, cache.block_table, case.block_size, cache.shard
    )
    rows = cache.kv_cache.reshape(-1, cache.kv_cache.shape[-1])[slots.reshape(-1)]
    order = torch.arange(slots.numel(), device=q.device).reshape(slots.shape)
    want = reference.attention(
        to_numpy(q[picked]),
        to_numpy(rows)[None],
        to_numpy(torch.where(counts, order, -1)),
        softmax_scale=case.softmax_scale,
        cache_format=case.cache_format,
        attn_sink=to_numpy(attn_sink),
    )
    out, lse = (to_numpy(each[picked]).astype(np.float64) for each in results)
    shares = [
        np.abs(out - want.out) / want.bound_out,
        np.where(lse == want.lse, 0, np.abs(lse - want.lse) / want.bound_lse),
    ]
    return float(max(np.nan_to_num(share, nan=np.inf).max() for share in shares))


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """1 - cosine over the whole output."""
    one, other = result.double().flatten(), wanted.double().flatten()
    return float(1 - one @ other / (one.norm() * other.norm()))


def measure(case: Case, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a case, compares and times it; the same dict on every rank."""
    device, group, shard = ranks.device, ranks.group, ranks.shard(case)
    own = Cache.empty(case, shard, device)
    whole = Cache.empty(case, WHOLE, device) if options.whole else None
    fill(case, [own, whole] if whole else [own], device)
    lengths = draw_lengths(case, device)
    layers = range(options.layers)
    indices = [draw_indices(case, lengths, 3 + i) for i in layers]
    shape = (case.heads, case.rows, D_QK)  # heads first, as an engine's product leaves it
    q = torch.randn(shape, generator=generator(device, 0), device=device)
    sink = torch.randn(case.heads, generator=generator(device, 1), device=device)
    q, heads = q.bfloat16().transpose(0, 1), ranks.heads(case)
    own_q, own_sink = q[:, heads], sink[heads]
    part_dtype = getattr(torch, case.parts)
    about: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "cache_format": case.cache_format,
        "seq_lens": lengths,
    }
    mine = about | {"block_table": own.block_table}

    def step(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return context_parallel(
            own_q,
            own.kv_cache,
            indices[i],
            group=group,
            shard=shard,
            part_dtype=part_dtype,
            attn_sink=own_sink,
            **mine,
        )

    result: dict[str, Any] = {"case": asdict(case), "ranks": ranks.world, "group": ranks.size}
    out, lse = step(0)
    if whole:
        everything = about | {"block_table": whole.block_table}

        def one_gpu(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return head_parallel(q, whole.kv_cache, indices[i], attn_sink=sink, **everything)

        def by_heads(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            arguments = everything | {"attn_sink": own_sink}
            return head_parallel(own_q, whole.kv_cache, indices[i], **arguments)

        judge = (case, whole, own_q, indices[0], lengths, own_sink)
        single, _ = one_gpu(0)
        apart = max(distance(out, single[:, heads]), distance(by_heads(0)[0], single[:, heads]))
        result["share_of_bound"] = slowest(share_of_bound(*judge, (out, lse)), device)
        result["distance"] = slowest(apart, device)

    queries = gather_queries(own_q, group)
    messages = [
        attend_shard(queries, own.kv_cache, indices[i], shard, part_dtype, **mine) for i in layers
    ]
    received = [exchange(message, group) for message in messages]
    phases: dict[str, Callable[[int], Any]] = {
        "queries": lambda i: gather_queries(own_q, group),
        "attend": lambda i: attend_shard(
            queries, own.kv_cache, indices[i], shard, part_dtype, **mine
        ),
        "exchange": lambda i: exchange(messages[i], group),
        "merge": lambda i: join(received[i], part_dtype, ranks.size, q.dtype, own_sink),
        "step": step,
    }
    if whole:
        phases |= {"one_gpu": one_gpu, "head_parallel": by_heads}
    result["seconds"] = {
        name: seconds(call, options.layers, options.replays, device)
        for name, call in phases.items()
    }
    others = ranks.size - 1
    result["bytes"] = {
        "queries": others * own_q.numel() * own_q.element_size(),
        "parts": others * messages[0].numel() // ranks.size,
        "cache": own.kv_cache.numel() * own.kv_cache.element_size(),
    }
    sparse_mla.synchronize()
    return result


HEADING = (
    "times in µs per layer and step, of the slowest rank; bytes that a rank receives and holds\n"
    " rows heads      cache    parts | one GPU  by heads | queries  attend  exchange  merge    step"
    " |   q MB  parts MB  cache GB | of bound  1 - cosine"
)


def line(result: dict[str, Any]) -> str:
    case, moved = result["case"], result["bytes"]
    took = {name: f"{1e6 * value:.1f}" for name, value in result["seconds"].items()}
    share, apart = result.get("share_of_bound"), result.get("distance")
    return (
        f"{case['rows']:5} {case['heads']:5} {case['cache_format']:>10} {case['parts']:>8} | "
        f"{took.get('one_gpu', '-'):>7}  {took.get('head_parallel', '-'):>8} | "
        f"{took['queries']:>7} {took['attend']:>7}  {took['exchange']:>8} {took['merge']:>6} "
        f"{took['step']:>7} | {moved['queries'] / 1e6:6.2f}  {moved['parts'] / 1e6:8.2f}  "
        f"{moved['cache'] / 1e9:8.2f} | "
        + ("not compared" if share is None else f"{share:8.2f}  {apart:10.1e}")
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Sparse attention with heads and contexts spread over ranks: compared with one "
        "GPU and with the reference in float64, and timed. Start it with torchrun."
    )
    add = parser.add_argument
    add("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on the CPU, and small")
    several = {"type": int, "nargs": "+", "metavar": "N"}
    add("--rows", **several, help="query rows, one a request (default: 16 128; gloo: 4)")
    add("--heads", **several, help="of the layer (default: 128; gloo: 12)")
    add("--cache-format", nargs="+", choices=("dense", "fp8_ds_mla"), default=["dense"])
    add("--parts", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    add("--context", type=int, help="positions of the longest request (default: 131072; gloo: 512)")
    add("--topk", type=int, help="default: 2048; gloo: 64")
    add("--interleave", type=int, default=1, help="positions in a row on one rank (default: 1)")
    add("--block-size", type=int, default=64)
    add("--group-size", type=int, help="ranks that share a cache (default: all)")
    add("--layers", type=int, default=16, help="index sets that follow each other (default: 16)")
    add("--replays", type=int, default=7, help="of which the median counts (default: 7)")
    add(
        "--no-whole",
        dest="whole",
        action="store_false",
        help="no cache that holds everything, so nothing is compared: for contexts of many GPUs",
    )
    add("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("this is one rank of several: start it with torchrun --nproc-per-node N")
    small = options.backend == "gloo"
    options.rows = options.rows or ([4] if small else [16, 128])
    options.heads = options.heads or [12 if small else 128]
    options.context = options.context or (512 if small else 131072)
    options.topk = options.topk or (64 if small else 2048)
    world = int(os.environ["WORLD_SIZE"])
    options.group_size = options.group_size or world
    if world % options.group_size:
        parser.error(f"argument --group-size: expected a divisor of {world} ranks")
    if any(heads % world for heads in options.heads):
        parser.error(f"argument --heads: expected multiples of {world}, the number of ranks")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the cases and returns the exit code: 1 where a result was too far away."""
    options = parse(argv)
    if options.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(options.group_size)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group, device)

    results = []
    if ranks.rank == 0:
        print(f"{ranks.world} ranks, caches shared by {ranks.size}, {device.type}\n{HEADING}")
    for values in itertools.product(
        options.cache_format, options.parts, options.heads, options.rows
    ):
        cache_format, parts, heads, rows = values
        case = Case(
            rows,
            heads,
            cache_format,
            options.context,
            options.topk,
            options.interleave,
            options.block_size,
            parts,
        )
        results.append(measure(case, ranks, options))
        if ranks.rank == 0:
            print(line(results[-1]), flush=True)
    if options.json and ranks.rank == 0:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()
    wrong = [each for each in results if options.whole and not fits(each)]
    return 1 if wrong else 0


def fits(result: dict[str, Any]) -> bool:
    # Rounded parts count once more. Two results within 1 - cosine < 5e-6 of the exact one are at
    # most twice that angle apart.
    allowed = 1 if result["case"]["parts"] == "float32" else 2
    return result["share_of_bound"] <= allowed and result["distance"] < 4 * 5e-6


if __name__ == "__main__":
    raise SystemExit(main())
