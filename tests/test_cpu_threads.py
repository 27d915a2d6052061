"""What CPU calls must not depend on: the caller's floating-point mode, forks, other threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cases
import sparse_mla

SMALL = cases.make(cases.Case(main=cases.SMALL))


def subnormal_problem() -> dict:
    """A cache whose e4m3 bytes are all subnormal: a thread that flushes them sees zeros."""
    rng = np.random.default_rng(0)
    cache = np.zeros((64, 1, 656), np.uint8)
    cache[..., :512] = rng.integers(0, 8, (64, 1, 512))
    cache[..., 512:528] = np.full((64, 1, 4), 2.0**6, np.float32).view(np.uint8)
    return {
        "q": rng.standard_normal((2, 4, 576), np.float32),
        "kv_cache": cache,
        "indices": rng.integers(0, 64, (2, 64), np.int32),
        "softmax_scale": 1 / 16,
        "cache_format": "fp8_ds_mla",
    }


def test_flushing_of_subnormal_numbers() -> None:
    torch = pytest.importorskip("torch")
    problem = subnormal_problem()
    out, lse = sparse_mla.attend(**problem)
    assert np.abs(out).min() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        again = sparse_mla.attend(**problem)
        still = torch.tensor([1e-42]) + 0
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(again[0], out)
    np.testing.assert_array_equal(again[1], lse)
    assert still.item() == 0, "the caller's mode was not put back"


def test_threads_at_once() -> None:
    """Callers that find the threads of the pool taken get the same bits."""
    out, lse = sparse_mla.attend(**SMALL)
    with ThreadPoolExecutor(8) as pool:
        for again in pool.map(lambda _: sparse_mla.attend(**SMALL), range(64)):
            np.testing.assert_array_equal(again[0], out)
            np.testing.assert_array_equal(again[1], lse)


FORK = """
import os, sys
import numpy as np, sparse_mla
rng = np.random.default_rng(0)
q = rng.standard_normal((64, 16, 576), np.float32)
cache = rng.standard_normal((512, 576), np.float32)
indices = rng.integers(0, 512, (64, 512), np.int32)
call = lambda: sparse_mla.attend(q, cache, indices, softmax_scale=1 / 16)[0]
first = call()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(call(), first) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(call(), first)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_fork_after_the_first_call() -> None:
    environment = os.environ | {"SPARSE_MLA_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60, env=environment)
