"""`python -m sparse_mla bench`: what a call costs, beside compositions of a framework's own calls.

This is the benchmark of the CPU, and what it shares with that of a GPU (bench_gpu.py), which
`--device cuda` chooses.

Every call reads its own random index set over a cache that is much larger than the last-level
cache, so the rows come from memory, as they do between the layers of a model. The subjects
(sparse_mla, NumPy, PyTorch) take turns on the same index sets with the same number of threads, and
what they compute is compared before a time is printed. The ceiling, multiply-adds on registers
alone, takes its turn among them: what slows the machine down slows it down, too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import info

if TYPE_CHECKING:
    import numpy

D_QK, D_V = 576, 512
LATENT_GROUP = 128  # latent numbers that share a scale in fp8_ds_mla
BLOCK_SIZE = 64
SOFTMAX_SCALE = 1 / 16  # GLM-5's
PATTERNS = ("uniform", "trace")

# name -> (cache_format, dtype of q and of a dense cache, bytes of a row)
FORMATS = {
    "bf16": ("dense", "bfloat16", 1152),
    "fp32": ("dense", "float32", 2304),
    "fp8": ("fp8_ds_mla", "bfloat16", 656),
}

# How far from the NumPy composition a subject's output may be, in parts of its largest number.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    format: str  # of FORMATS
    heads: int
    batch: int  # query rows, one for each request
    topk: int
    pattern: str  # of PATTERNS

    @property
    def row_bytes(self) -> int:
        return FORMATS[self.format][2]

    @property
    def entries(self) -> int:
        """Cache rows that a call gathers."""
        return self.batch * self.topk

    @property
    def bytes(self) -> int:
        return self.entries * self.row_bytes

    @property
    def flops(self) -> int:
        """Of the two products: a multiply-add is two."""
        return 2 * self.entries * self.heads * (D_QK + D_V)


@dataclass(frozen=True)
class Inputs:
    """NumPy arrays of one case, and an index set for each call."""

    q: numpy.ndarray  # (batch, heads, d_qk)
    kv_cache: numpy.ndarray  # (num_blocks, block_size, row)
    indices: list[numpy.ndarray]  # (batch, topk) int32 slots


# A subject's call number i, and its result as float32 (batch, heads, d_v).
Call = Callable[[int], Any]
Result = Callable[[Any], Any]
Subject = Callable[[Case, Inputs], tuple[Call, Result]]


# ------------------------------------------------------------------------------ inputs


def trace_positions(rng: Any, topk: int) -> Any:
    """Positions of one context as the index sets of a DSA model have them: distinct, the sorted
    set's gaps 1 in the median and 49 at the 95th percentile, 87 % of neighbours ascending."""
    import numpy as np

    gaps = np.ones(topk, np.int64)
    wide = rng.random(topk) < 0.4
    gaps[wide] += rng.geometric(1 / 23.6, np.count_nonzero(wide))
    positions = np.cumsum(gaps) - 1
    swap = np.nonzero(rng.random(topk // 2) < 0.26)[0] * 2
    positions[swap], positions[swap + 1] = positions[swap + 1], positions[swap]
    return positions


def index_set(rng: Any, case: Case, slots: int) -> Any:
    """(batch, topk) int32, distinct slots in each row: drawn from the whole cache ("uniform"), or
    positions like a model's in pages that lie anywhere in the cache ("trace")."""
    import numpy as np

    rows = []
    for _ in range(case.batch):
        if case.pattern == "uniform":
            rows.append(rng.choice(slots, case.topk, replace=False))
            continue
        page, offset = np.divmod(trace_positions(rng, case.topk), BLOCK_SIZE)
        pages = rng.choice(slots // BLOCK_SIZE, page.max() + 1, replace=False)
        rows.append(pages[page] * BLOCK_SIZE + offset)
    return np.stack(rows).astype(np.int32)


def make_cache(rng: Any, name: str, slots: int) -> Any:
    """(num_blocks, block_size, row) of normal numbers; 4096 drawn rows are repeated to fill it."""
    import ml_dtypes
    import numpy as np

    import sparse_mla

    cache_format, dtype, _ = FORMATS[name]
    drawn = rng.standard_normal((4096, D_QK), np.float32)
    if cache_format == "dense":
        dtype = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
        blocks = drawn.astype(dtype).reshape(-1, BLOCK_SIZE, D_QK)
    else:
        blocks = sparse_mla.pack(drawn, cache_format=cache_format, block_size=BLOCK_SIZE)
    return np.tile(blocks, (math.ceil(slots / len(drawn)), 1, 1))


def make_inputs(rng: Any, case: Case, kv_cache: Any, calls: int) -> Inputs:
    import ml_dtypes
    import numpy as np

    dtype = np.float32 if FORMATS[case.format][1] == "float32" else ml_dtypes.bfloat16
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    return Inputs(
        q=rng.standard_normal((case.batch, case.heads, D_QK), np.float32).astype(dtype),
        kv_cache=kv_cache,
        indices=[index_set(rng, case, slots) for _ in range(calls)],
    )


# ------------------------------------------------------------------------------ subjects


def sparse_mla_subject(case: Case, inputs: Inputs) -> tuple[Call, Result]:
    import numpy as np

    import sparse_mla

    cache_format = FORMATS[case.format][0]

    def call(i: int) -> Any:
        return sparse_mla.attend(
            inputs.q,
            inputs.kv_cache,
            inputs.indices[i],
            softmax_scale=SOFTMAX_SCALE,
            cache_format=cache_format,
        )

    return call, lambda result: result[0].astype(np.float32)


def numpy_subject(case: Case, inputs: Inputs) -> tuple[Call, Result]:
    """Gather, widen to float32 (NumPy multiplies nothing narrower), two matrix products."""
    import ml_dtypes
    import numpy as np

    row = inputs.kv_cache.shape[-1]
    cache = inputs.kv_cache.reshape(-1, row)
    q = inputs.q.astype(np.float32)
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def widen(rows: Any) -> Any:
        if case.format == "fp32":
            return rows
        if case.format == "bf16":
            bits = rows.view(np.uint16).astype(np.uint32)
            return np.left_shift(bits, 16, out=bits).view(np.float32)
        wide = np.empty((*rows.shape[:-1], D_QK), np.float32)
        scales = rows[..., 512:528].copy().view(np.float32)
        groups = e4m3[rows[..., :512]].reshape(*rows.shape[:-1], -1, LATENT_GROUP)
        wide[..., :512] = (groups * scales[..., None]).reshape(*rows.shape[:-1], 512)
        bits = rows[..., 528:].copy().view(np.uint16).astype(np.uint32) << 16
        wide[..., 512:] = bits.view(np.float32)
        return wide

    def call(i: int) -> Any:
        rows = widen(cache[inputs.indices[i]])
        scores = np.matmul(q, rows.transpose(0, 2, 1))
        scores *= SOFTMAX_SCALE
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.matmul(scores, rows[..., :D_V])

    return call, lambda result: result


def torch_composition(case: Case, q: Any, cache: Any) -> Callable[[Any], Any]:
    """index_select, for fp8 a dequantisation to bfloat16, matmul, softmax, matmul.

    The out of q (rows, heads, d_qk) over a cache (slots, row), as a function of the indices
    (rows, topk); on any device.
    """
    import torch

    def widen(rows: Any) -> Any:
        if case.format != "fp8":
            return rows
        latent = rows[:, :512].view(torch.float8_e4m3fn).to(torch.float32)
        scales = rows[:, 512:528].view(torch.float32)
        latent = latent.view(-1, 4, LATENT_GROUP) * scales[:, :, None]
        rope = rows[:, 528:].view(torch.bfloat16)
        return torch.cat((latent.view(-1, 512).to(torch.bfloat16), rope), dim=1)

    def compute(indices: Any) -> Any:
        rows = widen(cache.index_select(0, indices.view(-1)))
        rows = rows.view(q.shape[0], case.topk, D_QK)
        scores = torch.matmul(q, rows.transpose(1, 2)) * SOFTMAX_SCALE
        return torch.matmul(torch.softmax(scores, dim=-1), rows[..., :D_V])

    return compute


def torch_subject(case: Case, inputs: Inputs) -> tuple[Call, Result]:
    import numpy as np
    import torch

    def tensor(array: Any) -> Any:
        if array.dtype.name != "bfloat16":
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)

    cache = tensor(inputs.kv_cache.reshape(-1, inputs.kv_cache.shape[-1]))
    indices = [torch.from_numpy(each) for each in inputs.indices]
    compute = torch_composition(case, tensor(inputs.q), cache)
    return lambda i: compute(indices[i]), lambda result: result.float().numpy()


# ------------------------------------------------------------------------------ measuring


def time_in_turns(
    calls: dict[str, Call], peak: Callable[[], float], sets: int, repeats: int, seconds: float
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds a call of every subject, and what `peak` returned, one number for each repeat.

    A repeat runs each index set once. The subjects take turns repeat by repeat, so that a
    disturbance of the machine meets them all; once `seconds` for each subject are over and three
    repeats done, no more are begun.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = []
    begin = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 3 and time.perf_counter() - begin > seconds * len(calls):
            break
        peaks.append(peak())
        for name, call in calls.items():
            start = time.perf_counter()
            for i in range(sets):
                call(i)
            times[name].append((time.perf_counter() - start) / sets)
    return times, peaks


# ------------------------------------------------------------------------------ the machine


def last_level_cache() -> int:
    """Bytes; 32 MiB where the machine does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes) or 32 << 20


def set_threads(threads: int, subjects: list[str]) -> None:
    """The same number for every subject. NumPy's BLAS reads it when it is loaded."""
    for name in ("SPARSE_MLA", "OMP", "OPENBLAS", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)
    if "torch" in subjects:
        import torch

        torch.set_num_threads(threads)


def peak_flops(kernel: str, threads: int) -> float:
    """Twice the multiply-adds a second of all threads at once: they may share the units of one
    core."""
    from . import _core

    with ThreadPoolExecutor(threads) as pool:
        return 2 * sum(pool.map(_core.cpu_peak, [kernel] * threads))


def cpu_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the times depend on; `kernels` has the kernel of each format and its ceiling."""
    import sparse_mla

    kernels, peaks = {}, {}
    for name in options.formats:
        cache_format, dtype, _ = FORMATS[name]
        shape = {"batch": 1, "heads": 16, "topk": options.topk}
        kernel = sparse_mla.plan(**shape, dtype=dtype, cache_format=cache_format)["kernel"]
        if kernel not in peaks:
            peaks[kernel] = peak_flops(kernel, options.threads)
        kernels[name] = {
            "kernel": kernel,
            "instruction_set": info.instruction_set(kernel),
            "peak_flops": peaks[kernel],
        }
    return {
        "device": info.processor(),
        "threads": options.threads,
        "cache_bytes": last_level_cache(),
        "kernels": kernels,
        **info.facts(),
    }


# ------------------------------------------------------------------------------ the run


# The first is ours, "numpy" judges the results.
SUBJECTS: dict[str, Subject] = {
    "sparse_mla": sparse_mla_subject,
    "numpy": numpy_subject,
    "torch": torch_subject,
}
TITLES = {"numpy": "NumPy", "torch": "PyTorch"}


class WrongResult(RuntimeError):
    """A subject does not compute what the others do."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    order = (options.formats, options.patterns, options.batch, options.heads)
    for name, pattern, batch, heads in itertools.product(*order):
        yield Case(name, heads, batch, options.topk, pattern)


def measure(case: Case, inputs: Inputs, kernel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times of one case, after the subjects' results have been compared with NumPy's.

    Raises WrongResult where one differs.
    """
    import numpy as np

    made = {name: SUBJECTS[name](case, inputs) for name in options.subjects}
    call, result = made.get("numpy") or numpy_subject(case, inputs)
    expected = result(call(0))
    bound = TOLERANCE[FORMATS[case.format][1]] * float(np.abs(expected).max())
    for name, (call, result) in made.items():
        error = float(np.abs(result(call(0)) - expected).max())
        if not error <= bound:
            raise WrongResult(
                f"{case}: the output of {name} is {error:.3g} away from NumPy's, more than "
                f"{bound:.3g}; a wrong result gets no time"
            )
    calls = {name: call for name, (call, _) in made.items()}
    ceiling = functools.partial(peak_flops, kernel, options.threads)
    times, peaks = time_in_turns(
        calls, ceiling, len(inputs.indices), options.repeats, options.seconds
    )
    own = times["sparse_mla"]
    return {
        "case": asdict(case),
        "bytes": case.bytes,
        "flops": case.flops,
        "index_sets": len(inputs.indices),
        "seconds": times,
        "median_seconds": {name: statistics.median(each) for name, each in times.items()},
        "peak_flops": peaks,
        "share_of_peak": statistics.median(
            case.flops / each / peak for each, peak in zip(own, peaks, strict=True)
        ),
    }


def measure_all(options: argparse.Namespace, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One result after the other, over caches that are four times as large as the machine's."""
    import numpy as np

    rng = np.random.default_rng(options.seed)
    todo = list(cases(options))
    kv_cache, filled = None, None
    for number, case in enumerate(todo, 1):
        what = f"{case.format}, {case.pattern}, {case.heads} heads, {case.batch} rows"
        progress(f"[{number}/{len(todo)}] {what}")
        if filled != case.format:
            kv_cache = None  # two at once may be more than fits
            enough = max(1 << 16, 16 * case.topk, 4 * facts["cache_bytes"] // case.row_bytes)
            kv_cache = make_cache(rng, case.format, options.tokens or enough)
            filled = case.format
        sets = options.sets or min(max(4, math.ceil(2 * facts["cache_bytes"] / case.bytes)), 64)
        kernel = facts["kernels"][case.format]["kernel"]
        yield measure(case, make_inputs(rng, case, kv_cache, sets), kernel, options)


def progress(text: str) -> None:
    """A line of standard error that the next one replaces; in a log, a line of its own."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def heading(facts: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [f"sparse_mla {facts['sparse_mla']}, {facts['device']}, {options.threads} threads"]
    for kernel in {each["kernel"]: each for each in facts["kernels"].values()}.values():
        lines.append(
            f"{kernel['kernel']}: {kernel['instruction_set']}, at most "
            f"{kernel['peak_flops'] / 1e9:,.0f} GFLOP/s before the first case"
        )
    lines.append(f"topk {options.topk}, d_qk {D_QK}, d_v {D_V}, another index set in every call")
    columns = f"{'cache':5}  {'indices':7}  {'heads':>5}  {'rows':>4}  "
    columns += f"{'µs':>10}  {'GB/s':>6}  {'GFLOP/s':>8}  {'of peak':>7}"
    for name in options.against:
        columns += f"  {TITLES[name] + ' µs':>10}  {'speed-up':>8}"
    return "\n".join([*lines, "", columns])


def line(result: dict[str, Any], options: argparse.Namespace) -> str:
    case, seconds = result["case"], result["median_seconds"]
    own = seconds["sparse_mla"]
    rate = result["flops"] / own
    text = f"{case['format']:5}  {case['pattern']:7}  {case['heads']:5}  {case['batch']:4}  "
    text += (
        f"{own * 1e6:10,.1f}  {result['bytes'] / own / 1e9:6.2f}  {rate / 1e9:8,.1f}  "
        f"{result['share_of_peak']:7.0%}"
    )
    for name in options.against:
        text += f"  {seconds[name] * 1e6:10,.1f}  {seconds[name] / own:7.1f}x"
    return text


def run(options: argparse.Namespace) -> None:
    set_threads(options.threads, options.subjects)
    facts = cpu_facts(options)
    print(heading(facts, options), flush=True)
    results = []
    for result in measure_all(options, facts):
        progress("")
        print(line(result, options), flush=True)
        results.append(result)
    if options.json:
        report = {"machine": facts, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def positive(text: str) -> int:
    """A number of things, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla bench",
        description="Times attend on this machine's CPU beside compositions in NumPy and PyTorch "
        "(gather, two matrix products, softmax), with the same threads and the same index sets. "
        "Times are the median of several repeats.",
        epilog="`--device cuda --help` tells what the benchmark of a GPU takes.",
    )
    several = {"nargs": "+", "metavar": "N", "type": positive}
    add = parser.add_argument
    add("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    add("--quick", action="store_true", help="two formats, 16 and 128 heads, few repeats")
    add("--formats", nargs="+", choices=FORMATS, help="caches (default: all)")
    add("--heads", **several, help="default: 1 8 16 64 128")
    add("--batch", **several, help="query rows (default: 1 4)")
    add(
        "--patterns",
        nargs="+",
        choices=PATTERNS,
        help="index sets: over the whole cache, or like those of a model (default: both)",
    )
    add("--topk", type=positive, default=2048, metavar="N", help="entries a row (default: 2048)")
    add("--against", nargs="*", choices=("numpy", "torch"), help="default: what is installed")
    add("--threads", type=positive, metavar="N", help="default: the CPUs of this process")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="slots of the cache, in steps of 4096 (default: four times the last-level cache)",
    )
    add(
        "--sets",
        type=positive,
        metavar="N",
        help="index sets that a repeat goes through (default: twice the last-level cache)",
    )
    add("--repeats", type=positive, default=9, metavar="N", help="at most (default: 9)")
    add(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="for each subject of a case, after three repeats (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N")
    add("--json", metavar="FILE", help="write times and facts of the machine there")
    options = parser.parse_args(argv)
    quick = options.quick
    options.formats = options.formats or (["bf16", "fp8"] if quick else list(FORMATS))
    options.heads = options.heads or ([16, 128] if quick else [1, 8, 16, 64, 128])
    options.batch = options.batch or ([1] if quick else [1, 4])
    options.patterns = options.patterns or (["uniform"] if quick else list(PATTERNS))
    options.threads = options.threads or len(os.sched_getaffinity(0))
    if quick:
        options.repeats = min(options.repeats, 3)
        options.sets = options.sets or 4
    if options.against is None:
        options.against = [name for name in TITLES if find_spec(name)]
    options.subjects = ["sparse_mla", *options.against]
    if options.tokens is not None and options.tokens < 16 * options.topk:
        parser.error(f"argument --tokens: expected at least 16 * topk, got {options.tokens}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code: 0, 1 for a wrong result, 2 for bad usage."""
    which = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which.add_argument("--device", nargs="?", default="cpu")
    if which.parse_known_args(argv)[0].device not in (None, "cpu"):
        from . import bench_gpu

        return bench_gpu.main(argv)
    options = parse(argv)
    try:
        run(options)
    except WrongResult as error:
        progress("")
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"bench needs {error.name}: pip install 'sparse-mla[numpy]'", file=sys.stderr)
        return 2
    return 0
