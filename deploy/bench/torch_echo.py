#!/usr/bin/env python3
"""The worker of `make bench-torch` that computes nothing: what a call costs besides the network.

It is `python -m meander.torch` with a network that gives the latents back, one number for each 8 x 8 pixels, so that
bodies of any size can be sent. It takes the worker's flags; --model is any folder that the worker knows.
"""

import sys

try:
    import torch
    from meander.torch import __main__, engine, families
except ImportError as e:
    sys.exit(f"torch_echo.py: {e}; python3 -m pip install './pkg/client/python[torch]'")

LATENT = {"channels": 1, "patch": [1, 1, 1], "scale": 8, "temporal": 1}
MAX_PIXELS = 4096 * 4096

find = families.find


def find_echo(*asked):
    """The family that is asked for, whose card has the latents of this worker."""
    family = find(*asked)
    card = {**family.card(), "latent": LATENT, "max_pixels": MAX_PIXELS, "mu": "none"}
    family.card = lambda: card
    family.latent_shape = lambda size: (size.height // LATENT["scale"] * (size.width // LATENT["scale"]), 1)
    family.encode = lambda prompt, truncate: ({name: torch.ones(1, 1) for name in family.conditioning}, 0)
    family.dtype = torch.float32
    return family


class Echo(engine.Engine):
    """An engine without weights."""

    def __init__(self, family, settings, say):
        self.family, self.settings, self.dtype = family, settings, "f32"
        self.device, self.handles = torch.device("cpu"), engine.Handles()

    def check_decoder(self):
        """It decodes nothing."""

    def velocity(self, states, sigmas, handles, guidance, size, weights, tensors):
        x = self._latents(tensors, (len(set(states)) or len(sigmas), *self.family.latent_shape(size)))
        for handle in handles:
            self.handles.get(handle)
        # The network's answer is memory of its own, too.
        return {}, [("v", x.numpy()[states] if states else x.numpy().copy())]

    def modules(self):
        return {"linear": {}, "tensors": {}}, []


if __name__ == "__main__":
    engine.Engine, families.find = Echo, find_echo
    __main__.main()
