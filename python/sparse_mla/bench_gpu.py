"""`python -m sparse_mla bench --device cuda`: what a call costs on a GPU, and what it could cost.

A case is timed as a CUDA graph of many calls, one strictly after another, each with its own index
set over a large cache: together they read so much that every call finds a cold L2 cache, as the
layers of a model do. The graph is replayed, and the median of the replays divided by the number of
calls; everything that a call launches is in it.

The floor of a case is measured in the same run: the time of a kernel that reads the same rows of
the same index sets and nothing else, or the floating-point operations at the rate of a large matrix
product and a launch, whichever takes longer. Before a time is given, sampled rows of the last call
in the graph are compared with the reference in float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import bench, info
from .bench import BLOCK_SIZE, D_QK, D_V, FORMATS, PATTERNS, SOFTMAX_SCALE, Case, WrongResult
from .bench_device import FRAMEWORKS, MATRIX, NoFramework, open_device

TOKENS = 1 << 22  # slots of the cache
COLD_BYTES = 256 << 20  # that the calls of a graph gather together, at least
FEWEST_CALLS = 16
REPLAYS = 7
SHORT_ROW = 100  # entries of every other row of an uneven case
COPY_BYTES = 1 << 30
GATHER_BLOCKS_PER_SM = 12  # as many as run at once, see cuda/any_gather.cu

KINDS = {
    "slots": "slots of the cache",
    "table": "positions, which the block table turns into slots",
    "uneven": f"slots, but every other row has only {SHORT_ROW} entries (topk_lens)",
    "prefill": "slots; all rows share one context, 32K tokens at the usual topk",
    "faults": "every entry lies past the cache",
}

# What is measured together: the axes of a product, where they are not the usual ones.
AXES: dict[str, tuple[Any, ...]] = {
    "format": ("bf16", "fp8"),
    "kind": ("slots",),
    "pattern": ("uniform",),
    "topk": (2048,),
    "s_q": (1,),
    "batch": (1, 16, 128),
    "heads": (16, 128),
}
GROUPS: dict[str, dict[str, tuple[Any, ...]]] = {
    "table": {
        "pattern": PATTERNS,
        "batch": (1, 16, 64, 128, 256),
        "heads": (8, 16, 32, 64, 128),
    },
    "batch": {"batch": (24, 70, 100, 133, 200)},
    "s_q": {"s_q": (2, 4)},
    "topk": {"topk": (512, 1024, 16384)},
    "heads": {"heads": (24, 96)},
    "uneven": {"kind": ("uneven",)},
    "paged": {"pattern": ("trace",), "kind": ("slots", "table"), "batch": (1, 64, 128)},
    "prefill": {"pattern": PATTERNS, "kind": ("prefill",), "batch": (8192,)},
    "faults": {"kind": ("slots", "faults")},
}
QUICK = {"pattern": ("uniform",), "batch": (1, 16, 128), "heads": (16, 128)}


@dataclass(frozen=True)
class GpuCase(Case):
    """One line of the table: `batch` requests of `s_q` query rows, or the rows of a prefill."""

    s_q: int = 1
    kind: str = "slots"  # of KINDS

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.s_q}" if self.s_q > 1 else f"{self.batch}"
        return (
            f"{self.format}, {self.kind}, {self.pattern}, topk {self.topk}, {rows} rows, "
            f"{self.heads} heads"
        )

    @property
    def rows(self) -> int:
        return self.batch * self.s_q

    @property
    def context(self) -> int:
        """Positions of a request that its index sets are drawn from, a power of two."""
        return 1 << (16 * self.topk - 1).bit_length()

    @property
    def listed(self) -> int:
        """Entries that the calls list, whether they count or not."""
        return self.rows * self.topk

    @property
    def entries(self) -> int:
        if self.kind == "faults":
            return 0
        if self.kind == "uneven":
            short = self.rows // 2
            return (self.rows - short) * self.topk + short * min(SHORT_ROW, self.topk)
        return self.listed

    @property
    def calls(self) -> int:
        """Of a graph."""
        return max(FEWEST_CALLS, math.ceil(COLD_BYTES / (self.listed * self.row_bytes)))

    @property
    def reads(self) -> GpuCase:
        """The case with the same index sets, for any number of heads."""
        return GpuCase(self.format, 0, self.batch, self.topk, self.pattern, self.s_q, self.kind)


@dataclass(frozen=True)
class IndexSet:
    """What one call selects."""

    slots: Any  # (rows, topk) int32
    indices: Any  # the same, or positions
    block_table: Any = None  # (requests, blocks) int32


# ------------------------------------------------------------------------------ inputs


def scattered(device: Any, numbers: Any, rows: int, size: int) -> Any:
    """Numbers below `size`, a power of two, sent through a random bijection, another in each row.

    Distinct numbers stay distinct, which random draws would not be.
    """
    bits = size.bit_length() - 1
    for _ in range(2):
        factor, offset = (device.integers(size, (rows, 1)) for _ in range(2))
        numbers = (numbers * (factor | 1) + offset) & (size - 1)
        numbers = numbers ^ (numbers >> (bits // 2 + 1))
    return numbers


def trace_positions(device: Any, rows: int, topk: int) -> Any:
    """bench.trace_positions for many rows: (rows, topk) positions of a context."""
    chance = device.uniform((rows, topk)) / 0.4  # of a gap being wide: below 1, and uniform there
    steps = device.as_int64(device.log(chance) / math.log(1 - 1 / 23.6))
    positions = (1 + (steps + 1) * (chance <= 1)).cumsum(1) - 1
    even = topk - topk % 2
    first, second = positions[:, 0:even:2], positions[:, 1:even:2]
    swap = (second - first) * (device.uniform(tuple(first.shape)) < 0.26)
    positions[:, 0:even:2] = first + swap
    positions[:, 1:even:2] = second - swap
    return positions


def make_queries(device: Any, rng: Any, case: GpuCase) -> Any:
    """(rows, heads, d_qk) of normal numbers; 4096 drawn heads are repeated to fill it."""
    import ml_dtypes
    import numpy as np

    heads = case.rows * case.heads
    drawn = rng.standard_normal((min(heads, 4096), D_QK), np.float32)
    if FORMATS[case.format][1] == "bfloat16":
        drawn = drawn.astype(ml_dtypes.bfloat16)
    return device.repeated(device.upload(drawn), heads).reshape(case.rows, case.heads, D_QK)


def index_set(device: Any, case: GpuCase, tokens: int) -> IndexSet:
    """A new index set: the rows' slots are distinct and lie anywhere in the cache, either one by
    one or, where there is a context, in the pages that hold it."""
    numbers = device.arange(case.topk)
    paged = case.kind in ("table", "prefill")
    if case.pattern == "uniform" and not paged:
        slots = device.as_int32(scattered(device, numbers, case.rows, tokens))
        return IndexSet(slots, slots + tokens if case.kind == "faults" else slots)

    requests = 1 if case.kind == "prefill" else case.batch
    if case.pattern == "uniform":
        positions = scattered(device, numbers, case.rows, case.context)
    else:
        positions = trace_positions(device, case.rows, case.topk)
        positions += device.integers(case.context, (case.rows, 1))
        positions &= case.context - 1
    blocks = device.arange(case.context // BLOCK_SIZE)
    table = scattered(device, blocks, requests, tokens // BLOCK_SIZE)
    request = device.arange(case.rows) // (case.rows // requests)
    pages = table[request[:, None], positions // BLOCK_SIZE]
    slots = device.as_int32(pages * BLOCK_SIZE + positions % BLOCK_SIZE)
    if case.kind == "table":
        return IndexSet(slots, device.as_int32(positions), device.as_int32(table))
    return IndexSet(slots, slots + tokens if case.kind == "faults" else slots)


def entries_per_row(device: Any, case: GpuCase) -> Any:
    """topk_lens (rows,) int32, or None where every entry counts."""
    if case.kind != "uneven":
        return None
    odd = device.arange(case.rows) % 2
    return device.as_int32(case.topk - odd * (case.topk - min(SHORT_ROW, case.topk)))


def counted(device: Any, case: GpuCase, each: IndexSet) -> Any:
    """The slots of the entries that count, in one dimension."""
    lens = entries_per_row(device, case)
    if lens is None:
        return each.slots.reshape(-1)
    return each.slots[device.arange(case.topk) < lens[:, None]]


# ------------------------------------------------------------------------------ measuring


def replays(device: Any, replay: Callable[[], None], calls: int) -> list[float]:
    """Seconds a call, of each replay."""
    return [device.seconds(replay) / calls for _ in range(REPLAYS)]


def seconds_of_large(device: Any, call: Callable[[int], Any]) -> float:
    """Of a call so long that it needs no graph, which a framework's own calls may not allow."""

    def in_turn() -> None:
        for i in range(FEWEST_CALLS):
            call(i)

    device.seconds(in_turn)
    return statistics.median(replays(device, in_turn, FEWEST_CALLS))


