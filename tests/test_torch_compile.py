"""attend in a compiled function: the operators, their fakes, and the same numbers as without."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import numpy as np
import pytest

import sparse_mla

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("sparse_mla.torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = ["eager", "aot_eager"]
if shutil.which("g++"):
    BACKENDS.append("inductor")

# Inductor's own, at import and in its workers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend_for(backend: str, device: str) -> str:
    if backend == "inductor" and device == "cuda" and not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    return backend


def problem(device, tokens=3, heads=4, topk=5, slots=16, width=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, width, generator=generator)
    cache = torch.randn(slots // 2, 2, width, generator=generator)
    indices = torch.randint(-1, slots, (tokens, topk), generator=generator, dtype=torch.int32)
    return q.to(device, dtype), cache.to(device, dtype), indices.to(device)


def same(results, expected) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def layer(q, cache, indices, scale=0.5):
    out, lse = sparse_mla.attend(q + q, cache, indices, softmax_scale=scale, head_dim_v=4)
    return out * 2, lse.exp()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_graph(backend, device):
    compiled = torch.compile(layer, fullgraph=True, backend=backend_for(backend, device))
    arguments = problem(device)
    same(compiled(*arguments), layer(*arguments))
    same(compiled(*arguments, 0.25), layer(*arguments, 0.25))


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes(device):
    """One graph for every number of rows, entries and slots."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for tokens, topk, slots in [(3, 5, 22), (7, 9, 32), (30, 6, 64)]:
        arguments = problem(device, tokens, 4, topk, slots)
        same(compiled(*arguments), layer(*arguments))
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert "sparse_mla.attend" in targets


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", ["out lse max_logits", "out", "lse", "max_logits"])
def test_outputs_that_are_given(backend, device, given):
    if given != "out lse max_logits" and backend == "inductor":
        pytest.skip("one case is enough")
    q, cache, indices = problem(device)

    def layer(q, cache, indices, outputs):
        out, lse = sparse_mla.attend(q, cache, indices, softmax_scale=0.5, head_dim_v=4, **outputs)
        return out + 1, lse + 1

    def outputs():
        made = {
            "out": torch.zeros(3, 4, 4, device=device),
            "lse": torch.zeros(3, 4, device=device),
            "max_logits": torch.zeros(3, 4, device=device),
        }
        return {name: made[name] for name in given.split()}

    expected, results = outputs(), outputs()
    wanted = layer(q, cache, indices, expected)
    compiled = torch.compile(layer, fullgraph=True, backend=backend_for(backend, device))
    same(compiled(q, cache, indices, results), wanted)
    same(results.values(), expected.values())


