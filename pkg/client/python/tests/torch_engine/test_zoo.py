"""Pipelines of different kinds, by one builder, as a worker loads them."""

import json
from types import SimpleNamespace

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


def test_a_table_that_was_cut_off_goes_on(tmp_path):
    """Rows are taken from its file where the same code made them; one that was cut off within is left out."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"class": "A", "code": zoo.code()}, {"class": "B", "code": "other"}, {"class": "C", "code": zoo.code()}]
    rows.write_text("\n".join(map(json.dumps, lines))[:-5])
    args = SimpleNamespace(rows=rows, resume=True, code=zoo.code())
    assert list(zoo.kept(args)) == ["A"] and rows.read_text().count("\n") == 1
    args.resume = False
    assert not zoo.kept(args) and not rows.read_text()


def test_a_class_of_no_known_kind(tmp_path):
    with pytest.raises(LookupError, match="no parts of its kind"):
        zoo.write(tmp_path, "ShapEPipeline")
