"""The vLLM plug-in against vLLM itself: its registry, selector, metadata builder and MLA layer.

Runs where vLLM is installed; tools/run_vllm_tests.py makes an environment in which it is, beside a
PyTorch for the CPU. Tensors are laid out as vLLM lays them out and live on the CPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed (tools/run_vllm_tests.py runs these tests with it)",
        allow_module_level=True,
    )

import torch
import vllm
import vllm_cases
import vllm_platform
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import compare
import sparse_mla
import sparse_mla.vllm
from sparse_mla import reference
from sparse_mla.vllm import backend as plugin

NOPE, V = 16, 24  # of a head before the latent and after it, in the layers of these tests
GPUS = ["9.0", "10.0", "12.0", "12.1"]
NO_INDEXER = ["8.0", "8.6", "8.9"]


def choose_gpu(capability):
    major, minor = capability.split(".")
    vllm_platform.Platform.capability = DeviceCapability(int(major), int(minor))
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """Hopper, a build with GPU kernels, and DeepGEMM at hand, unless a test says otherwise; and
    nothing registered that another test has."""
    info = sparse_mla.build_info() | {"gpu_kernels": ["any_attend"]}
    monkeypatch.setattr(sparse_mla, "build_info", lambda: info)
    monkeypatch.setattr(plugin, "has_deep_gemm", lambda: True)
    for name in ("SPARSE_MLA_VLLM", "SPARSE_MLA_VLLM_INDEXER"):
        monkeypatch.delenv(name, raising=False)
    for slot in AttentionBackendEnum:
        slot.clear_override()
    choose_gpu("9.0")


def engine_config(backend="CUSTOM", **parallel):
    config = VllmConfig(attention_config=AttentionConfig(backend=backend))
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return config


def select(config=None, **changes):
    """The backend that vLLM selects for a layer."""
    question = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "use_mla": True,
        "use_sparse": True,
        "num_heads": 8,
    }
    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(config or engine_config()):
        return selector.get_attn_backend(**(question | changes))


# ------------------------------------------------------------------------------ registration


def test_vllm_finds_the_plugin():
    from vllm.plugins import load_plugins_by_group

    try:
        importlib.metadata.distribution("sparse-mla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sparse_mla is imported from a directory and not installed")
    plugins = load_plugins_by_group("vllm.general_plugins")
    assert plugins["sparse_mla"] is sparse_mla.vllm.register


def test_register_makes_it_custom_and_nothing_else():
    before = [slot.get_path() for slot in AttentionBackendEnum if slot.value]
    sparse_mla.vllm.register()
    sparse_mla.vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is plugin.SparseMlaBackend
    assert [slot.get_path() for slot in AttentionBackendEnum if slot.value] == before


def test_custom_of_another_plugin_stays(caplog_vllm):
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    sparse_mla.vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.plugin.Backend"
    assert "another.plugin.Backend, of another plug-in" in caplog_vllm.text


@pytest.fixture
def caplog_vllm(caplog):
    """What vLLM's loggers say; where vLLM configures them, they do not hand on to the root."""
    logger = logging.getLogger("vllm")
    caplog.set_level(logging.INFO, logger="vllm")
    if not logger.propagate:
        logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# ------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize("head_size", [576, 512])
@pytest.mark.parametrize("gpu", GPUS)
def test_selected_as_custom(gpu, head_size, kv_cache_dtype):
    choose_gpu(gpu)
    sparse_mla.vllm.register()
    for heads in (1, 5, 8, 128):
        chosen = select(head_size=head_size, kv_cache_dtype=kv_cache_dtype, num_heads=heads)
        assert chosen is plugin.SparseMlaBackend


@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_selected_with_a_block_size(block_size):
    sparse_mla.vllm.register()
    config = engine_config()
    config.cache_config.block_size = block_size
    config.cache_config.user_specified_block_size = True
    assert select(config) is plugin.SparseMlaBackend


def test_selected_under_decode_context_parallelism():
    sparse_mla.vllm.register()
    config = engine_config(decode_context_parallel_size=2, tensor_parallel_size=2)
    assert select(config) is plugin.SparseMlaBackend


