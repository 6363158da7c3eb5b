"""In the place of SGLang's kernels, which are published for CUDA only: the two that its Qwen-Image needs on a CPU.

Any other kernel that SGLang imports is a function that says its name, should it be called.
"""

import torch
from torch.nn import functional


def _norm(x, weight, bias, kind, eps):
    y = x.float()
    shape = y.shape[-1:]
    y = functional.layer_norm(y, shape, eps=eps) if kind == "layer" else functional.rms_norm(y, shape, eps=eps)
    if weight is not None:
        y = y * weight.float()
    return y if bias is None else y + bias.float()


def fused_norm_scale_shift_cpu(x, weight, bias, scale, shift, kind, eps):
    return (_norm(x, weight, bias, kind, eps) * (1 + scale.float()) + shift.float()).to(x.dtype)


def fused_scale_residual_norm_scale_shift_cpu(residual, x, gate, weight, bias, scale, shift, kind, eps):
    residual = residual + (x if gate is None else x * gate)
    return fused_norm_scale_shift_cpu(residual, weight, bias, scale, shift, kind, eps), residual


def _missing(name):
    def kernel(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name}: it needs a GPU")

    return kernel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "fused_norm_scale_shift_cpu(Tensor x, Tensor? w, Tensor? b, Tensor scale, Tensor shift, str kind, float eps) -> "
    "Tensor"
)
_library.define(
    "fused_scale_residual_norm_scale_shift_cpu(Tensor r, Tensor x, Tensor? gate, Tensor? w, Tensor? b, Tensor scale, "
    "Tensor shift, str kind, float eps) -> (Tensor, Tensor)"
)
for _f in fused_norm_scale_shift_cpu, fused_scale_residual_norm_scale_shift_cpu:
    _library.impl(_f.__name__, _f, "CompositeExplicitAutograd")
