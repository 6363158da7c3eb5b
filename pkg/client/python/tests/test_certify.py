"""The vectors by the formulas in Python, and what a certificate says of functions that are right and that are not."""

import json

import numpy as np
import pytest

from meander.certify import suite

SETS = suite.load()
TITLES = sorted(SETS)


@pytest.mark.parametrize("title", TITLES)
def test_the_formula_gives_the_vectors(title):
    s = SETS[title]
    assert s.formula and s.source and s.cases
    for inputs, expected in s.cases:
        assert inputs.keys() == s.inputs.keys(), title
        got, want = s.formula_of(inputs), np.asarray(expected[s.returns])
        off = np.abs(got - want).max()
        assert got.shape == want.shape and off <= s.tolerance["float64"] * max(1, np.abs(want).max()), (title, off)
        for name in (k.removeprefix("gradient_") for k in expected if k.startswith("gradient_")):
            want = expected["gradient_" + name]
            got = s.gradient_of(inputs, name, lambda moved, base: moved)
            # Differences of the fourth order are this far off where the loss is sharp.
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * max(1, np.abs(want).max()), err_msg=title)


def test_every_formula_has_vectors():
    assert SETS.keys() == suite.FORMULAS.keys()