@pytest.mark.parametrize("device", DEVICES)
def test_every_argument_passes(device):
    """A pair for q, a block table with everything that needs one, a sink, an extra cache."""
    q, cache, indices = problem(device, tokens=2, slots=64, topk=16)
    arguments = {
        "block_table": torch.arange(32, device=device, dtype=torch.int32).reshape(2, 16),
        "request_ids": torch.tensor([1, 0], device=device),
        "seq_lens": torch.tensor([30, 50], device=device, dtype=torch.int32),
        "query_positions": torch.tensor([20, 25], device=device),
        "topk_lens": torch.tensor([16, 12], device=device),
        "attn_sink": torch.tensor([0.0, 1.0, -1.0, 5.0], device=device),
        "extra_kv_cache": cache.flip(0).contiguous(),
        "extra_indices": indices.flip(1).contiguous(),
        "extra_topk_lens": torch.tensor([3, 16], device=device),
    }

    def layer(latent, rope, cache, indices, **arguments):
        return sparse_mla.attend(
            (latent, rope),
            cache,
            indices,
            softmax_scale=0.5,
            head_dim_v=4,
            logit_cap=30.0,
            shard=(0, 2, 2),
            batch_invariant=True,
            validate="mask",
            **arguments,
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parts = q[..., :6], q[..., 6:]
    same(compiled(*parts, cache, indices, **arguments), layer(*parts, cache, indices, **arguments))


def test_without_indices_and_head_dim_v():
    q, cache, _ = problem("cpu", tokens=2, heads=2, slots=32, width=576, dtype=torch.bfloat16)
    table = torch.arange(16, dtype=torch.int32).reshape(2, 8)
    lens = torch.tensor([5, 16], dtype=torch.int32)

    def layer(q, cache, table, lens):
        return sparse_mla.attend(
            q, cache, None, softmax_scale=0.1, block_table=table, seq_lens=lens, max_seq_len=16
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = compiled(q, cache, table, lens)
    assert results[0].shape == (2, 2, 512)
    same(results, layer(q, cache, table, lens))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device, dtype):
    q, cache, indices = problem(device, dtype=dtype)
    keywords = {"softmax_scale": 0.5, "head_dim_v": 4}
    operators = torch.ops.sparse_mla
    torch.library.opcheck(operators.attend, (q, None, cache, indices), keywords)
    pair = (q[..., :6], q[..., 6:], cache, indices)
    sink = {"attn_sink": torch.zeros(4, device=device)}
    torch.library.opcheck(operators.attend, pair, keywords | sink)
    outputs = {
        "out": torch.zeros(3, 4, 4, device=device, dtype=dtype),
        "lse": torch.zeros(3, 4, device=device),
    }
    torch.library.opcheck(operators.attend_out, (q, None, cache, indices), keywords | outputs)
    outputs["max_logits"] = torch.zeros(3, 4, device=device)
    torch.library.opcheck(operators.attend_out, (q, None, cache, indices), keywords | outputs)


def test_shapes_of_the_fakes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(5, 2, 16, 576, dtype=torch.bfloat16)
        cache = torch.empty(8, 64, 576, dtype=torch.bfloat16)
        indices = torch.empty(5, 2, 128, dtype=torch.int32)
        out, lse = torch.ops.sparse_mla.attend(q, None, cache, indices, softmax_scale=1.0)
        assert (out.shape, out.dtype) == ((5, 2, 16, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((5, 2, 16), torch.float32)
        parts = q[..., :512], q[..., 512:]
        out, _ = torch.ops.sparse_mla.attend(*parts, cache, indices, softmax_scale=1.0)
        assert out.shape == (5, 2, 16, 512)
        with pytest.raises(ValueError, match=r"head_dim_v: required .* d_qk = 512|d_qk = 64"):
            torch.ops.sparse_mla.attend(
                q[..., :64], None, cache[..., :64], indices, softmax_scale=1.0
            )


def test_errors_name_their_cause():
    q, cache, indices = problem("cpu")
    gradient = q.clone().requires_grad_()
    with pytest.raises(BufferError, match=r"requires grad.*no gradient.*detach"):
        torch.ops.sparse_mla.attend(gradient, None, cache, indices, softmax_scale=1.0)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"requires grad.*no gradient"):
        compiled(gradient, cache, indices)
    with torch.no_grad():
        same(compiled(gradient, cache, indices), layer(q, cache, indices))

    def on_a_stream(q, cache, indices):
        return sparse_mla.attend(q, cache, indices, softmax_scale=1.0, head_dim_v=4, stream=3)

    with pytest.raises(Exception, match=r"stream: expected None in a compiled function"):
        torch.compile(on_a_stream, fullgraph=True, backend="eager")(q, cache, indices)

    bad = indices.clone()
    bad[1, 2] = 99
    with pytest.raises(sparse_mla.IndexFault, match=r"indices\[1, 2\] = 99"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q, cache, bad)


def test_eager_calls_go_to_c():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(str(function))
            return function(*arguments, **(keywords or {}))

    assert sparse_mla.attend is sparse_mla._core.attend
    q, cache, indices = problem("cpu")
    with Watch():
        sparse_mla.attend(q, cache, indices, softmax_scale=0.5, head_dim_v=4)
        assert not [name for name in seen if "sparse_mla" in name]
        torch.ops.sparse_mla.attend(q, None, cache, indices, softmax_scale=0.5, head_dim_v=4)
    assert "sparse_mla.attend.default" in seen


def test_the_package_does_not_register_by_itself():
    code = (
        "import torch, sparse_mla\n"
        "print(hasattr(torch.ops.sparse_mla, 'attend'))\n"
        "import sparse_mla.torch\n"
        "print(hasattr(torch.ops.sparse_mla, 'attend'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's own, to begin with
def test_cuda_graphs_of_the_compiler():
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        arguments = problem("cuda", topk=2048, slots=4096, seed=seed)
        results = [each.clone() for each in compiled(*arguments)]
        np.testing.assert_allclose(
            results[0].cpu(), layer(*arguments)[0].cpu(), rtol=1e-6, atol=1e-6
        )