@pytest.mark.parametrize(
    ("gpu", "changes", "reason"),
    [
        ("9.0", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: use fp8_ds_mla"),
        ("9.0", {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype fp8_e4m3: use fp8_ds_mla"),
        ("9.0", {"kv_cache_dtype": "float16"}, "kv_cache_dtype float16: use auto"),
        ("9.0", {"head_size": 192}, "head_size not supported"),
        ("9.0", {"dtype": torch.float16}, "dtype not supported"),
        ("9.0", {"use_sparse": False}, "non-sparse not supported"),
        ("9.0", {"use_mla": False}, "non-MLA not supported"),
        ("9.0", {"has_sink": True}, "attention sinks not supported"),
        ("7.5", {}, "compute capability not supported"),
        *(
            (gpu, {}, f"DeepGEMM, which has no kernels for compute capability {gpu}")
            for gpu in NO_INDEXER
        ),
    ],
)
def test_a_refusal_names_the_property(gpu, changes, reason):
    choose_gpu(gpu)
    sparse_mla.vllm.register()
    with pytest.raises(ValueError, match="CUSTOM is not valid") as refused:
        select(**changes)
    assert reason in str(refused.value)
    # and no more than that: the other properties are as they can be served
    assert str(refused.value).count(" not supported") <= 1


def test_refused_block_size():
    sparse_mla.vllm.register()
    config = engine_config()
    config.cache_config.block_size = 48
    config.cache_config.user_specified_block_size = True
    with pytest.raises(ValueError, match="block_size not supported"):
        select(config)


def test_refused_prefill_context_parallelism():
    sparse_mla.vllm.register()
    with pytest.raises(ValueError, match="PCP not supported"):
        select(engine_config(prefill_context_parallel_size=2))


def test_refused_cache_in_host_memory():
    sparse_mla.vllm.register()
    config = engine_config()
    config.attention_config.hisparse_config = SimpleNamespace()
    with pytest.raises(ValueError, match="hisparse_config: a cache in host memory"):
        select(config)


def test_refused_latent_of_another_width():
    sparse_mla.vllm.register()
    config = engine_config()
    config.model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(kv_lora_rank=448), rswa_window=None
    )
    with pytest.raises(ValueError, match="kv_lora_rank 448: expected 512"):
        select(config, head_size=512)


def test_refused_without_gpu_kernels_and_without_deep_gemm(monkeypatch):
    sparse_mla.vllm.register()
    info = sparse_mla.build_info() | {"gpu_kernels": []}
    monkeypatch.setattr(sparse_mla, "build_info", lambda: info)
    monkeypatch.setattr(plugin, "has_deep_gemm", lambda: False)
    with pytest.raises(ValueError) as refused:
        select()
    assert "this build of sparse_mla has no GPU kernels" in str(refused.value)
    assert "needs DeepGEMM, which cannot be imported" in str(refused.value)


@pytest.mark.parametrize("gpu", NO_INDEXER)
def test_an_indexer_of_ones_own_is_not_looked_at(gpu, monkeypatch):
    choose_gpu(gpu)
    monkeypatch.setenv("SPARSE_MLA_VLLM_INDEXER", "own")
    sparse_mla.vllm.register()
    assert select() is plugin.SparseMlaBackend


# ------------------------------------------------------------------------------ the switch


def taken_slots():
    return [slot.name for slot in AttentionBackendEnum if slot.is_overridden()]


@pytest.mark.parametrize("gpu", NO_INDEXER)
def test_auto_takes_a_slot_where_vllm_has_no_backend(gpu, monkeypatch):
    choose_gpu(gpu)
    monkeypatch.setenv("SPARSE_MLA_VLLM", "auto")
    monkeypatch.setenv("SPARSE_MLA_VLLM_INDEXER", "own")
    sparse_mla.vllm.register()
    sparse_mla.vllm.register()
    assert len(taken_slots()) == 2
    assert select(engine_config(None)) is plugin.SparseMlaBackend


@pytest.mark.parametrize("gpu", NO_INDEXER)
def test_auto_does_not_hide_that_the_indexer_is_missing(gpu, monkeypatch):
    choose_gpu(gpu)
    monkeypatch.setenv("SPARSE_MLA_VLLM", "auto")
    sparse_mla.vllm.register()
    with pytest.raises(ValueError, match=r"No valid attention backend .*\[indexer: vLLM's"):
        select(engine_config(None))


@pytest.mark.parametrize("gpu", GPUS)
def test_auto_leaves_vllms_own_backends(gpu, monkeypatch, caplog_vllm):
    choose_gpu(gpu)
    monkeypatch.setenv("SPARSE_MLA_VLLM", "auto")
    sparse_mla.vllm.register()
    assert taken_slots() == ["CUSTOM"]
    assert "SPARSE_MLA_VLLM=auto: vLLM has " in caplog_vllm.text


@pytest.mark.parametrize("gpu", GPUS)
def test_always_takes_a_slot_everywhere(gpu, monkeypatch):
    choose_gpu(gpu)
    monkeypatch.setenv("SPARSE_MLA_VLLM", "always")
    sparse_mla.vllm.register()
    assert len(taken_slots()) == 2
    if gpu != "10.0":  # there vLLM loads a backend first that takes GPU memory when imported
        assert select(engine_config(None)) is plugin.SparseMlaBackend


def test_a_vllm_without_a_list_of_slots_is_told_so(monkeypatch, caplog_vllm):
    from vllm.platforms import cuda

    monkeypatch.setenv("SPARSE_MLA_VLLM", "auto")
    monkeypatch.delattr(cuda, "_get_backend_priorities")
    sparse_mla.vllm.register()
    assert taken_slots() == ["CUSTOM"]
    assert "this vLLM does not tell which backends it tries" in caplog_vllm.text


def test_off_takes_none_and_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "off")
    sparse_mla.vllm.register()
    assert taken_slots() == ["CUSTOM"]
    monkeypatch.setenv("SPARSE_MLA_VLLM", "yes")
    with pytest.raises(ValueError, match="SPARSE_MLA_VLLM: expected off, auto, always, got 'yes'"):
        sparse_mla.vllm.register()


# ------------------------------------------------------------------------------ a layer


class Step:
    """The tensors of a batch, a layer that vLLM has made, and vLLM's builder of metadata for it."""

    def __init__(self, batch, seed=0, rank=0):
        self.batch = batch
        self.arrays = vllm_cases.make(batch, seed)
        self.tensors = vllm_cases.tensors(self.arrays)
        self.rank = rank
        sparse_mla.vllm.register()
        self.config = engine_config(cp_kv_cache_interleave_size=batch.interleave)
        self.config.cache_config.cache_dtype = batch.cache_dtype
        self.config.model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=4096,
            hf_text_config=SimpleNamespace(
                index_topk=batch.topk,
                q_lora_rank=64,
                kv_lora_rank=512,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=batch.rope,
                v_head_dim=V,
            ),
            model_arch_config=SimpleNamespace(total_num_attention_heads=batch.heads),
            get_num_attention_heads=lambda parallel_config: batch.heads,
            rswa_window=None,
        )
        with set_current_vllm_config(self.config):
            self.layer = self.make_layer()
            self.builder = self.make_builder()
        self.layer.impl.dcp_rank, self.layer.impl.dcp_world_size = rank, batch.ranks

    def make_layer(self):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return MLAAttention(
                num_heads=self.batch.heads,
                scale=vllm_cases.SCALE,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=self.batch.rope,
                v_head_dim=V,
                q_lora_rank=64,
                kv_lora_rank=512,
                kv_b_proj=torch.nn.Linear(512, self.batch.heads * (NOPE + V), bias=False),
                cache_config=self.config.cache_config,
                prefix="model.layers.0.self_attn.attn",
                use_sparse=True,
                indexer=SimpleNamespace(topk_indices_buffer=self.tensors.topk_buffer),
                topk_indices_buffer=self.tensors.topk_buffer,
            )
        finally:
            torch.set_default_dtype(default)

    def make_builder(self):
        spec = self.layer.get_kv_cache_spec(self.config)
        assert isinstance(spec, MLAAttentionSpec)
        builder = self.layer.get_attn_backend().get_builder_cls()
        return builder(spec, [self.layer.layer_name], self.config, torch.device("cpu"))

    def common(self):
        """What vLLM's runner hands to every builder."""
        step, batch = self.tensors, self.batch
        requests = len(batch.queries)
        values = {
            "query_start_loc": step.query_start_loc,
            "query_start_loc_cpu": step.query_start_loc,
            "seq_lens": step.seq_lens,
            "num_reqs": requests,
            "num_actual_tokens": len(step.request),
            "max_query_len": max(batch.queries),
            "max_seq_len": int(step.seq_lens.max()),
            "block_table_tensor": step.tables[self.rank],
            "slot_mapping": step.slot_mapping,
            "seq_lens_cpu_upper_bound": step.seq_lens,
        }
        common = CommonAttentionMetadata(**values)
        if hasattr(common, "_token_to_req_indices_cache"):
            # Its GPU kernel fills this; the field is vLLM's own, for builders to share.
            common._token_to_req_indices_cache = step.request
        return common

    def metadata(self):
        return self.builder.build(0, self.common())

    def forward(self):
        return self.layer.impl.forward_mqa(
            self.tensors.q, self.tensors.caches[self.rank], self.metadata(), self.layer
        )