def gather_seconds(device: Any, kv_cache: Any, slots: list[Any], out: Any) -> float:
    """Of reading the rows of each array of slots and nothing else."""
    from . import _core

    def call(i: int) -> None:
        _core.gather(kv_cache, slots[i], out)

    replay = device.record(call, len(slots))
    device.seconds(replay)
    return statistics.median(replays(device, replay, len(slots)))


def ceilings(device: Any, out: Any) -> dict[str, Any]:
    """What the device does best: a copy, a matrix product, and what a launch costs."""
    one, other = (device.empty((COPY_BYTES,), "uint8") for _ in range(2))
    one[...] = 85
    copy = seconds_of_large(device, lambda i: device.copy(other, one))
    product, dtype = device.matrix_product()
    matrix = seconds_of_large(device, product)
    nothing = [device.as_int32(device.arange(0))] * 256
    return {
        "copy_bytes_per_second": 2 * COPY_BYTES / copy,
        "matrix_flops": 2 * MATRIX**3 / matrix,
        "matrix_dtype": dtype,
        "launch_seconds": gather_seconds(device, one.reshape(-1, 16), nothing, out),
    }


def floor_seconds(case: GpuCase, gather: float, limits: dict[str, Any]) -> float:
    """The least that a call can take: its rows read, or its products done after a launch."""
    return max(gather, case.flops / limits["matrix_flops"] + limits["launch_seconds"])


