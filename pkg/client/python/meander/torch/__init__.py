"""The torch engine: a process that computes the networks of diffusers pipelines for a meander sampler.

    python -m meander.torch --model ./sd35 --socket /run/meander/worker.sock --device cuda:0 --dtype bf16

The sampler keeps schedule, noise, transitions and events; the worker encodes prompts, evaluates velocities and decodes
latents. Both speak frames over one stream (meander.torch.frames); meander.torch.server lists the calls.

Latents are float32 [S, C]: S tokens, rows first, of C channels in the order (c, pt, ph, pw). A state is
x = (1 - sigma) x0 + sigma eps, and a velocity is eps - x0, for every family, whatever the network itself returns.

Importing this package imports neither torch nor the NATS client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from .sessions import Loaded

PROTOCOL = 2
"""Version of the protocol; hello refuses another."""


def pipeline(
    folder: str | Path, device: str = "auto", dtype: str = "auto", trust_class: bool = False, family: str = ""
) -> Loaded:
    """Loads a whole pipeline for a trainer: .session(recipe, grad=True).velocity(x, sigma) has gradients, with the
    pipeline's guidance, for whatever adapters its networks have. family is FILE.py:NAME, a pipeline of one's own. Fault
    of class config: it is not computed."""
    import torch

    from . import admission, sessions

    loaded = sessions.read(folder, device, dtype, trust_class, family)
    with torch.no_grad():
        admission.admit(loaded, lambda detail: None)
    return loaded
