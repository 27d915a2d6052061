"""A sparse MLA attention backend for vLLM, found by vLLM once this package is installed.

::

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype fp8_ds_mla

vLLM calls `register` through the entry point group ``vllm.general_plugins``, in each of its
processes. The backend itself, `sparse_mla.vllm.backend.SparseMlaBackend`, is imported when vLLM
selects it. Two environment variables:

``SPARSE_MLA_VLLM``
    ``off`` (default): the backend is CUSTOM, and runs where CUSTOM is asked for. ``auto``: on a GPU
    for which none of the sparse backends that vLLM would try is made, it also takes the place of
    the first of them, so that nothing needs to be asked for. ``always``: on every GPU.
``SPARSE_MLA_VLLM_INDEXER``
    ``own``: vLLM's indexer has been replaced by one that runs on this GPU; whether DeepGEMM does is
    not looked at.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["register"]

BACKEND = "sparse_mla.vllm.backend.SparseMlaBackend"
MODES = ("off", "auto", "always")


def register() -> None:
    """Makes the backend known to vLLM; may be called any number of times.

    Raises ValueError where ``SPARSE_MLA_VLLM`` is none of its values, which stops vLLM's start.
    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    logger = init_logger("vllm.plugins.sparse_mla")
    mode = os.environ.get("SPARSE_MLA_VLLM") or "off"
    if mode not in MODES:
        raise ValueError(f"SPARSE_MLA_VLLM: expected {', '.join(MODES)}, got {mode!r}")
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "The attention backend CUSTOM is %s, of another plug-in, and stays so.",
            custom.get_path(),
        )
    else:
        register_backend(custom, BACKEND)
    if mode == "off":
        return
    slots = sparse_slots()
    if slots is None:
        logger.warning(
            "SPARSE_MLA_VLLM=%s: this vLLM does not tell which backends it tries; "
            "--attention-backend CUSTOM selects sparse_mla.",
            mode,
        )
        return
    taken = [slot for slot in slots if slot.is_overridden() and slot.get_path() == BACKEND]
    if not slots or taken:
        return
    if mode == "auto" and (serving := [slot.name for slot in slots if serves(slot)]):
        logger.info(
            "SPARSE_MLA_VLLM=auto: vLLM has %s for this GPU; --attention-backend CUSTOM selects "
            "sparse_mla.",
            " and ".join(serving),
        )
        return
    register_backend(slots[0], BACKEND)
    logger.info("SPARSE_MLA_VLLM=%s: sparse_mla is in the place of %s.", mode, slots[0].name)


def sparse_slots() -> list[Any] | None:
    """The sparse MLA backends that vLLM tries on this GPU where none is asked for, in its order.

    None where this vLLM has no such list."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None:
        return []
    from vllm.platforms import cuda

    priorities = getattr(cuda, "_get_backend_priorities", None)
    if priorities is None:
        return None
    listed = priorities(use_mla=True, device_capability=capability)
    return [slot for slot in listed if "SPARSE" in slot.name]


def serves(slot: Any) -> bool:
    """Whether the backend of this slot is made for this GPU."""
    from vllm.platforms import current_platform

    try:
        backend = slot.get_class()
    except (ImportError, OSError):
        return False
    return backend.supports_compute_capability(current_platform.get_device_capability())
