"""The kernel with tile instructions (cpu_amx): head counts and entry counts at its borders, what it
refuses, and what a process that has used it may do afterwards.

A call of few heads leaves it to another kernel, so the table of cases is run here with more."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest

import cases
import sparse_mla
from cases import Case, Source
from compare import check_call
from conftest import cpu_kernels

RUNS = "cpu_amx" in cpu_kernels()
needs_amx = pytest.mark.skipif(not RUNS, reason="this machine has no AMX")

FORMATS = ("dense", "fp8_ds_mla", "fp8_ds_mla_norope", "fp8_tensor")


@pytest.fixture(autouse=True)
def force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_KERNEL", "cpu_amx")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
def test_is_listed_first() -> None:
    kernels = sparse_mla.build_info()["cpu_kernels"]
    assert kernels[0] == {
        "name": "cpu_amx",
        "isa": "AMX TILE, BF16 and AVX-512 F, BW, VL, DQ, BF16",
        "runs": RUNS,
    }


@pytest.mark.skipif(RUNS, reason="this machine has AMX")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
def test_is_refused_without_the_instructions() -> None:
    with pytest.raises(sparse_mla.UnsupportedError, match="cpu_amx needs AMX TILE, BF16"):
        sparse_mla.attend(**cases.make(Case(main=cases.SMALL)))


@needs_amx
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_case_of_more_heads(case: Case) -> None:
    check_call(cases.make(replace(case, heads=max(case.heads, 9)), seed=5))


@needs_amx
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("heads", [8, 15, 16, 17, 31, 32, 33, 48, 64, 127, 128, 129, 256])
def test_heads(heads: int, cache_format: str) -> None:
    """Whole and broken tiles of heads, in one and in several tasks, flat and peaked."""
    for topk, spread in ((40, 8.0), (700, 1.0)):
        main = Source(cache_format, topk=topk, num_blocks=60, padding=0)
        width = 512 if cache_format == "fp8_ds_mla_norope" else 576
        case = Case(leading=(2,), heads=heads, d_qk=width, spread=spread, main=main)
        check_call(cases.make(case, seed=heads))


@needs_amx
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("entries", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 257])
def test_entries(entries: int, cache_format: str) -> None:
    """Whole and broken steps and blocks of entries; what fills them up does not count."""
    main = Source(cache_format, topk=entries, num_blocks=20, padding=0)
    width = 512 if cache_format == "fp8_ds_mla_norope" else 576
    for heads in (8, 24):
        check_call(cases.make(Case(heads=heads, d_qk=width, main=main), seed=entries))


@needs_amx
@pytest.mark.parametrize(
    ("d_qk", "d_v"), [(1, 1), (31, 7), (32, 32), (33, 33), (100, 70), (700, 600)]
)
def test_widths(d_qk: int, d_v: int) -> None:
    check_call(cases.make(Case(heads=20, d_qk=d_qk, d_v=d_v, main=Source(topk=150, num_blocks=20))))


@needs_amx
@pytest.mark.parametrize("cache_format", ["dense", "fp8_ds_mla"])
@pytest.mark.parametrize("copies", [2048, 200_000])
def test_copies(copies: int, cache_format: str) -> None:
    """A weight rounded to one bfloat16 number would err alike in all copies of an entry."""
    main = Source(cache_format, topk=copies, num_blocks=2, padding=0)
    arguments = cases.make(Case(leading=(1,), heads=16, out="float32", main=main))
    arguments["indices"][:] = 3
    arguments["indices"][:, : copies // 3] = 11
    arguments["indices"][:, 1::7] = 5
    check_call(arguments)


FORK = """
import os
import ml_dtypes, numpy as np, sparse_mla
rng = np.random.default_rng(0)
q = rng.standard_normal((8, 16, 576), np.float32).astype(ml_dtypes.bfloat16)
cache = rng.standard_normal((512, 576), np.float32).astype(ml_dtypes.bfloat16)
indices = rng.integers(0, 512, (8, 512), np.int32)
call = lambda: sparse_mla.attend(q, cache, indices, softmax_scale=1 / 16)[0].tobytes()
first = call()
child = os.fork()
if child == 0:
    os._exit(0 if call() == first else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert call() == first
"""


@needs_amx
def test_fork_after_the_first_call() -> None:
    """A child may use the tile registers that its parent was granted."""
    environment = os.environ | {"SPARSE_MLA_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60, env=environment)


@needs_amx
def test_among_pytorch_products() -> None:
    """PyTorch's own products use the same registers on the same thread."""
    torch = pytest.importorskip("torch")
    arguments = cases.make(Case(heads=16, main=Source(topk=200, num_blocks=20, padding=0)))
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(2))
    product, result = a @ b, sparse_mla.attend(**arguments)[0].tobytes()
    for _ in range(3):
        assert torch.equal(a @ b, product)
        assert sparse_mla.attend(**arguments)[0].tobytes() == result
