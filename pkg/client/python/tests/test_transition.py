"""Transitions by their settings, and by what a step event says."""

import numpy as np
import pytest

from meander.data.events import TRANSITIONS
from meander.maths.transition import kernel, step_kernel

SIGMAS = [1.0, 0.93, 0.71, 0.4, 0.12, 0.0]


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("level", [0.0, 0.3, 0.7, 1.0])
def test_event_says_the_transition(transition, level):
    for i in range(len(SIGMAS) - 1):
        by_settings = kernel(transition, level, SIGMAS, i)
        event = {k: getattr(by_settings, k) for k in ("transition", "sigma", "sigma_next", "std_dev_t", "noise_std")}
        by_event = step_kernel(event)
        for k in ("x_coefficient", "v_coefficient"):
            # Both round to float32; where cps keeps no noise its factor is a small difference.
            assert getattr(by_event, k) == pytest.approx(getattr(by_settings, k), abs=2e-7)


def test_event_with_other_noise_is_believed():
    """The noise of a setting that this client does not know is in the event alone."""
    half = kernel("sde", 0.35, SIGMAS, 1)
    event = {
        "transition": "sde", "sigma": 0.93, "sigma_next": 0.71, "std_dev_t": half.std_dev_t, "noise_std": half.noise_std
    }
    got = step_kernel(event)
    assert (got.noise_std, got.x_coefficient) == (half.noise_std, half.x_coefficient)
    x = np.ones((2, 3), np.float32)
    assert got.log_prob(x, x, x) == half.log_prob(x, x, x)
    with pytest.raises(ValueError, match="transition: 'x'; must be one of"):
        step_kernel(event | {"transition": "x"})