def test_the_layer_is_made_with_the_backend():
    step = Step(vllm_cases.BATCHES["decode"])
    impl = step.layer.impl
    assert type(impl) is plugin.SparseMlaImpl
    assert step.layer.get_attn_backend() is plugin.SparseMlaBackend
    assert step.layer.prefill_backend is None
    assert impl.topk_indices_buffer is step.tensors.topk_buffer
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e
    assert type(step.builder) is plugin.SparseMlaMetadataBuilder
    support = step.builder.get_cudagraph_support(step.config, step.builder.kv_cache_spec)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    assert step.builder.chunked_prefill_workspace.numel() == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sliding_window": 128}, "sliding_window: sparse_mla expects None, got 128"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes: sparse_mla expects None"),
        ({"kv_lora_rank": 448}, "kv_lora_rank: sparse_mla expects 512, got 448"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: .* or fp8_ds_mla, got fp8"),
        ({"q_pad_num_heads": 64}, "q_pad_num_heads: sparse_mla expects None, got 64"),
        ({"topk_indices_buffer": None}, "topk_indices_buffer: expected"),
    ],
)
def test_what_the_implementation_refuses(changes, match):
    arguments = {
        "num_heads": 8,
        "head_size": 576,
        "scale": 1.0,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "kv_lora_rank": 512,
        "topk_indices_buffer": torch.zeros(4, 4, dtype=torch.int32),
    }
    plugin.SparseMlaImpl(**arguments)
    with pytest.raises(ValueError, match=match):
        plugin.SparseMlaImpl(**(arguments | changes))


