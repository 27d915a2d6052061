"""Calls on a GPU in time: graphs and their replays, streams, threads, memory, faults told late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cases
import sparse_mla
from cases import Case, Source
from compare import (
    assert_deferred_fault,
    assert_within,
    expected,
    fault_of,
    to_framework,
    to_numpy,
)

if TYPE_CHECKING:  # conftest initialises CUDA, and the scripts below import this file
    from conftest import Backend

pytestmark = pytest.mark.gpu

PAGED = replace(cases.PAGED, topk_lens="row", topk=300, max_blocks=8, num_blocks=30)
FP8 = replace(PAGED, cache_format="fp8_ds_mla")
CASES = {
    "one_row": Case(leading=(1,), heads=16, main=Source(topk=2048, num_blocks=64, block_size=64)),
    "rows": Case(leading=(6,), heads=16, main=PAGED, request_ids=True, sink="normal"),
    "fp8": Case(leading=(6,), heads=64, main=FP8, request_ids=True),
    "two_caches": Case(leading=(3, 2), heads=8, main=PAGED, extra=PAGED, query_positions=True),
    "every_position": Case(leading=(6,), heads=16, main=replace(cases.ALL, max_blocks=20)),
    "many_rows": Case(leading=(400,), heads=8, main=replace(PAGED, topk=40), requests=5),
    "invariant": Case(leading=(2,), heads=128, main=Source(topk=1100), batch_invariant=True),
}
CASES["many_rows"] = replace(CASES["many_rows"], request_ids=True)
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def fill(held: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Puts new numbers into the tensors of an earlier call, outputs excepted."""
    for name, value in to_framework(arguments, "torch", "cuda").items():
        if hasattr(value, "shape") and name not in ("out", "lse", "max_logits"):
            held[name].copy_(value)


def padded(arguments: dict[str, Any], first: int) -> dict[str, Any]:
    """Rows from `first` on as an engine pads them: length 0, stale indices, request -1."""
    rng = np.random.default_rng(first)
    if "request_ids" in arguments:
        arguments["request_ids"][first:] = -1
    if "topk_lens" in arguments and arguments["topk_lens"].ndim == 1:
        arguments["topk_lens"][first:] = 0
    if arguments["indices"] is None:
        arguments["seq_lens"][first:] = 0
    else:
        stale = arguments["indices"][first:]
        stale[...] = rng.integers(-1, 2**31 - 1, stale.shape) if "topk_lens" in arguments else -1
    return arguments


def assert_right(arguments: dict[str, Any], out: Any, lse: Any) -> None:
    want = expected(arguments)
    assert_within("lse", to_numpy(lse), want.lse, want.bound_lse)
    assert_within("out", to_numpy(out), want.out, want.bound_out, to_numpy(out).dtype.name)


def slow(milliseconds: int = 100) -> None:
    """Keeps the current stream busy."""
    import torch

    torch.cuda._sleep(milliseconds * 2_000_000)


# --------------------------------------------------------------------------- graphs


