"""A CPU for vLLM-Omni, which has platforms for accelerators alone: a plug-in of vllm_omni.platform_plugins, for tests.

It computes with PyTorch's own operations, and keeps weights as they are: vLLM packs those of a CPU into a form that
nothing else reads.
"""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def platform():
    return "meander_omni_cpu.Cpu"


def _keep_weights(self, layer):
    layer.cpu_linear = torch.nn.functional.linear


class Cpu(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def init_diffusion_worker_vllm_config(cls, vllm_config):
        # Of modules that import the platform themselves.
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

        UnquantizedLinearMethod.process_weights_after_loading = _keep_weights
        SDPAImpl.forward = SDPAImpl._forward_impl

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def synchronize(cls):
        pass

    @classmethod
    def empty_cache(cls):
        pass

    @classmethod
    def get_device_memory(cls, device=None):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_free_memory(cls, device=None):
        return cls.get_device_memory()[0]
