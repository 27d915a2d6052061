"""The call that the vLLM plug-in makes, on a GPU, where vLLM itself need not be installed.

The batches and layouts of test_vllm.py, with the metadata that vLLM's builder makes of them rebuilt
by hand; and what only a GPU has: a captured graph that serves other batches of the same shape.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch
import vllm_cases

import compare
import sparse_mla
from conftest import gpu_kernels
from sparse_mla.vllm.forward import forward_mqa

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[None, *gpu_kernels()], autouse=True)
def kernel(request, monkeypatch):
    if request.param:
        monkeypatch.setenv("SPARSE_MLA_KERNEL", request.param)


def forward(step, rank=0):
    batch = step.batch
    return forward_mqa(
        step.q,
        step.caches[rank],
        step.topk_buffer,
        vllm_cases.metadata(step, rank),
        scale=vllm_cases.SCALE,
        kv_cache_dtype=batch.cache_dtype,
        dcp=(rank, batch.ranks),
    )


@pytest.mark.parametrize("name", vllm_cases.BATCHES)
def test_forward(name):
    arrays = vllm_cases.make(vllm_cases.BATCHES[name])
    out, lse = forward(vllm_cases.tensors(arrays, "cuda"))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.is_contiguous()
    want = vllm_cases.expected(arrays)
    compare.assert_close(out, lse, want)
    empty = sum(arrays.batch.queries) // 2
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    torch.cuda.synchronize()
    assert sparse_mla.faults() is None


@pytest.mark.parametrize("name", vllm_cases.SHARDED)
def test_forward_of_a_context_parallel_group(name):
    batch = vllm_cases.SHARDED[name]
    arrays = vllm_cases.make(batch)
    step = vllm_cases.tensors(arrays, "cuda")
    parts = [forward(step, rank) for rank in range(batch.ranks)]
    for rank, (out, lse) in enumerate(parts):
        compare.assert_close(out, lse, vllm_cases.expected_of_rank(arrays, rank))
    out, lse = sparse_mla.merge(*zip(*parts, strict=True))
    want = vllm_cases.expected(arrays)
    compare.assert_within("lse", compare.to_numpy(lse), want.lse, want.bound_lse)
    # the parts are rounded to bfloat16 before they are joined, and the result again
    compare.assert_within("out", compare.to_numpy(out), want.out, 2 * want.bound_out)


def copy_into(static, step):
    """What vLLM's runner does between replays: it fills the same buffers."""
    pairs = [
        (static.topk_buffer, step.topk_buffer),
        (static.tables[0], step.tables[0]),
        (static.seq_lens, step.seq_lens),
        (static.request, step.request),
        (static.caches[0], step.caches[0]),
        *zip(static.q, step.q, strict=True),
    ]
    for target, source in pairs:
        target.copy_(source)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_a_captured_graph_serves_padded_uniform_batches(cache_dtype):
    """Requests of two tokens each; a request that ends leaves its place to padding: no tokens, a
    length of 0, and rows of request 0 with whatever the buffer held."""
    full = vllm_cases.Batch((70, 3, 400), (2, 2, 2), cache_dtype=cache_dtype)
    steps = [vllm_cases.make(full, seed) for seed in (1, 2)]
    ended = vllm_cases.make(full, 3)
    ended.seq_lens[2] = 0
    ended.request[4:] = 0
    steps.append(ended)
    static = vllm_cases.tensors(steps[0], "cuda")
    sparse_mla.load("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = forward(static)
    for arrays in steps:
        copy_into(static, vllm_cases.tensors(arrays, "cuda"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        compare.assert_close(out, lse, vllm_cases.expected(arrays))
    assert sparse_mla.faults() is None


def test_a_fault_is_masked_and_waits_in_the_record():
    arrays = vllm_cases.make(vllm_cases.BATCHES["decode"])
    arrays.topk_buffer[0, 0] = -7
    out, lse = forward(vllm_cases.tensors(arrays, "cuda"))
    compare.assert_close(out, lse, vllm_cases.expected(arrays))
    torch.cuda.synchronize()
    fault = sparse_mla.faults()
    assert fault is not None
    assert str(fault).startswith("indices[0, 0] = -7 ")
    assert sparse_mla.faults() is None