# What layers ask of an implementation only where it keeps weights of its own on a CPU, or has a
# prefill that expands keys.
ELSEWHERE = {"_w_scale", "_w_uk_packed", "_w_uv_packed", "masked_mha_workspace_fits"}


@pytest.mark.parametrize(
    "file",
    [
        "model_executor/layers/attention/mla_attention.py",
        "model_executor/layers/mla.py",
        "models/deepseek_v32/attention.py",
    ],
)
def test_the_implementation_has_all_that_vllms_layers_ask_of_it(file):
    impl = Step(vllm_cases.BATCHES["decode"]).layer.impl
    source = (Path(vllm.__file__).parent / file).read_text()
    asked = set(re.findall(r"\bself(?:\.mla_attn)?\.impl\.(\w+)", source)) - ELSEWHERE
    assert asked
    assert {name for name in asked if not hasattr(impl, name)} == set()


@pytest.mark.parametrize("name", vllm_cases.BATCHES)
def test_metadata_of_vllms_builder(name):
    step = Step(vllm_cases.BATCHES[name])
    metadata = step.metadata()
    hand = vllm_cases.metadata(step.tensors)
    assert metadata.block_table is hand.block_table
    assert metadata.seq_lens is hand.seq_lens
    assert torch.equal(metadata.req_id_per_token, hand.req_id_per_token)
    assert metadata.cp_kv_cache_interleave_size == step.batch.interleave
    assert metadata.num_actual_tokens == len(step.tensors.request)
    assert metadata.prefill is None


# ------------------------------------------------------------------------------ the attention


@pytest.mark.parametrize("name", vllm_cases.BATCHES)
def test_forward(name):
    step = Step(vllm_cases.BATCHES[name])
    out, lse = step.forward()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.is_contiguous()
    want = vllm_cases.expected(step.arrays)
    compare.assert_close(out, lse, want)
    assert compare.distance(out, want.out) < 5e-6
    empty = sum(step.batch.queries) // 2
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    assert sparse_mla.faults() is None


@pytest.mark.parametrize("name", vllm_cases.SHARDED)
def test_forward_of_a_context_parallel_group(name):
    batch = vllm_cases.SHARDED[name]
    parts = []
    for rank in range(batch.ranks):
        step = Step(batch, rank=rank)
        assert step.layer.impl.dcp_world_size == batch.ranks
        out, lse = step.forward()
        compare.assert_close(out, lse, vllm_cases.expected_of_rank(step.arrays, rank))
        parts.append((out, lse))
    out, lse = sparse_mla.merge(*zip(*parts, strict=True))
    want = vllm_cases.expected(step.arrays)
    compare.assert_within("lse", compare.to_numpy(lse), want.lse, want.bound_lse)
    # the parts are rounded to bfloat16 before they are joined, and the result again
    compare.assert_within("out", compare.to_numpy(out), want.out, 2 * want.bound_out)
    assert any((part[1] == -torch.inf).any() for part in parts)


