"""Threads that call at once, interpreters beside the main one, and forks.

The core without Python has tests/threads.c, which runs under ThreadSanitizer.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sparse_mla
from capsules import Producer

THREADS = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(seed: int, tokens: int = 3, heads: int = 4, topk: int = 40):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((tokens, heads, 24), np.float32),
        "kv_cache": rng.standard_normal((16, 4, 24), np.float32),
        "indices": rng.integers(-1, 64, (tokens, topk)).astype(np.int32),
        "softmax_scale": 0.5,
        "head_dim_v": 16,
    }


def at_once(work, count: int = THREADS) -> list:
    """What work(i) returns in `count` threads that begin together."""
    start = threading.Barrier(count)

    def begin(i: int):
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(begin, i) for i in range(count)]]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_are_those_of_one_thread():
    problems = [problem(seed, tokens=1 + seed) for seed in range(THREADS)]
    wanted = [sparse_mla.attend(**each) for each in problems]

    def work(i: int) -> bool:
        for j in range(40):
            k = (i + j) % THREADS
            out, lse = sparse_mla.attend(**problems[k])
            if not (np.array_equal(out, wanted[k][0]) and np.array_equal(lse, wanted[k][1])):
                return False
        return True

    assert all(at_once(work))


def test_every_function_at_once():
    rows = np.random.default_rng(1).standard_normal((50, 576), np.float32)
    cache = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=8)
    numbers = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
    given = problem(5)
    out, lse = sparse_mla.attend(**given)
    merged = sparse_mla.merge([out, out], [lse, lse])

    def pack() -> None:
        again = sparse_mla.pack(rows, cache_format="fp8_ds_mla", block_size=8)
        np.testing.assert_array_equal(again, cache)

    def unpack() -> None:
        again = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
        np.testing.assert_array_equal(again, numbers)

    def merge() -> None:
        again = sparse_mla.merge([out, out], [lse, lse])
        np.testing.assert_array_equal(again[0], merged[0])

    def append() -> None:
        own = np.zeros((8, 4, 24), np.float32)
        slots = np.arange(3)
        sparse_mla.append(own, slots, given["q"][:, 0], cache_format="dense")
        np.testing.assert_array_equal(own.reshape(32, 24)[:3], given["q"][:, 0])

    def check() -> None:
        report = sparse_mla.check(given["kv_cache"], given["indices"])
        assert not report.faults

    works = [pack, unpack, merge, append, check, lambda: sparse_mla.attend(**given)]

    def work(i: int) -> None:
        for j in range(15):
            works[(i + j) % len(works)]()

    at_once(work)


def test_faults_reach_the_thread_that_made_them():
    good, bad = problem(1), problem(1)
    bad["indices"] = bad["indices"].copy()
    bad["indices"][1, 2] = 99

    def work(i: int) -> int:
        raised = 0
        for _ in range(40):
            try:
                sparse_mla.attend(**(bad if i % 2 else good))
            except sparse_mla.IndexFault as fault:
                assert fault.position == (1, 2)
                raised += 1
        return raised

    assert at_once(work) == [0, 40] * (THREADS // 2)


def test_a_recorded_fault_is_taken_once():
    bad = problem(1)
    bad["indices"] = bad["indices"].copy()
    bad["indices"][0, 0] = 99
    for _ in range(20):
        sparse_mla.attend(**bad, validate="record")
        taken = at_once(lambda i: sparse_mla.faults("cpu"))
        assert sum(fault is not None for fault in taken) == 1


def test_first_calls_at_once():
    """What is found out once about types and frameworks is found out by all of them."""
    code = """
import threading
import numpy as np
import sparse_mla
from concurrent.futures import ThreadPoolExecutor

start = threading.Barrier(8)
q = np.ones((1, 1, 8), np.float32)

def work(i):
    start.wait()
    out, _ = sparse_mla.attend(q, q, np.zeros((1, 1), np.int32), softmax_scale=1.0, head_dim_v=4)
    return bool((out == 1).all())

with ThreadPoolExecutor(8) as pool:
    print(all(pool.map(work, range(8))))
"""
    assert run_python(code) == "True\n"


def test_tensors_of_new_types_at_once():
    given = problem(2)
    wanted = sparse_mla.attend(**given)

    def work(i: int) -> bool:
        kinds = [type(f"Kind{i}_{j}", (Producer,), {}) for j in range(6)]
        for j in range(30):
            names = ("q", "kv_cache", "indices")
            tensors = {name: kinds[(j + k) % 6](given[name]) for k, name in enumerate(names)}
            out, _ = sparse_mla.attend(**(given | tensors))
            if not np.array_equal(out, wanted[0]):
                return False
        return True

    assert all(at_once(work))


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_tensors_at_once(device):
    torch = pytest.importorskip("torch")
    problems = [problem(seed, topk=400) for seed in range(THREADS)]
    for each in problems:
        for name in ("q", "kv_cache", "indices"):
            each[name] = torch.from_numpy(each[name]).to(device)
    wanted = [sparse_mla.attend(**each) for each in problems]
    if device == "cuda":
        torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream() if device == "cuda" else None
        same = True
        for j in range(30):
            k = (i + j) % THREADS
            with torch.cuda.stream(stream):
                out, lse = sparse_mla.attend(**problems[k])
                same &= bool(torch.equal(out, wanted[k][0]) and torch.equal(lse, wanted[k][1]))
        return same

    assert all(at_once(work))


def test_other_work_runs_meanwhile():
    """The GIL is released while the CPU kernel runs."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((64, 64, 576), np.float32)
    cache = rng.standard_normal((4096, 576), np.float32)
    indices = rng.integers(0, 4096, (64, 2048)).astype(np.int32)
    ticks, done = 0, threading.Event()

    def call() -> None:
        sparse_mla.attend(q, cache, indices, softmax_scale=0.1)
        done.set()

    thread = threading.Thread(target=call)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3


SUBINTERPRETER = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
import sparse_mla

def refused(interpreter):
    code = '''
try:
    import sparse_mla
except ImportError as error:
    print(error, flush=True)
'''
    # Up to 3.12 what fails in there is raised here; from 3.13 on it is returned.
    assert not interpreters.run_string(interpreter, code)

interpreter = interpreters.create()
refused(interpreter)
interpreters.destroy(interpreter)
import numpy as np
print(sparse_mla.unpack(np.ones((2, 8), np.float32)).sum())
"""


def test_subinterpreters_are_refused():
    said = run_python(SUBINTERPRETER).splitlines()
    # By this package, or from 3.12 on by Python itself where the interpreter has its own GIL.
    assert said[0] in (
        "sparse_mla: expected the main interpreter, got a subinterpreter",
        "module sparse_mla._core does not support loading in subinterpreters",
    )
    assert said[-1] == "16.0"


def test_forked_processes_compute():
    """The threads of the CPU kernels are not there in a fork, and are started anew."""
    code = """
import os
import numpy as np
import sparse_mla

rng = np.random.default_rng(0)
q = rng.standard_normal((32, 16, 64), np.float32)
cache = rng.standard_normal((512, 64), np.float32)
indices = rng.integers(0, 512, (32, 256)).astype(np.int32)

def call():
    return sparse_mla.attend(q, cache, indices, softmax_scale=0.1, head_dim_v=32)[0]

first = call()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(call(), first) else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), np.array_equal(call(), first))
"""
    assert run_python(f"import warnings\nwarnings.simplefilter('ignore')\n{code}") == "0 True\n"


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="a Python with the GIL")
def test_a_free_threaded_python_stays_free():
    assert not sys._is_gil_enabled()