# ------------------------------------------------------------------------------ checking


def sampled(rows: int) -> list[int]:
    """Rows that are compared with the reference: the first, the last, two between them."""
    return sorted({0, rows // 3, 2 * rows // 3, rows - 1})


def expected(device: Any, case: GpuCase, q: Any, kv_cache: Any, each: IndexSet) -> Any:
    """The reference's Attention of the sampled rows of a call."""
    import numpy as np

    from . import reference

    picked = device.upload(np.array(sampled(case.rows)))
    slots = each.slots[picked].reshape(-1)
    rows = device.download(kv_cache.reshape(-1, kv_cache.shape[-1])[device.as_int64(slots)])
    indices = np.arange(slots.shape[0]).reshape(-1, case.topk)
    lens = entries_per_row(device, case)
    return reference.attention(
        device.download(q.reshape(case.rows, case.heads, D_QK)[picked]),
        rows[None],
        np.full_like(indices, -1) if case.kind == "faults" else indices,
        softmax_scale=SOFTMAX_SCALE,
        cache_format=FORMATS[case.format][0],
        topk_lens=None if lens is None else device.download(lens[picked]),
    )


def compare(case: GpuCase, name: str, result: Any, wanted: Any, bound: Any) -> None:
    """Raises WrongResult where an array of the sampled rows is too far away from the reference."""
    import numpy as np

    result = result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        fits = (result == wanted) | (np.abs(result - wanted) <= bound)
    if not fits.all():
        first = tuple(int(i) for i in np.argwhere(~fits)[0])
        raise WrongResult(
            f"{case}: {name} of sampled row {sampled(case.rows)[first[0]]} is {result[first]:.6g} "
            f"at {first[1:]}, the reference is {wanted[first]:.6g}; a wrong result gets no time"
        )


# ------------------------------------------------------------------------------ subjects


def attend_call(
    case: GpuCase, q: Any, kv_cache: Any, sets: list[IndexSet], lens: Any, out: Any, lse: Any
) -> Callable[[int], None]:
    """Call number i of sparse_mla, into out and lse."""
    import sparse_mla

    leading = (case.batch,) if case.s_q == 1 else (case.batch, case.s_q)
    shaped = [each.indices.reshape(*leading, case.topk) for each in sets]
    options = {
        "softmax_scale": SOFTMAX_SCALE,
        "cache_format": FORMATS[case.format][0],
        "topk_lens": None if lens is None else lens.reshape(*leading),
        "out": out.reshape(*leading, case.heads, D_V),
        "lse": lse.reshape(*leading, case.heads),
        "validate": "record" if case.kind == "faults" else "deferred",
    }
    q = q.reshape(*leading, case.heads, D_QK)

    def call(i: int) -> None:
        sparse_mla.attend(q, kv_cache, shaped[i], block_table=sets[i].block_table, **options)

    return call


def plan_of(case: GpuCase, device: str) -> dict[str, Any]:
    import sparse_mla

    cache_format, dtype, _ = FORMATS[case.format]
    return sparse_mla.plan(
        batch=case.batch,
        s_q=case.s_q,
        heads=case.heads,
        topk=case.topk,
        dtype=dtype,
        cache_format=cache_format,
        device=device,
    )


def measure(
    device: Any,
    case: GpuCase,
    q: Any,
    kv_cache: Any,
    sets: list[IndexSet],
    against: list[str],
) -> dict[str, list[float]]:
    """Seconds a call of each subject, one for each replay.

    Raises WrongResult where sampled rows of the last call differ from the reference.
    """
    import numpy as np

    lens = entries_per_row(device, case)
    out = device.empty((case.rows, case.heads, D_V), FORMATS[case.format][1])
    lse = device.empty((case.rows, case.heads), "float32")
    picked = device.upload(np.array(sampled(case.rows)))
    wanted = expected(device, case, q, kv_cache, sets[-1])

    replay = device.record(attend_call(case, q, kv_cache, sets, lens, out, lse), len(sets))
    out[...] = lse[...] = math.nan
    device.seconds(replay)
    compare(case, "out", device.download(out[picked]), wanted.out, wanted.bound_out)
    compare(case, "lse", device.download(lse[picked]), wanted.lse, wanted.bound_lse)
    times = {"sparse_mla": replays(device, replay, len(sets))}

    if "torch" in against and case.kind == "slots":
        flat = kv_cache.reshape(-1, kv_cache.shape[-1])
        compute = bench.torch_composition(case, q, flat)
        last = [None]

        def call(i: int) -> None:
            last[0] = compute(sets[i].slots)

        replay = device.record(call, len(sets))
        last[0].fill_(math.nan)
        device.seconds(replay)
        # PyTorch rounds scores to bfloat16: one of 8 is off by up to 0.016, its weight by 1.6 %
        bound = 2 * bench.TOLERANCE[FORMATS[case.format][1]] * float(np.abs(wanted.out).max())
        result = device.download(last[0].float()[picked])
        compare(case, "PyTorch's out", result, wanted.out, bound)
        times["torch"] = replays(device, replay, len(sets))
    return times


def measure_all(
    device: Any, options: argparse.Namespace, limits: dict[str, Any], sums: Any
) -> Iterator[dict[str, Any]]:
    """One result after the other."""
    import numpy as np

    import sparse_mla

    rng = np.random.default_rng(options.seed)
    todo = list(cases(options))
    done, kv_cache, filled = 0, None, None
    for reads, group in itertools.groupby(todo, key=lambda case: case.reads):
        if filled != reads.format:
            kv_cache = None  # two at once may be more than fits
            drawn = bench.make_cache(rng, reads.format, 4096)
            kv_cache = device.repeated(device.upload(drawn), options.tokens // BLOCK_SIZE)
            filled = reads.format
        sets = [index_set(device, reads, options.tokens) for _ in range(reads.calls)]
        gather = 0.0
        if reads.kind != "faults":
            slots = [counted(device, reads, each) for each in sets]
            gather = gather_seconds(device, kv_cache, slots, sums)
            del slots
        for case in group:
            done += 1
            bench.progress(f"[{done}/{len(todo)}] {case}")
            q = make_queries(device, rng, case)
            times = measure(device, case, q, kv_cache, sets, options.against)
            if case.kind == "faults":
                sparse_mla.faults(options.device)
            yield {
                "case": asdict(case),
                "entries": case.entries,
                "bytes": case.bytes,
                "flops": case.flops,
                "plan": plan_of(case, options.device),
                "index_sets": len(sets),
                "seconds": times,
                "median_seconds": {name: statistics.median(each) for name, each in times.items()},
                "gather_seconds": gather,
                "floor_seconds": floor_seconds(case, gather, limits),
            }


# ------------------------------------------------------------------------------ the run


def cases(options: argparse.Namespace) -> Iterator[GpuCase]:
    """Of the groups that were asked for: all of one format, then of the next, heads fastest."""
    found = {}
    for group in options.groups:
        quick = QUICK if options.quick and group == "table" else {}
        axes = {**AXES, **GROUPS[group], **quick, **options.axes}
        for values in itertools.product(*axes.values()):
            found[GpuCase(**dict(zip(axes, values, strict=True)))] = None
    yield from sorted(found, key=lambda case: list(FORMATS).index(case.format))


COLUMNS = (
    f"{'cache':5}  {'entries':7}  {'indices':7}  {'topk':>5}  {'rows':>6}  {'heads':>5}  "
    f"{'kernel':>12}  {'launches':>8}  {'µs':>9}  {'GB/s':>5}  {'TFLOP/s':>7}  "
    f"{'floor µs':>8}  {'of floor':>8}"
)


def heading(facts: dict[str, Any], options: argparse.Namespace) -> str:
    limits = facts["ceilings"]
    text = (
        f"sparse_mla {facts['sparse_mla']}, {facts['gpu']['name']}, {facts['gpu']['framework']}, "
        f"CUDA {facts['gpu']['cuda']}\n"
        f"copy {limits['copy_bytes_per_second'] / 1e12:.2f} TB/s read and written, "
        f"{limits['matrix_dtype']} matrix product {limits['matrix_flops'] / 1e12:.0f} TFLOP/s, "
        f"a launch {limits['launch_seconds'] * 1e6:.1f} µs\n"
        f"d_qk {D_QK}, d_v {D_V}, {options.tokens:,} tokens of cache, another index set in every "
        f"call, L2 cold\n\n{COLUMNS}"
    )
    return text + (f"  {'PyTorch µs':>10}  {'speed-up':>8}" if "torch" in options.against else "")


def line(result: dict[str, Any]) -> str:
    case, seconds, floor = result["case"], result["median_seconds"], result["floor_seconds"]
    own = seconds["sparse_mla"]
    rows = f"{case['batch']}x{case['s_q']}" if case["s_q"] > 1 else str(case["batch"])
    text = (
        f"{case['format']:5}  {case['kind']:7}  {case['pattern']:7}  {case['topk']:5}  "
        f"{rows:>6}  {case['heads']:5}  {result['plan']['kernel']:>12}  "
        f"{result['plan']['launches']:8}  {own * 1e6:9.1f}  {result['bytes'] / own / 1e9:5.0f}  "
        f"{result['flops'] / own / 1e12:7.1f}  {floor * 1e6:8.1f}  {own / floor:7.2f}x"
    )
    if "torch" in seconds:
        text += f"  {seconds['torch'] * 1e6:10.1f}  {seconds['torch'] / own:7.2f}x"
    return text


def summary(results: list[dict[str, Any]]) -> str:
    """µs a call of the plain cases by heads and rows, as a table in Markdown for each pattern and
    topk of which there is more than one number of rows."""
    found: dict[tuple[str, int], dict[tuple[str, int], dict[int, float]]] = {}
    for result in results:
        case = result["case"]
        if case["kind"] != "slots" or case["s_q"] > 1:
            continue
        table = found.setdefault((case["pattern"], case["topk"]), {})
        by_batch = table.setdefault((case["format"], case["heads"]), {})
        by_batch[case["batch"]] = result["median_seconds"]["sparse_mla"] * 1e6
    text = ""
    for (pattern, topk), table in found.items():
        batches = sorted({batch for by_batch in table.values() for batch in by_batch})
        if len(batches) < 2:
            continue
        rows = [f"{batch} row" + "s" * (batch > 1) for batch in batches]
        text += f"\n{pattern} indices, topk {topk}, µs\n\n"
        text += "| " + " | ".join(["cache", "heads", *rows]) + " |\n"
        text += "|---" * (2 + len(rows)) + "|\n"
        for (cache, heads), by_batch in table.items():
            numbers = [f"{by_batch[batch]:.1f}" if batch in by_batch else "" for batch in batches]
            text += "| " + " | ".join([cache, str(heads), *numbers]) + " |\n"
    return text


def run(options: argparse.Namespace) -> None:
    import sparse_mla

    sparse_mla.load(options.device)
    device = open_device(options.device, options.framework, options.seed)
    facts = {**info.facts(), "gpu": device.facts()}
    number = int(options.device.partition(":")[2] or 0)
    processors = facts["devices"][1 + number]["multiprocessors"]
    sums = device.empty((GATHER_BLOCKS_PER_SM * processors,), "int32")
    if device.framework != "torch":
        options.against = []
    bench.progress("ceilings: copy, matrix product, launch")
    facts["ceilings"] = ceilings(device, sums)
    bench.progress("")
    print(heading(facts, options), flush=True)
    results = []
    for result in measure_all(device, options, facts["ceilings"], sums):
        bench.progress("")
        print(line(result), flush=True)
        results.append(result)
    print(summary(results), end="")
    if options.json:
        report = {"machine": facts, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    groups = "\n".join(
        f"  {name:8} "
        + ", ".join(f"{axis} {' '.join(map(str, values))}" for axis, values in axes.items())
        for name, axes in GROUPS.items()
    )
    kinds = "\n".join(f"  {name:8} {what}" for name, what in KINDS.items())
    usual = ", ".join(f"{axis} {' '.join(map(str, values))}" for axis, values in AXES.items())
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla bench --device cuda",
        description="Times attend on a GPU: a CUDA graph of many calls, each with its own index "
        "set over a large cache, so that L2 is cold; the median of the replays, divided by the "
        "number of calls. Beside it the least that the device needs for such a call, measured in "
        "the same run, and a composition in PyTorch.",
        epilog=f"groups of cases:\n{groups}\n  otherwise {usual}\n\nentries:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = {"nargs": "+", "metavar": "N", "type": bench.positive}
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cuda:N")
    add("--framework", choices=FRAMEWORKS, help="default: PyTorch, else CuPy")
    add("--quick", action="store_true", help="a few cases of the table")
    add("--groups", nargs="+", choices=(*GROUPS, "all"), default=["table"], help="default: table")
    add("--formats", nargs="+", choices=FORMATS, help="caches; this and the next four hold")
    add("--patterns", nargs="+", choices=PATTERNS, help="in every group, instead of its own")
    add("--heads", **several)
    add("--batch", **several)
    add("--topk", **several)
    add("--against", nargs="*", choices=("torch",), help="default: PyTorch where it is installed")
    add(
        "--tokens",
        type=bench.positive,
        default=TOKENS,
        metavar="N",
        help=f"slots of the cache, a power of two (default: {TOKENS})",
    )
    add("--seed", type=int, default=0, metavar="N")
    add("--json", metavar="FILE", help="write times and facts of the machine there")
    options = parser.parse_args(argv)
    if "all" in options.groups:
        options.groups = list(GROUPS)
    own = {name: getattr(options, name) for name in ("heads", "batch", "topk")}
    own |= {"format": options.formats, "pattern": options.patterns}
    options.axes = {name: tuple(each) for name, each in own.items() if each}
    if options.against is None:
        options.against = ["torch"] if find_spec("torch") else []
    prefix, _, number = options.device.partition(":")
    if prefix != "cuda" or not (number.isdigit() or options.device == "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, got {options.device!r}")
    wanted = max(case.context for case in cases(options))
    if options.tokens < wanted or options.tokens & (options.tokens - 1):
        parser.error(
            f"argument --tokens: expected a power of two, at least {wanted}, got {options.tokens}"
        )
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code: 0, 1 for a wrong result, 2 for bad usage."""
    import sparse_mla

    options = parse(argv)
    try:
        run(options)
    except WrongResult as error:
        bench.progress("")
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (NoFramework, sparse_mla.UnsupportedError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"bench needs {error.name}: pip install 'sparse-mla[numpy]'", file=sys.stderr)
        return 2
    return 0
