"""Draws whole calls of `attend` at random and compares each with the oracle.

    python tests/fuzz.py --cases 100000 --seed 1 --jobs 2
    python tests/fuzz.py --cases 20000 --seed 1 --jobs 8 --device cuda

A case is drawn from the seed and its number alone, so any can be repeated with --first N --cases 1.
Every combination of arguments, formats, layouts, faults and garbage can come up; `check_call` in
compare.py judges. A call that fails is made smaller for as long as it still fails, and printed as a
test.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ml_dtypes
import numpy as np

import sparse_mla
from cases import CACHE_LAYOUTS, Case, Source, make
from compare import check_call, snapshot, to_framework
from conftest import cpu_kernels, gpu_kernels
from sparse_mla import reference

PACKED = list(reference.FORMATS)


def kernels(device: str = "cpu") -> list[str]:
    """The kernels that cases are dealt out to, best first; "planned" on a GPU: what plan takes."""
    return ["planned", *gpu_kernels()] if device == "cuda" else cpu_kernels()


# --------------------------------------------------------------------------- drawing


class Draw:
    """A random number generator with the few questions that are asked of it here."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def one(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def some(self, probability: float, *values: Any) -> tuple[Any, ...]:
        return tuple(value for value in values if self.chance(probability))


def draw_source(draw: Draw, formats: list[str], positions: bool, big: bool) -> Source:
    """A cache and its entries; `positions` tells whether every row may attend to all of them."""
    cache_format = draw.one(*formats)
    block_size = draw.one(1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 64)
    room = 2000 if big else 160
    num_blocks = 0 if draw.chance(0.02) else draw.between(1, max(1, room // block_size))
    max_blocks = 0 if draw.chance(0.02) else draw.between(1, max(2, room // 3 // block_size))
    paged = draw.chance(0.5)
    seq_lens = paged and draw.chance(0.6)
    everything = seq_lens and positions and draw.chance(0.25)
    topk = None if everything else draw.one(1, 64, 70, *(draw.between(0, 40) for _ in range(5)))
    if topk is not None and big:
        topk = draw.between(100, 1500)
    bytes_of_row = cache_format != "dense"
    faulty = draw.chance(0.3)
    return Source(
        cache_format=cache_format,
        num_blocks=num_blocks,
        block_size=block_size,
        topk=topk,
        index_dtype=draw.one("int32", "int64"),
        paged=paged,
        max_blocks=max_blocks if paged else 4,
        seq_lens=seq_lens,
        topk_lens=None if topk is None else draw.one(None, None, "row", "batch"),
        padding=1.0 if draw.chance(0.02) else draw.one(0.0, 0.1, 0.1, 0.1, 0.5, 0.9),
        holes=draw.one(0.0, 0.1, 0.1, 0.5),
        faults=draw.some(0.3, "index", "slot", "logical", "block", "topk", "seq") if faulty else (),
        magnitude=draw.one(0.1, 1.0, 5.0),
        scales=draw.one("wild", "far") if "ds_mla" in cache_format and draw.chance(0.3) else "amax",
        layout=draw.one("contiguous", *CACHE_LAYOUTS),
        ndim=draw.one(2, 3) if block_size == 1 else draw.one(3, 3, 4),
        byte_dtype=draw.one("uint8", "uint8", "float8_e4m3fn") if bytes_of_row else "uint8",
        unused=draw.one("nan", "random"),
    )


def draw_case(seed: int, number: int) -> Case:
    draw = Draw(seed, number)
    big = draw.chance(0.04)
    d_qk = draw.one(576, 576, 512, draw.between(1, 80), draw.one(64, 96, 128, 192, 320))
    formats = ["dense"]
    if d_qk == 576:
        formats = ["dense", "fp8_ds_mla", "fp8_ds_mla", "fp8_tensor"]
    elif d_qk == 512:
        formats = ["dense", "fp8_ds_mla_norope"]
    d_v = draw.between(1, d_qk)
    if d_qk in (576, 512):
        d_v = draw.one(None, None, None, 512, d_v)
    leading: tuple[int, ...] = (draw.between(1, 6),)
    if draw.chance(0.4):
        leading = (draw.between(1, 3), draw.between(1, 3))
    if draw.chance(0.02):
        leading = draw.one((0,), (0, 2), (2, 0))
    if draw.chance(0.01) and d_qk <= 128:
        leading = (draw.between(60, 150),)
    heads = draw.between(1, 6)
    if draw.chance(0.15):
        heads = draw.between(7, 40)
    if draw.chance(0.005):
        heads = draw.between(41, 256)
    if big or (len(leading) == 1 and leading[0] > 6):
        heads = min(heads, 20)

    s_q = leading[1] if len(leading) == 2 else 1
    causal = draw.chance(0.4)
    main = draw_source(draw, formats, s_q <= 1 or causal, big)
    extra = draw_source(draw, formats, True, False) if draw.chance(0.25) else None
    paged = main.paged or bool(extra and extra.paged)
    request_ids = paged and draw.chance(0.4)
    requests = draw.one(None, leading[0] + draw.between(0, 3))
    if request_ids:
        requests = 0 if draw.chance(0.02) else draw.one(requests, draw.between(1, 4))
    size = draw.between(1, 4)
    return Case(
        leading=leading,
        heads=heads,
        d_qk=d_qk,
        d_v=d_v,
        dtype=draw.one("bfloat16", "float16", "float32"),
        main=main,
        extra=extra,
        q_rope=draw.between(1, d_qk - 1) if d_qk > 1 and draw.chance(0.3) else 0,
        q_layout=draw.one("contiguous", "contiguous", "transposed", "sliced", "zero"),
        requests=requests,
        request_ids=request_ids,
        query_positions=main.paged and causal,
        shard=(draw.between(0, size - 1), size, draw.one(1, 2, 3, 5, 16))
        if main.paged and draw.chance(0.25)
        else None,
        max_seq_len=main.topk is None and draw.chance(0.5),
        flat=draw.chance(0.3),
        bad_request=request_ids and draw.chance(0.2),
        sink=draw.one(None, None, "normal", "large", "infinite"),
        logit_cap=draw.one(0.0, 0.0, 0.0, 0.5, 30.0),
        spread=draw.one(0.01, 0.2, 1.0, 1.0, 8.0, 100.0, 1e5),
        nan=draw.one("q", "entry") if draw.chance(0.05) else None,
        small_layout=draw.one("contiguous", "contiguous", "columns", "zero"),
        out=draw.one(None, None, "own", "float32", "strided"),
        lse=draw.one(None, None, "given", "strided"),
        max_logits=draw.one(None, None, "given", "strided"),
        validate=draw.one("deferred", "raise", "record", "mask"),
        batch_invariant=draw.chance(0.2),
    )


def spoil(arguments: dict[str, Any], draw: Draw) -> str:
    """Makes one argument something that it may not be, or may: the call has to bear it."""
    arrays = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]
    if draw.chance(0.3):
        name = draw.one(*arguments)
        values = (
            None,
            0,
            -1,
            2**31,
            2**63,
            1.5,
            float("nan"),
            float("inf"),
            "dense",
            b"",
            (),
            (1, 2),
        )
        arguments[name] = draw.one(*values, True, [], {}, object(), np.float32(1), np.zeros(()))
        return name
    name = draw.one(*arrays)
    array = arguments[name]
    change = draw.one("dtype", "shape", "stride", "size", "ndim", "swap", "other")
    if change == "dtype":
        dtype = draw.one(
            "f2", "f4", "f8", "i4", "i8", "u1", "i2", "?", "c8", ">i4", ml_dtypes.bfloat16
        )
        arguments[name] = np.zeros(array.shape, dtype)
    elif change == "shape":
        shape = [draw.one(n, n, 0, 1, n + 1, max(n - 1, 0)) for n in array.shape]
        arguments[name] = np.zeros(shape, array.dtype)
    elif change == "stride":
        wide = np.zeros((*array.shape, 2), array.dtype)
        arguments[name] = wide[..., 0]
    elif change == "size" and array.ndim:
        arguments[name] = array[: draw.between(0, array.shape[0])]
    elif change == "ndim":
        arguments[name] = draw.one(array[None], array[..., None], array.reshape(-1))
    elif change == "swap" and array.ndim > 1:
        arguments[name] = np.swapaxes(array, 0, draw.between(1, array.ndim - 1))
    else:
        other = draw.one(*arrays)
        arguments[name] = arguments[other]
    return name


# --------------------------------------------------------------------------- running


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with everything that decides its outcome."""

    case: Case
    seed: int
    kernel: str
    spoilt: bool = False
    device: str = "cpu"

    @property
    def place(self) -> tuple[str, str]:
        """The framework of the tensors and their device."""
        return "numpy" if self.device == "cpu" else "torch", self.device


def draw_problem(seed: int, number: int, kernel: str | None, device: str = "cpu") -> Problem:
    draw = Draw(seed, number, 1)
    names = kernels(device)
    case = draw_case(seed, number)
    return Problem(
        case=without_negative_strides(case) if device == "cuda" else case,
        device=device,
        seed=draw.between(0, 2**31),
        kernel=kernel or draw.one(*names, names[0]),
        spoilt=draw.chance(0.05),
    )


def without_negative_strides(case: Case) -> Case:
    """The case for PyTorch, which has none."""

    def mend(source: Source | None) -> Source | None:
        return (
            replace(source, layout="gapped") if source and source.layout == "reversed" else source
        )

    return replace(case, main=mend(case.main), extra=mend(case.extra))


def failure(problem: Problem) -> str | None:
    """What is wrong with a call, or None. What a kernel on a GPU does not take it may refuse."""
    os.environ["SPARSE_MLA_KERNEL"] = problem.kernel
    if problem.kernel == "planned":
        del os.environ["SPARSE_MLA_KERNEL"]
    try:
        arguments = make(problem.case, problem.seed)
        if problem.spoilt:
            run_spoilt(arguments, problem)
        else:
            check_call(arguments, *problem.place)
    except Exception as error:
        if problem.device == "cuda" and str(error).startswith("SPARSE_MLA_KERNEL: "):
            return None
        return f"{type(error).__name__}: {error}"
    return None


def run_spoilt(arguments: dict[str, Any], problem: Problem) -> None:
    """A call that may be wrong: it returns, or raises as the contract says and writes nothing."""
    name = spoil(arguments, Draw(problem.seed, 2))
    arguments = {name: in_place(value, problem) for name, value in arguments.items()}
    before = snapshot(arguments, skip=())
    raised = None
    try:
        sparse_mla.attend(**arguments)
    except (TypeError, ValueError, BufferError, sparse_mla.IndexFault) as error:
        raised = error
    with contextlib.suppress(sparse_mla.IndexFault):
        sparse_mla.synchronize()
    assert raised is None or snapshot(arguments, skip=()) == before, f"{name}: written"


def in_place(value: Any, problem: Problem) -> Any:
    """A spoilt argument on the problem's device, where its framework has such a thing at all."""
    try:
        return to_framework(value, *problem.place)
    except (TypeError, ValueError, RuntimeError):
        return value


# --------------------------------------------------------------------------- making it smaller


PLAIN_SOURCE = Source(num_blocks=1, block_size=1, topk=1, padding=0.0, holes=0.0, max_blocks=1)
PLAIN = Case(leading=(1,), heads=1, d_qk=1, d_v=1, dtype="float32", main=PLAIN_SOURCE)


def legal(case: Case) -> bool:
    """Whether a case is a call that has to succeed."""
    main, extra = case.main, case.extra
    sources = [source for source in (main, extra) if source]
    s_q = case.leading[1] if len(case.leading) == 2 else 1
    widths = {"fp8_ds_mla": 576, "fp8_ds_mla_norope": 512, "fp8_tensor": 576}
    requests = case.leading[0] if case.requests is None else case.requests
    return (
        all(widths.get(source.cache_format, case.d_qk) == case.d_qk for source in sources)
        and all(source.paged or not source.seq_lens for source in sources)
        and all(source.topk is not None or source.seq_lens for source in sources)
        and all(source.topk is not None or not source.topk_lens for source in sources)
        and all(source.ndim != 2 or source.block_size == 1 for source in sources)
        and all(source.scales == "amax" or "ds_mla" in source.cache_format for source in sources)
        and (main.paged or not (case.query_positions or case.shard))
        and (main.topk is not None or s_q <= 1 or case.query_positions)
        and (main.topk is None or not case.max_seq_len)
        and (any(source.paged for source in sources) or not case.request_ids)
        and (case.request_ids or not case.bad_request)
        and (case.request_ids or requests >= case.leading[0])
        and 0 <= case.q_rope < case.d_qk
        and (case.d_qk in (576, 512) if case.d_v is None else case.d_v <= case.d_qk)
    )


def simpler(value: Any, plain: Any) -> Iterator[Any]:
    """Values on the way from `value` to `plain`, the plainest first."""
    if value == plain:
        return
    yield plain
    if isinstance(value, tuple):
        if len(value) > 1 and not isinstance(value[0], str):
            yield (int(np.prod(value)),)
        for i, item in enumerate(value):
            if isinstance(item, str):
                yield value[:i] + value[i + 1 :]
            else:
                for less in simpler(item, 1):
                    yield (*value[:i], less, *value[i + 1 :])
    elif isinstance(value, int) and isinstance(plain, int) and value > plain + 1:
        step = (value - plain) // 2
        while step:
            yield value - step
            step //= 2
        yield value - 1


def smaller(case: Case) -> Iterator[Case]:
    """Legal cases with one thing less."""
    candidates = []
    if case.extra:
        candidates.append(replace(case, extra=None))
        candidates.append(replace(case, main=case.extra, extra=None))
    for field in dataclasses.fields(Case):
        if field.name not in ("main", "extra"):
            for value in simpler(getattr(case, field.name), getattr(PLAIN, field.name)):
                candidates.append(replace(case, **{field.name: value}))
    for which in ("main", "extra"):
        source = getattr(case, which)
        if source is None:
            continue
        for field in dataclasses.fields(Source):
            for value in simpler(getattr(source, field.name), getattr(PLAIN_SOURCE, field.name)):
                candidates.append(replace(case, **{which: replace(source, **{field.name: value})}))
        unpaged = replace(source, paged=False, seq_lens=False, topk=source.topk or 1)
        if source.paged:
            off = {"request_ids": False, "bad_request": False, "query_positions": False}
            off |= {"shard": None, "max_seq_len": False}
            candidates.append(replace(case, **{which: unpaged}, **(off if which == "main" else {})))
    narrow = {"cache_format": "dense", "scales": "amax", "byte_dtype": "uint8"}
    dense = replace(case, main=replace(case.main, **narrow))
    if case.extra:
        dense = replace(dense, extra=replace(case.extra, **narrow))
    for width in (1, 16, 64):
        if width < case.d_qk:
            candidates.append(replace(dense, d_qk=width, d_v=min(width, case.d_v or 512), q_rope=0))
    return (candidate for candidate in candidates if legal(candidate) and candidate != case)


def shrink(problem: Problem, seconds: float = 60) -> tuple[Problem, str]:
    """The smallest problem found that still fails, and how."""
    text = failure(problem)
    assert text is not None
    end = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for case in smaller(problem.case):
            for seed in (problem.seed, 0, 1):
                candidate = replace(problem, case=case, seed=seed)
                found = failure(candidate)
                if found is not None:
                    problem, text, again = candidate, found, True
                    break
            if again or time.monotonic() > end:
                break
    return problem, text


def literal(item: Any, plain: Any) -> str:
    """A Case or Source as an expression, less what is as usual."""
    parts = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != getattr(plain, field.name):
            text = literal(value, Source()) if isinstance(value, Source) else repr(value)
            parts.append(f"{field.name}={text}")
    return f"{type(item).__name__}({', '.join(parts)})"


def as_test(problem: Problem, text: str, seed: int, number: int) -> str:
    """A failing problem as a test."""
    where = "" if problem.device == "cpu" else ', "torch", "cuda"'
    call = f"check_call(arguments{where})"
    imports = "from cases import Case, Source, make\nfrom compare import check_call"
    if problem.spoilt:
        whole = f"fuzz.Problem(case, {problem.seed}, {problem.kernel!r}, True, {problem.device!r})"
        call = f"fuzz.run_spoilt(arguments, {whole})"
        imports = "import fuzz\nfrom cases import Case, Source, make"
    force = f'setenv("SPARSE_MLA_KERNEL", {problem.kernel!r})'
    if problem.kernel == "planned":
        force = 'delenv("SPARSE_MLA_KERNEL", raising=False)'
    message = "\n    ".join(text.splitlines())
    return f'''{imports}


def test_fuzz_{seed}_{number}(monkeypatch):
    """{message}"""
    monkeypatch.{force}
    case = {literal(problem.case, Case())}
    arguments = make(case, seed={problem.seed})
    {call}
'''


# --------------------------------------------------------------------------- command line


def work(options: argparse.Namespace) -> int:
    """Runs its share of the cases; tells of every start and failure on standard output."""
    faulthandler.enable()
    for number in range(options.first + options.share, options.first + options.cases, options.jobs):
        print(json.dumps({"at": number}), flush=True)
        problem = draw_problem(options.seed, number, options.kernel, options.device)
        if failure(problem) is None:
            continue
        small, text = shrink(problem)
        test = as_test(small, text, options.seed, number)
        print(json.dumps({"failed": number, "test": test}), flush=True)
    return 0


class Progress:
    """What the workers have told, and a line about it every few seconds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = time.monotonic()
        self.lock = threading.Lock()
        self.begun = 0
        self.failed: list[int] = []
        self.said = self.start

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def listen(self, worker: subprocess.Popen[str]) -> None:
        at = None
        for line in worker.stdout:
            message = json.loads(line)
            with self.lock:
                if "at" in message:
                    at = message["at"]
                    self.begun += 1
                else:
                    self.report(message["failed"], message["test"])
                if time.monotonic() - self.said > 5:
                    self.said = time.monotonic()
                    self.say()
        if worker.wait():
            with self.lock:
                self.report(at, f"the process died with status {worker.returncode}")

    def say(self) -> None:
        rate = self.begun / max(self.seconds(), 1e-9)
        left = (self.options.cases - self.begun) / max(rate, 1e-9)
        print(
            f"{self.begun} of {self.options.cases} cases, {rate:.0f} a second, "
            f"{len(self.failed)} mismatches, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def report(self, number: int, text: str) -> None:
        self.failed.append(number)
        print(f"\n# case {number} of seed {self.options.seed}\n{text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kernel", help="one kernel for all; otherwise each case draws one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = ", ".join(kernels(options.device))
    if options.kernel and options.kernel not in kernels(options.device):
        parser.error(f"--kernel: expected one of {names}, got {options.kernel}")
    if options.share is not None:
        return work(options)

    progress = Progress(options)
    command = [sys.executable, __file__, "--cases", str(options.cases), "--seed", str(options.seed)]
    command += ["--first", str(options.first), "--jobs", str(options.jobs)]
    command += ["--device", options.device]
    if options.kernel:
        command += ["--kernel", options.kernel]
    workers = [
        subprocess.Popen([*command, "--share", str(share)], stdout=subprocess.PIPE, text=True)
        for share in range(options.jobs)
    ]
    listeners = [threading.Thread(target=progress.listen, args=(worker,)) for worker in workers]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    print(
        f"{progress.begun} cases of seed {options.seed}, {len(progress.failed)} mismatches, "
        f"{progress.seconds():.0f} s, kernels {options.kernel or names}"
    )
    return 1 if progress.failed or progress.begun < options.cases else 0


if __name__ == "__main__":
    sys.exit(main())
