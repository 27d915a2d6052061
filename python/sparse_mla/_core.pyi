from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

class SupportsDLPack(Protocol):
    """A tensor of any framework: NumPy, PyTorch, CuPy, JAX."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class SupportsCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class CacheFormat(TypedDict):
    row_bytes: int
    d_qk: int
    d_v: int
    scale: Literal["none", "tensor", "float32"]
    layout: str

class Plan(TypedDict):
    kernel: str
    splits: int
    split_entries: int
    head_tile: int
    launches: int
    workspace_bytes: int

class CpuKernel(TypedDict):
    name: str
    isa: str
    runs: bool

class BuildInfo(TypedDict):
    version: str
    compiler: str
    stable_abi: bool
    cpu_kernels: list[CpuKernel]
    gpu_kernels: list[str]
    gpu_targets: str
    gpu_compiler: str

T = TypeVar("T", bound=SupportsDLPack)

__version__: str

class IndexFault(IndexError):
    tensor: str
    position: tuple[int, ...]
    value: int
    bound: int
    count: int
    exact: bool
    device: str

class CudaError(RuntimeError):
    code: int

class UnsupportedError(RuntimeError): ...

def attend(
    q: T | tuple[T, T],
    kv_cache: SupportsDLPack,
    indices: SupportsDLPack | None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    head_dim_v: int | None = None,
    block_table: SupportsDLPack | None = None,
    request_ids: SupportsDLPack | None = None,
    seq_lens: SupportsDLPack | None = None,
    query_positions: SupportsDLPack | None = None,
    shard: tuple[int, int, int] | None = None,
    max_seq_len: int | None = None,
    topk_lens: SupportsDLPack | None = None,
    attn_sink: SupportsDLPack | None = None,
    logit_cap: float = 0.0,
    cache_scale: float | None = None,
    extra_kv_cache: SupportsDLPack | None = None,
    extra_indices: SupportsDLPack | None = None,
    extra_topk_lens: SupportsDLPack | None = None,
    extra_cache_format: str | None = None,
    extra_cache_scale: float | None = None,
    extra_block_table: SupportsDLPack | None = None,
    extra_seq_lens: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    max_logits: SupportsDLPack | None = None,
    validate: Literal["deferred", "raise", "record", "mask"] = "deferred",
    batch_invariant: bool = False,
    stream: int | SupportsCudaStream | None = None,
) -> tuple[T, T]: ...
def attend_for_flash_mla(
    q: T | tuple[T, T],
    kv_cache: SupportsDLPack,
    indices: SupportsDLPack | None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    head_dim_v: int | None = None,
    block_table: SupportsDLPack | None = None,
    request_ids: SupportsDLPack | None = None,
    seq_lens: SupportsDLPack | None = None,
    query_positions: SupportsDLPack | None = None,
    shard: tuple[int, int, int] | None = None,
    max_seq_len: int | None = None,
    topk_lens: SupportsDLPack | None = None,
    attn_sink: SupportsDLPack | None = None,
    logit_cap: float = 0.0,
    cache_scale: float | None = None,
    extra_kv_cache: SupportsDLPack | None = None,
    extra_indices: SupportsDLPack | None = None,
    extra_topk_lens: SupportsDLPack | None = None,
    extra_cache_format: str | None = None,
    extra_cache_scale: float | None = None,
    extra_block_table: SupportsDLPack | None = None,
    extra_seq_lens: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    max_logits: SupportsDLPack | None = None,
    validate: Literal["deferred", "raise", "record", "mask"] = "deferred",
    batch_invariant: bool = False,
    stream: int | SupportsCudaStream | None = None,
) -> tuple[T, T]: ...
def merge(
    outs: Sequence[T],
    lses: Sequence[T],
    *,
    attn_sink: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
) -> tuple[T, T]: ...
def pack(rows: T, *, cache_format: str, block_size: int, cache_scale: float | None = None) -> T: ...
def unpack(
    kv_cache: T, *, cache_format: str | None = None, cache_scale: float | None = None
) -> T: ...
def append(
    kv_cache: SupportsDLPack,
    slots: SupportsDLPack,
    latent: SupportsDLPack,
    rope: SupportsDLPack | None = None,
    *,
    cache_format: str,
    cache_scale: float | None = None,
    stream: int | SupportsCudaStream | None = None,
) -> None: ...
def resolve(
    kv_cache: SupportsDLPack,
    indices: SupportsDLPack | None,
    *,
    cache_format: str | None = None,
    block_table: SupportsDLPack | None = None,
    request_ids: SupportsDLPack | None = None,
    seq_lens: SupportsDLPack | None = None,
    query_positions: SupportsDLPack | None = None,
    shard: tuple[int, int, int] | None = None,
    max_seq_len: int | None = None,
    topk_lens: SupportsDLPack | None = None,
    extra_kv_cache: SupportsDLPack | None = None,
    extra_indices: SupportsDLPack | None = None,
    extra_topk_lens: SupportsDLPack | None = None,
    extra_cache_format: str | None = None,
    extra_block_table: SupportsDLPack | None = None,
    extra_seq_lens: SupportsDLPack | None = None,
) -> tuple[NDArray[np.int64], ...]: ...
def faults(device: object = None) -> IndexFault | None: ...
def synchronize(device: object = None) -> None: ...
def cache_formats() -> dict[str, CacheFormat]: ...
def plan(
    *,
    batch: int,
    heads: int,
    topk: int,
    s_q: int = 1,
    d_qk: int = 576,
    d_v: int = 512,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    cache_format: str = "dense",
    extra_topk: int = 0,
    extra_cache_format: str | None = None,
    batch_invariant: bool = False,
    device: object = "cpu",
) -> Plan: ...
def load(device: object = None) -> None: ...
def build_info() -> BuildInfo: ...
def devices() -> list[dict[str, Any]]: ...
def cpu_peak(kernel: str) -> float: ...
def gather(
    kv_cache: SupportsDLPack,
    indices: SupportsDLPack,
    out: SupportsDLPack,
    *,
    stream: int | SupportsCudaStream | None = None,
) -> None: ...