@EVERY_CASE
@pytest.mark.parametrize("given", [False, True])
def test_replay(name: str, given: bool, cuda: Backend) -> None:
    """Replays see what the arrays hold then; padded rows come out empty, outputs from a graph's own
    pool are right as well."""
    import torch

    case = replace(CASES[name], validate="deferred")
    if given:
        case = replace(case, out="float32", lse="given", max_logits="given")
    held = cuda.tensors(cases.make(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sparse_mla.attend(**held)
    for seed in range(5):
        fresh = cases.make(case, seed + 1)
        if seed % 2:
            fresh = padded(fresh, len(fresh["q"]) // 2)
            if seed == 3:
                fresh = padded(fresh, 0)
        fill(held, fresh)
        torch.full((2**20,), float("nan"), device="cuda")
        graph.replay()
        assert_right(fresh, out, lse)
        if given:
            want = expected(fresh)
            most = to_numpy(held["max_logits"])
            assert_within("max_logits", most, want.max_logits, want.bound_max_logits)
    sparse_mla.synchronize()


def test_several_calls_in_one_graph(cuda: Backend) -> None:
    """Layers one after the other share the pool's memory: workspaces do not meet."""
    import torch

    case = CASES["one_row"]
    held = [cuda.tensors(cases.make(case, seed)) for seed in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [sparse_mla.attend(**each) for each in held]
    for _ in range(3):
        graph.replay()
        for seed, result in enumerate(results):
            assert_right(cases.make(case, seed), *result)


@pytest.mark.parametrize("cache_format", ["dense", "fp8_ds_mla_norope"])
def test_calls_that_read_what_the_one_before_wrote(cache_format: str, cuda: Backend) -> None:
    """A launch may begin before the one before it ends, but reads nothing until then: each call's
    q, and its dense cache, are the out of the call before."""
    import torch

    rows, heads, width, calls = 4, 64, 512, 8
    make = torch.Generator(device="cuda").manual_seed(1)
    options = {"cache_format": cache_format, "softmax_scale": width**-0.5}
    indices = torch.randint(rows * heads, (rows, 700), generator=make, device="cuda")
    outs = [torch.empty(rows, heads, width, device="cuda").bfloat16() for _ in range(calls + 1)]
    packed = None
    if cache_format != "dense":
        numbers = torch.randn(rows * heads, width, generator=make, device="cuda").bfloat16()
        packed = sparse_mla.pack(numbers, block_size=heads, cache_format=cache_format)

    def call(i: int) -> None:
        cache = outs[i] if packed is None else packed
        sparse_mla.attend(outs[i], cache, indices, out=outs[i + 1], **options)

    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    for _ in range(3):
        q = torch.randn(rows, heads, width, generator=make, device="cuda").bfloat16()
        want = []
        outs[0].copy_(q)
        for i in range(calls):
            call(i)
            torch.cuda.synchronize()
            want.append(outs[i + 1].clone())
        for out in outs[1:]:
            out.fill_(float("nan"))
        graph.replay()
        for out, expect in zip(outs[1:], want, strict=True):
            assert torch.equal(out, expect) and out.isfinite().all()


def test_capture_where_streams_join(cuda: Backend) -> None:
    """A call that depends on a copy of one stream and a kernel of another."""
    import torch

    case = replace(CASES["fp8"], validate="deferred")
    held, source = cuda.tensors(cases.make(case)), cuda.tensors(cases.make(case, 1))
    sparse_mla.attend(**held)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            held["q"].copy_(source["q"])
        held["indices"].copy_(source["indices"] + 0)
        torch.cuda.current_stream().wait_stream(side)
        out, lse = sparse_mla.attend(**held)
    for seed in range(2, 5):
        fresh = cases.make(case, seed)
        fill(held, fresh)
        fill(source, fresh)
        held["q"].zero_()
        held["indices"].zero_()
        graph.replay()
        assert_right(fresh, out, lse)


PRELUDE = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, cases, sparse_mla
from compare import to_framework
from test_gpu_streams import CASES, assert_right

arguments = cases.make(CASES[sys.argv[1]])
"""
CAPTURED = """
held = to_framework(arguments, "torch", "cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = sparse_mla.attend(**held)
graph.replay()
assert_right(arguments, out, lse)
"""
THREADED = """
held = to_framework(arguments, "torch", "cuda")
torch.cuda.synchronize()
start, results = threading.Barrier(8), []
def work():
    start.wait()
    results.append(sparse_mla.attend(**held))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8
for result in results: assert_right(arguments, *result)
"""
FORKED = """
sparse_mla.attend(**arguments)
child = os.fork()
assert_right(arguments, *sparse_mla.attend(**to_framework(arguments, "torch", "cuda")))
sparse_mla.synchronize()
if child == 0: os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("name", ["one_row", "fp8"])
@pytest.mark.parametrize("script", [CAPTURED, THREADED, FORKED], ids=["capture", "threads", "fork"])
def test_first_call_ever(script: str, name: str, cuda: Backend, monkeypatch) -> None:
    """Inside a capture; of eight threads at once; on both sides of a fork. It loads the kernels."""
    if script is FORKED:
        monkeypatch.delenv("SPARSE_MLA_KERNEL", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script + "print('done')", name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_faults_of_a_replay(cuda: Backend) -> None:
    """A replay records; a capture meanwhile is not disturbed; the next eager call raises, once, and
    writes nothing."""
    import torch

    case = replace(CASES["rows"], validate="deferred")
    good = cases.make(case)
    held = cuda.tensors(good)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sparse_mla.attend(**held)
    bad = cases.make(case)
    row = int(np.flatnonzero((bad["topk_lens"] > 0) & (bad["request_ids"] >= 0))[0])
    bad["indices"][row, 0] = -77
    fill(held, bad)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert_right(bad, *results)
    with torch.cuda.graph(other):
        captured = sparse_mla.attend(**held)
    sparse_mla.attend(**{**held, "validate": "mask"})
    out = torch.full_like(results[0], 7)
    raised = fault_of(lambda: sparse_mla.attend(**held, out=out))
    assert_deferred_fault(raised, bad)
    assert (raised.tensor, raised.position, raised.value) == ("indices", (row, 0), -77)
    assert raised.device == "cuda:0"
    assert (out == 7).all()
    sparse_mla.synchronize()

    fill(held, good)
    assert_right(good, *sparse_mla.attend(**held, out=out))
    sparse_mla.synchronize()
    fill(held, bad)
    other.replay()
    assert_deferred_fault(fault_of(sparse_mla.synchronize), bad)
    assert_right(bad, *captured)
    sparse_mla.synchronize()
    assert sparse_mla.faults() is None


def test_record_of_a_replay(cuda: Backend) -> None:
    import torch

    held = cuda.tensors(cases.make(replace(CASES["rows"], validate="record")))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla.attend(**held)
    held["request_ids"].fill_(10**6)
    graph.replay()
    torch.cuda.synchronize()
    sparse_mla.synchronize()
    fault = sparse_mla.faults("cuda:0")
    assert (fault.tensor, fault.value, fault.device) == ("request_ids", 10**6, "cuda:0")
    assert sparse_mla.faults("cuda:0") is None


def test_raise_is_refused_in_a_capture(cuda: Backend) -> None:
    """An error, and the capture goes on as if the call had not been made."""
    import torch

    arguments = cases.make(CASES["rows"])
    held = cuda.tensors(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match=r"^validate: 'raise' .* capture"):
            sparse_mla.attend(**{**held, "validate": "raise"})
        out, lse = sparse_mla.attend(**held)
    graph.replay()
    assert_right(arguments, out, lse)


def test_writers_and_merge_in_a_graph(cuda: Backend) -> None:
    """append, then attend in two parts, then merge: what a layer with two ranks does."""
    import torch

    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((200, 576), np.float32)).cuda()
    cache = torch.full((25, 8, 656), 0xFF, dtype=torch.uint8, device="cuda")
    slots = torch.arange(200, device="cuda")
    indices = torch.from_numpy(rng.integers(0, 200, (5, 60))).cuda()
    q = torch.randn(5, 16, 576, device="cuda", dtype=torch.bfloat16)
    keywords = {"cache_format": "fp8_ds_mla", "softmax_scale": 1 / 24}

    def layer() -> tuple[Any, Any]:
        sparse_mla.append(cache, slots, rows, cache_format="fp8_ds_mla")
        parts = [sparse_mla.attend(q, cache, part, **keywords) for part in indices.split(25, 1)]
        return sparse_mla.merge([part[0] for part in parts], [part[1] for part in parts])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    for seed in range(3):
        rows.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        q.normal_(generator=torch.Generator("cuda").manual_seed(seed + 9))
        slots.copy_(torch.randperm(200))
        graph.replay()
        torch.cuda.synchronize()
        got = to_numpy(out), to_numpy(lse)
        want = layer()
        assert to_numpy(want[0]).tobytes() == got[0].tobytes()
        assert to_numpy(want[1]).tobytes() == got[1].tobytes()
        whole = {"q": to_numpy(q), "kv_cache": to_numpy(cache), "indices": to_numpy(indices)}
        exact = expected({**whole, **keywords})
        assert_within("out", got[0], exact.out, 2 * exact.bound_out, "bfloat16")


# --------------------------------------------------------------------------- nothing waits


def calls(cuda: Backend) -> dict[str, Callable[[], Any]]:
    """Every call that has to return before the GPU is done."""
    import torch

    held = cuda.tensors(cases.make(CASES["one_row"]))
    rows = cuda.tensors(cases.make(CASES["many_rows"]))
    parts = [sparse_mla.attend(**held) for _ in range(3)]
    numbers = torch.randn(64, 576, device="cuda")
    cache = sparse_mla.pack(numbers, cache_format="fp8_ds_mla", block_size=8)
    slots = torch.arange(64, device="cuda")
    return {
        "attend in parts": lambda: sparse_mla.attend(**{**held, "validate": "deferred"}),
        "attend": lambda: sparse_mla.attend(**rows),
        "record": lambda: sparse_mla.attend(**{**rows, "validate": "record"}),
        "merge": lambda: sparse_mla.merge([p[0] for p in parts], [p[1] for p in parts]),
        "pack": lambda: sparse_mla.pack(numbers, cache_format="fp8_ds_mla", block_size=8),
        "append": lambda: sparse_mla.append(cache, slots, numbers, cache_format="fp8_ds_mla"),
        "unpack": lambda: sparse_mla.unpack(cache, cache_format="fp8_ds_mla"),
        "plan": lambda: sparse_mla.plan(batch=1, heads=16, topk=2048, device="cuda"),
        "faults": sparse_mla.faults,
    }


@pytest.mark.parametrize("side", [False, True])
def test_no_call_waits(side: bool, cuda: Backend) -> None:
    """Each returns while what was enqueued before it still runs."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        every = calls(cuda)
        for call in every.values():  # memory is there afterwards
            call()
        torch.cuda.synchronize()
        for name, call in every.items():
            slow()
            end = torch.cuda.Event()
            end.record()
            call()
            assert not end.query(), f"{name} has waited"
            torch.cuda.synchronize()


def test_memory_is_the_framework_s(cuda: Backend) -> None:
    """Results and the planned workspace come from PyTorch's allocator and nothing is left behind;
    a capture, in which the driver allows no allocation, takes them from the graph's pool."""
    import torch

    held = cuda.tensors(cases.make(replace(CASES["one_row"], out="own", lse="given")))
    plan = sparse_mla.plan(batch=1, heads=16, topk=2048, device="cuda:0")

    def allocations() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["allocated_bytes.all.current"]

    sparse_mla.attend(**held)
    before = allocations()
    for _ in range(10):
        sparse_mla.attend(**held)
    after = allocations()
    assert after[0] - before[0] == (10 if plan["workspace_bytes"] else 0)
    assert after[1] == before[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = allocations()
        sparse_mla.attend(**held)
        after = allocations()
    assert after[0] - before[0] == (1 if plan["workspace_bytes"] else 0)
    graph.replay()
    torch.cuda.synchronize()


# --------------------------------------------------------------------------- streams


def test_two_streams_at_once(cuda: Backend) -> None:
    """Calls that are cut into parts, on two streams that run at the same time."""
    import torch

    case = CASES["one_row"]
    arguments = [cases.make(case, seed) for seed in range(2)]
    held = [cuda.tensors(each) for each in arguments]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in held]
    results: list[list[Any]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            slow(20)
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(sparse_mla.attend(**held[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert_right(arguments[i], *results[i][0])
        for out, lse in results[i]:
            assert torch.equal(out, results[i][0][0])
            assert torch.equal(lse, results[i][0][1])


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("name", ["one_row", "fp8"])
def test_behind_slow_work_on_the_current_stream(name: str, side: bool, cuda: Backend) -> None:
    """What the current stream has still to write is what the call reads, and what is enqueued
    behind the call reads its results."""
    import torch

    stale, fresh = (cases.make(CASES[name], seed) for seed in (1, 2))
    held, new = cuda.tensors(stale), cuda.tensors(fresh)
    sparse_mla.attend(**held)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        slow()
        for key, value in new.items():
            if hasattr(value, "shape"):
                held[key].copy_(value)
        out, lse = sparse_mla.attend(**held)
        copies = out.clone(), lse.clone()
        held["q"].fill_(float("nan"))
        torch.cuda.current_stream().synchronize()
        assert_right(fresh, *copies)


def handles(stream: Any) -> list[Any]:
    """The ways to name a stream."""

    class Named:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.cuda_stream

    return [stream.cuda_stream, Named(), *([stream] if hasattr(stream, "__cuda_stream__") else [])]


def test_explicit_stream(cuda: Backend) -> None:
    """The launch goes where `stream` says: behind that stream's work and, where no memory has to be
    made on the current one, not behind that one's."""
    import torch

    case = replace(CASES["one_row"], out="own", lse="given")
    stale, fresh = (cases.make(case, seed) for seed in (1, 2))
    new = cuda.tensors(fresh)
    stream = torch.cuda.Stream()
    for each in handles(stream):
        held = cuda.tensors(stale)
        sparse_mla.attend(**held)
        torch.cuda.synchronize()
        slow(400)
        current = torch.cuda.Event()
        current.record()
        with torch.cuda.stream(stream):
            slow(50)
            for key in ("q", "kv_cache", "indices"):
                held[key].copy_(new[key])
        out, lse = sparse_mla.attend(**held, stream=each)
        stream.synchronize()
        assert not current.query(), "the call ran behind the current stream"
        with torch.cuda.stream(stream):
            assert_right(fresh, out, lse)
        torch.cuda.synchronize()


def test_legacy_and_per_thread_streams(cuda: Backend) -> None:
    import torch

    arguments = cases.make(CASES["one_row"])
    held = cuda.tensors(arguments)
    torch.cuda.synchronize()
    for stream in (0, 1, 2):
        result = sparse_mla.attend(**held, stream=stream)
        torch.cuda.synchronize()
        assert_right(arguments, *result)


@pytest.mark.parametrize("what", ["workspace", "results"])
def test_memory_of_an_explicit_stream(what: str, cuda: Backend) -> None:
    """Memory that a call takes on another stream is not handed to the current one before that call
    has run, even where its results are dropped at once: what is then written there stays."""
    import torch

    plan = sparse_mla.plan(batch=1, heads=16, topk=2048, device="cuda:0")
    sizes = [max(plan["workspace_bytes"], 1)] if what == "workspace" else [16 * 512 * 2, 16 * 4]
    case = CASES["one_row"]
    if what == "workspace":
        case = replace(case, out="own", lse="given")
    held = cuda.tensors(cases.make(case))
    stream = torch.cuda.Stream()
    for _ in range(2):
        sparse_mla.attend(**held, stream=stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        slow()
    sparse_mla.attend(**held, stream=stream.cuda_stream)
    mine = [
        torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda")
        for size in sizes
        for _ in range(20)
    ]
    torch.cuda.synchronize()
    assert all((each == 0x5A).all() for each in mine)


def test_threads(cuda: Backend) -> None:
    """Eight threads with a stream each: every call has the bits of the same call alone."""
    import torch

    tensors = [cuda.tensors(cases.make(case)) for case in CASES.values()]
    want = [sparse_mla.attend(**each) for each in tensors]
    torch.cuda.synchronize()

    def work(number: int) -> bool:
        same = True
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(30):
                i = (number + turn) % len(tensors)
                got = sparse_mla.attend(**tensors[i])
                torch.cuda.current_stream().synchronize()
                same &= all(torch.equal(x, y) for x, y in zip(got, want[i], strict=True))
        return same

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    sparse_mla.synchronize()


def test_threads_with_faults(cuda: Backend) -> None:
    """Of several threads whose calls are all at fault some raise, none loses its own results, and
    nothing is left at the end."""
    import torch

    case = replace(CASES["rows"], validate="deferred", request_ids=False)
    arguments = cases.make(case)
    arguments["topk_lens"][:] = 1
    arguments["indices"][:, 0] = -5
    tensors = cuda.tensors(arguments)

    def work(number: int) -> int:
        raised = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                fault = fault_of(lambda: sparse_mla.attend(**tensors))
                if fault is not None:
                    raised += 1
                    assert_deferred_fault(fault, arguments)
        return raised

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    torch.cuda.synchronize()
    fault_of(sparse_mla.synchronize)
    sparse_mla.synchronize()


# --------------------------------------------------------------------------- faults, eager


def test_deferred_is_told_by_the_next_call(cuda: Backend) -> None:
    """By the next call of whatever arguments, before it launches; then it is forgotten."""
    import torch

    bad = cases.make(replace(CASES["rows"], validate="deferred"))
    bad["request_ids"][1] = -9
    good = cases.make(replace(CASES["fp8"], validate="deferred"))
    held = cuda.tensors(bad), cuda.tensors(good)
    result = sparse_mla.attend(**held[0])
    torch.cuda.synchronize()
    assert_right(bad, *result)
    assert sparse_mla.faults() is None
    for validate in ("mask", "record"):
        sparse_mla.attend(**{**held[1], "validate": validate})
    out = torch.full((6, 64, 512), 3, dtype=torch.bfloat16, device="cuda")
    raised = fault_of(lambda: sparse_mla.attend(**held[1], out=out))
    assert_deferred_fault(raised, bad)
    assert (raised.tensor, raised.position, raised.value) == ("request_ids", (1,), -9)
    torch.cuda.synchronize()
    assert (out == 3).all()
    assert_right(good, *sparse_mla.attend(**held[1], out=out))
    sparse_mla.synchronize()


def test_raise_is_told_at_once_and_nothing_is_written(cuda: Backend) -> None:
    """Also where the array is written by the current stream just before."""
    import torch

    case = replace(CASES["rows"], validate="raise", out="own", lse="given")
    held = cuda.tensors(cases.make(case))
    sparse_mla.attend(**held)
    held["out"].fill_(5)
    torch.cuda.synchronize()
    slow(50)
    held["request_ids"].fill_(123)
    raised = fault_of(lambda: sparse_mla.attend(**held))
    assert (raised.tensor, raised.value, raised.count, raised.exact) == (
        "request_ids",
        123,
        6,
        True,
    )
    torch.cuda.synchronize()
    assert (held["out"] == 5).all()
    sparse_mla.synchronize()
    assert sparse_mla.faults() is None
