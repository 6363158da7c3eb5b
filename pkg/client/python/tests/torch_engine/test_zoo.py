"""Pipelines of different kinds, by one builder, as a worker loads them."""

import pytest
import torch
import zoo

CLASSES = [
    "StableDiffusionPipeline",
    "StableDiffusionXLControlNetPipeline",
    "PixArtSigmaPipeline",
    "FluxKontextPipeline",
    "ChromaPipeline",
    "WanImageToVideoPipeline",
    "CogVideoXPipeline",
    "AuraFlowPipeline",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_without_a_line_of_its_own(tmp_path, name):
    """Its steps may be evaluated in any order, its Euler ends where the pipeline ends: check_decoder looks."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        row = zoo.look(name, tmp_path)
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
    assert row["access"] in ("exact", "after_previous")
    assert not row["notes"]


def test_a_class_of_no_known_kind(tmp_path):
    with pytest.raises(LookupError, match="no parts of its kind"):
        zoo.write(tmp_path, "ShapEPipeline")
