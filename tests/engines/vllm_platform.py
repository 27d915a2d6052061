"""vLLM on a machine without a GPU, as far as choosing a backend and building metadata go.

Importing this module imports vLLM with two stand-ins, and nothing else of vLLM is replaced:

- beside a PyTorch without CUDA, in which vLLM's extension modules cannot be loaded, those that are
  imported are empty modules. None of their operators is called: what they would do (write the
  cache, run the indexer) is not tested;
- the current platform is `Platform`, vLLM's own CUDA platform with a compute capability to choose.
  Selection runs in the parent class. It has no pinned memory.
"""

from __future__ import annotations

import sys
import types

import torch

if torch.version.cuda is None:
    for _name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"):
        sys.modules[_name] = types.ModuleType(_name)

import vllm.platforms
import vllm.utils.torch_utils
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class Platform(CudaPlatformBase):
    """A CUDA platform whose GPU has the compute capability that a test wants."""

    capability = DeviceCapability(9, 0)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"a GPU of compute capability {cls.capability.as_version_str()}"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False


vllm.platforms.current_platform = Platform()
# Asked of the platform when this module was imported, which may have been before there was ours.
vllm.utils.torch_utils.PIN_MEMORY = Platform.is_pin_memory_available()
