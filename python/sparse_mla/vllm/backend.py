"""The classes that vLLM asks an attention backend for: backend, metadata builder, implementation.

What one layer does in one step is one call of `sparse_mla.attend`. vLLM's tensors go in as they
are: the two parts of the query with the strides that the projections left, the paged cache with
whatever stands between its blocks, the indexer's positions within the request, the block table.
Nothing is concatenated, padded or converted, and decoding, prefill and mixed batches are the same
call. Metadata and its builder are vLLM's own, less the memory for a prefill that expands keys.

A fault of an index or of the block table is masked by the kernel and recorded; the builder looks
for a record once a step, without waiting for the GPU, and logs it.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
import vllm.envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SharedTopkIndicesBuffer,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.utils.import_utils import has_deep_gemm
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionType,
    MLAAttentionImpl,
    MultipleOf,
)

import sparse_mla
from sparse_mla.vllm.forward import LATENT, forward_mqa

__all__ = ["SparseMlaBackend", "SparseMlaImpl", "SparseMlaMetadataBuilder"]

logger = init_logger("vllm.plugins.sparse_mla")


class SparseMlaBackend(AttentionBackend):
    """What the backend can do, as vLLM's selector asks for it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:
        return SparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMlaMetadataBuilder]:
        return SparseMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576, 512]  # 512 latent numbers with 64 of rope, or without

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """None, or every reason that vLLM's own questions have not found, in words."""
        reasons = []
        if kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes):
            hint = "use fp8_ds_mla" if kv_cache_dtype.startswith("fp8") else "use auto"
            reasons.append(f"kv_cache_dtype {kv_cache_dtype}: {hint}")
        if not sparse_mla.build_info()["gpu_kernels"]:
            reasons.append("this build of sparse_mla has no GPU kernels")
        if os.environ.get("SPARSE_MLA_VLLM_INDEXER") != "own":
            reasons += missing_indexer(device_capability)
        config = get_current_vllm_config_or_none()
        if config is not None:
            if getattr(config.attention_config, "hisparse_config", None) is not None:
                reasons.append("hisparse_config: a cache in host memory is not supported")
            model = getattr(config.model_config, "hf_text_config", None)
            rank = getattr(model, "kv_lora_rank", LATENT)
            if rank != LATENT:
                reasons.append(f"kv_lora_rank {rank}: expected {LATENT}")
        return "; ".join(reasons) or None


def missing_indexer(capability: Any) -> list[str]:
    """Why vLLM's indexer, which chooses what the attention reads, cannot run; empty if it can."""
    if not has_deep_gemm():
        return ["indexer: vLLM's sparse indexer needs DeepGEMM, which cannot be imported"]
    if not current_platform.support_deep_gemm():
        return [
            "indexer: vLLM's sparse indexer needs DeepGEMM, which has no kernels for compute "
            f"capability {capability.major}.{capability.minor}"
        ]
    return []


class SparseMlaMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """vLLM's builder for sparse MLA. Graphs are captured for uniform batches: a launch follows from
    shapes, and everything that a replay changes is in tensors."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.topk_mask_workspace = None
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: Any) -> int:
        return 0  # rows for keys that a prefill would expand; ours reads the cache

    def build(self, *arguments: Any, **keywords: Any) -> SparseMLACommonMetadata:
        fault = sparse_mla.faults(self.device)
        if fault is not None:
            logger.warning("Masked in an earlier step: %s", fault)
        return super().build(*arguments, **keywords)


class SparseMlaImpl(SharedTopkIndicesBuffer, MLAAttentionImpl[SparseMLACommonMetadata]):
    """One layer's attention."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_quant_query_input: bool = False
    masked_mha_available: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **mla_arguments: Any,
    ) -> None:
        """Takes what `MLAAttention` passes; what it also passes is for backends that expand keys or
        convert indices. Raises ValueError naming the property that cannot be served, and
        `sparse_mla.UnsupportedError` where the build has no kernels for this GPU."""
        expected = {
            "alibi_slopes": (alibi_slopes, None),
            "sliding_window": (sliding_window, None),
            "attn_type": (attn_type, AttentionType.DECODER),
            "kv_sharing_target_layer_name": (kv_sharing_target_layer_name, None),
            "kv_lora_rank": (kv_lora_rank, LATENT),
            "q_pad_num_heads": (mla_arguments.get("q_pad_num_heads"), None),
        }
        for name, (value, only) in expected.items():
            if value != only:
                raise ValueError(f"{name}: sparse_mla expects {only!r}, got {value!r}")
        if kv_cache_dtype not in SparseMlaBackend.supported_kv_cache_dtypes:
            raise ValueError(
                "kv_cache_dtype: sparse_mla expects auto, bfloat16 or fp8_ds_mla, got "
                f"{kv_cache_dtype}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.logit_cap = float(logits_soft_cap or 0.0)
        self.batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        if self.topk_indices_buffer is None:
            raise ValueError("topk_indices_buffer: expected the indexer's or one given, got none")
        if self.topk_indices_buffer.device.type == "cuda":
            sparse_mla.load(self.topk_indices_buffer.device)

    def record_logical_topk_ready(self) -> None:
        """The indexer's result is read on the stream that wrote it: there is nothing to record."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out (T, heads, 512) and lse (T, heads): see `sparse_mla.vllm.forward`."""
        return forward_mqa(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer,
            attn_metadata,
            scale=self.scale,
            kv_cache_dtype=self.kv_cache_dtype,
            dcp=(self.dcp_rank, self.dcp_world_size),
            logit_cap=self.logit_cap,
            batch_invariant=self.batch_invariant,
        )
