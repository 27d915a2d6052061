"""Sparse MLA attention: one fused gather-and-attend over a paged latent KV cache.

The attention step of DeepSeek Sparse Attention models (DeepSeek-V3.2, GLM-5 and their successors)
on tensors of any framework, without a copy::

    out, lse = sparse_mla.attend(q, kv_cache, indices, softmax_scale=1 / 16)

Beside `attend`:

- `merge` joins partial results (shards, parts of a context) by their lse;
- `pack`, `unpack` and `append` write and read the cache formats that `cache_formats` lists;
- `check` says what an index array and a block table hold, `faults` and `synchronize` what went
  wrong; a fault is an `IndexFault`;
- `plan`, `load`, `devices` and `build_info` say what runs where.

The NumPy reference in float64 is `sparse_mla.reference`; ``python -m sparse_mla`` has ``info``,
``demo``, ``check`` and ``bench``.
"""

from sparse_mla._core import (
    CudaError,
    IndexFault,
    UnsupportedError,
    __version__,
    append,
    attend,
    build_info,
    cache_formats,
    devices,
    faults,
    load,
    merge,
    pack,
    plan,
    synchronize,
    unpack,
)
from sparse_mla.report import Report, check

__all__ = [
    "CudaError",
    "IndexFault",
    "Report",
    "UnsupportedError",
    "__version__",
    "append",
    "attend",
    "build_info",
    "cache_formats",
    "check",
    "devices",
    "faults",
    "load",
    "merge",
    "pack",
    "plan",
    "synchronize",
    "unpack",
]
