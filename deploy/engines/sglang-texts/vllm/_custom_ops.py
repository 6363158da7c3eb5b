"""In the place of vLLM's operators, one of which SGLang imports for its rotary layer on a CPU, and never calls there.

SGLang asks for pinned memory for adapters. Without a driver there is none: tensors are made without it.
"""

import torch
from torch.utils import _device

_device._device_constructors()  # it keeps the functions of now: those that a device context knows


def rotary_embedding(*_, **__):
    raise NotImplementedError("rotary_embedding: it needs a GPU")


def _unpinned(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


for _name in "tensor", "empty", "zeros", "ones", "full":
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_, **__: self
