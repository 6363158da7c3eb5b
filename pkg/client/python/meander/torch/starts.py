"""Latents of images and videos, for samples that begin with them, by any pipeline that decodes its last state by a VAE.

How a pipeline packs and scales latents is not known here, but seen: what its VAE is given for the states 0 and 1, and
for numbers that say where in a state each element is. That is done backwards with what the VAE encodes.
"""

from __future__ import annotations

from typing import Any

import torch

from .admission import recipe_of
from .family import Size
from .faults import Fault
from .sessions import Loaded

_BASE = 16  # of the digits that places are told in, which every dtype has exactly


def encodes(loaded: Loaded, size: Size) -> bool:
    """Whether media of a size can be encoded to start from."""
    if len(loaded.family.tracks) > 1:
        return False
    try:
        zero = torch.zeros(size.frames, 3, size.height, size.width, device=loaded.family.device)
        Start(loaded, size).latents(zero)
    except (Fault, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


class _Decoded(BaseException):
    """Raised where a pipeline decodes: what its VAE is given."""


class Start:
    """Where the elements of a state of a size are in what the VAE decodes, their factor, and what is added."""

    def __init__(self, loaded: Loaded, size: Size):
        """Fault of class latents: the pipeline does not decode its last state element by element."""
        self.family, self.size = loaded.family, size
        self._recipe, self._loaded = recipe_of(loaded, size), loaded
        if not hasattr(getattr(self.family.pipe, "vae", None), "encode"):
            raise self._fault("has no VAE that encodes")
        tokens, channels = self.family.latent_shape(size)
        self.elements = tokens * channels
        self.shift = self._decoded(torch.zeros(self.elements))
        self.factor = self._decoded(torch.ones(self.elements)) - self.shift
        at, place, unit, apart = torch.arange(self.elements), torch.zeros_like(self.shift), 1, 0.0
        while self.shift.numel() == self.elements and unit < self.elements:
            digits = (self._decoded(at // unit % _BASE) - self.shift) / self.factor
            place, apart = place + digits.round() * unit, max(apart, float((digits - digits.round()).abs().max()))
            unit *= _BASE
        self.place = place.flatten().long()
        if not apart < 0.25 or not torch.equal(self.place.sort()[0], at.to(self.place.device)):
            raise self._fault("does not decode its last state element by element")

    def _fault(self, why: str) -> Fault:
        return Fault("latents", f"encode_media: {self.family.cls.__name__} {why}: samples must begin with noise")

    def _decoded(self, y: torch.Tensor) -> torch.Tensor:
        """What the VAE is given of a last state, float64."""
        run = self._loaded.session(self._recipe)

        def decode(z: Any, *_: Any, **__: Any) -> Any:
            raise _Decoded(z)

        run.session.pipe.vae.decode = decode
        try:
            run.end(y[None].float().to(self.family.device))
        except _Decoded as e:
            return e.args[0].double()
        finally:
            run.session.cancel()
        raise self._fault("does not decode its last state")

    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """The state [n] float32 of pixels [F, 3, H, W] in -1..1: of the mean of what the VAE encodes."""
        vae = self.family.pipe.vae
        pixels = media.to(vae.dtype)
        out = vae.encode(pixels.transpose(0, 1)[None] if self.shift.ndim == 5 else pixels)
        z = out.latent_dist.mode() if hasattr(out, "latent_dist") else out.latent
        if z.shape != self.shift.shape:
            raise self._fault(f"decodes {list(self.shift.shape)}, and its VAE encodes {list(z.shape)}")
        x = torch.empty(self.elements, device=z.device)
        x[self.place] = ((z.double() - self.shift) / self.factor).flatten().float()
        return x