@pytest.mark.parametrize("name", ["decode", "decode and prefill", "packed", "without rope"])
def test_the_whole_layer(name):
    """MLAAttention.forward_impl: absorbs q, calls the backend, applies W_UV."""
    step = Step(vllm_cases.BATCHES[name])
    batch, rows = step.batch, len(step.tensors.request)
    layer = step.layer
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16() / 4

    layer.W_UK_T, layer.W_UV = random(batch.heads, NOPE, 512), random(batch.heads, 512, V)
    q = random(rows, batch.heads, NOPE + batch.rope)
    output = torch.zeros(rows, batch.heads * V, dtype=torch.bfloat16)
    with torch.inference_mode():  # as vLLM's runner has it
        layer.forward_impl(
            q,
            random(rows, 512),
            random(rows, 1, batch.rope),
            step.tensors.caches[0],
            step.metadata(),
            output,
        )
    latent = torch.bmm(q[..., :NOPE].transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    step.arrays.q = compare.to_numpy(torch.cat([latent, q[..., NOPE:]], -1))
    want = vllm_cases.expected(step.arrays)
    values = np.einsum("thl,hlv->thv", want.out, compare.to_numpy(layer.W_UV).astype(float))
    got = compare.to_numpy(output).reshape(values.shape).astype(float)
    np.testing.assert_allclose(got, values, atol=np.abs(values).max() / 100)


def test_nothing_is_converted(monkeypatch):
    """One call a layer, with vLLM's own memory; of PyTorch nothing but views and out and lse."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls, operators = [], []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(str(function))
            return function(*args, **(kwargs or {}))

    attend = sparse_mla.attend

    def spy(q, kv_cache, indices, **arguments):
        calls.append((q, kv_cache, indices, arguments))
        return attend(q, kv_cache, indices, **arguments)

    monkeypatch.setattr(sparse_mla, "attend", spy)
    step = Step(vllm_cases.BATCHES["two drafts each, padded"])
    metadata = step.metadata()
    with Operators():
        step.layer.impl.forward_mqa(step.tensors.q, step.tensors.caches[0], metadata, step.layer)
    assert set(operators) == {"aten.slice.Tensor", "aten.empty.memory_format"}
    assert operators.count("aten.empty.memory_format") == 2
    ((q, kv_cache, indices, arguments),) = calls
    for passed, given in [
        (q[0], step.tensors.q[0]),
        (q[1], step.tensors.q[1]),
        (kv_cache, step.tensors.caches[0]),
        (indices, step.tensors.topk_buffer),
        (arguments["block_table"], step.tensors.tables[0]),
        (arguments["seq_lens"], step.tensors.seq_lens),
        (arguments["request_ids"], metadata.req_id_per_token),
    ]:
        assert passed.data_ptr() == given.data_ptr()
        assert passed.stride() == given.stride()
    assert arguments["validate"] == "record"


def test_heads_last_first_as_the_absorbing_product_leaves_them():
    step = Step(vllm_cases.BATCHES["decode"])
    rows = len(step.tensors.request)
    assert step.tensors.q[0].stride() == (512, rows * 512, 1)
    assert not step.tensors.caches[0].is_contiguous()


# ------------------------------------------------------------------------------ faults


def test_a_fault_is_masked_and_logged_once(caplog_vllm):
    step = Step(vllm_cases.BATCHES["decode"])
    step.tensors.tables[0][2, 1] = step.tensors.caches[0].shape[0] + 3
    step.tensors.topk_buffer[0, 0] = -7
    metadata = step.metadata()
    for _ in range(5):  # layers of one step
        out, _ = step.layer.impl.forward_mqa(
            step.tensors.q, step.tensors.caches[0], metadata, step.layer
        )
    for _ in range(3):  # the steps that follow
        step.metadata()
    lines = [line for line in caplog_vllm.messages if "Masked in an earlier step" in line]
    assert len(lines) == 1
    assert "indices[0, 0] = -7" in lines[0]
    assert sparse_mla.faults() is None
    arrays = step.arrays
    want = reference.attention(
        arrays.q,
        arrays.caches[0],
        arrays.topk_buffer[:4],
        softmax_scale=vllm_cases.SCALE,
        block_table=arrays.tables[0],
        request_ids=arrays.request,
        seq_lens=arrays.seq_lens,
    )
    compare.assert_within("out", compare.to_numpy(out), want.out, want.bound_out, "bfloat16")


def test_a_batch_invariant_engine(monkeypatch):
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    sparse_mla.vllm.register()
    assert select() is plugin.SparseMlaBackend
    step = Step(vllm_cases.BATCHES["decode"])
    assert step.layer.impl.batch_invariant
    out, _ = step.forward()
    step.tensors.q = tuple(part[:1] for part in step.tensors.q)
    alone, _ = step.forward()
    assert torch.equal(out[:1], alone)
