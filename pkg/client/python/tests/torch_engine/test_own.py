"""A family or a pipeline of one's own: --family FILE.py:NAME."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers")

import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_whole import small_vae
from transformers import CLIPTextModel

import meander.torch
from meander.torch import families
from meander.torch.engine import Settings, make_engine
from meander.torch.faults import Fault
from meander.torch.folder import Folder
from meander.torch.server import Worker

GUIDE = Path(__file__).parents[5] / "deploy/guide/pipelines.md"
FAMILY = """
from meander.torch.families import Krea2

class MyKrea(Krea2):
    slug = "my-krea"

    def velocity(self, x, t, rows, size, guidance):
        return 2 * super().velocity(x, t, rows, size, guidance)
"""


@pytest.fixture(autouse=True)
def forget():
    """Forgets modules of files that go away."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith("/tmp"):
            del sys.modules[name]


def served(family):
    """A worker with a family."""
    worker = Worker(family, Settings("cpu", "f32"))
    worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1), say))
    assert worker.error is None, worker.error
    return worker


@pytest.fixture
def own(tmp_path):
    """The pipeline of the guide: its file and a folder of it."""
    file = tmp_path / "my_model.py"
    file.write_text(re.search(r"## A model of your own.*?```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1])
    sys.path.insert(0, str(tmp_path))
    mine = importlib.import_module("my_model")
    sys.path.remove(str(tmp_path))
    torch.manual_seed(0)
    pipe = mine.MyPipeline(
        tiny.wide(mine.MyNetwork()), small_vae(), tiny.clip(CLIPTextModel, 32), tiny.tokenizer("clip", 77),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    pipe.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine/meander.json").write_text(json.dumps({"num_inference_steps": 4}))
    del sys.modules["my_model"]
    return file, tmp_path / "mine"


def test_model_of_the_guide(own, dial):
    file, folder = own
    with pytest.raises(Fault, match="_class_name: 'MyPipeline'; must be a pipeline of diffusers"):
        families.find(Folder(folder))
    worker = served(families.find(Folder(folder), own=f"{file}:MyPipeline"))
    assert re.search(r"/family-MyPipeline-[0-9a-f]{12}/", worker.backend())
    client = dial("own", worker=worker)
    card = client.ready()["card"]
    assert (card["class"], card["pipeline"]["random_access"]) == ("MyPipeline", "exact")
    assert worker.engine.loaded.joint
    recipe = {"prompts": [["a red cat"]], "truncate": False, "guidance": 3.0, "steps": 4}
    handle = client("encode", recipe)[0]["items"][0]["handle"]
    grid = worker.engine.loaded.session(worker.engine.recipes[handle]).grids[0]
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    x = noise.numpy().reshape(1, *worker.family.latent_shape(worker.family.size()))
    for sigma, after in zip(grid.sigmas, grid.sigmas[1:], strict=False):
        x = x + np.float32(after - sigma) * client.velocity(x, [sigma], [handle], 64, 64)
    size = {"frames": 1, "height": 64, "width": 64, "handle": handle}
    media = client("decode", size, {"x": x[0]})[1]["media"]
    theirs = worker.family.pipe(
        "a red cat", num_inference_steps=4, generator=torch.Generator().manual_seed(0), guidance_scale=3.0
    )
    assert np.abs(media[0].astype(int) - (theirs[0][0] * 255).round()).max() <= 1


def test_family_of_a_file(folders, dial, tmp_path):
    (tmp_path / "mine.py").write_text(FAMILY)
    family = families.find(Folder(folders["krea2"]), own=f"{tmp_path / 'mine.py'}:MyKrea")
    family.check()
    client, plain = dial("own", worker=served(family)), dial("krea2")
    assert client.ready()["card"]["family"] == "my-krea"
    x = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float32)
    mine, theirs = (c.velocity(x, [0.5], [c.encode("a cat")[0][0]], 64, 64) for c in (client, plain))
    assert (mine == 2 * theirs).all()


def test_trainer_takes_a_pipeline_of_a_file(own):
    file, folder = own
    pipe = meander.torch.pipeline(folder, "cpu", "f32", family=f"{file}:MyPipeline")
    pipe.family.networks[""].requires_grad_(True)
    run = pipe.session({"prompts": [["a red cat"]], "guidance": 3.0, "steps": 4}, grad=True)
    run.velocity(torch.ones(1, 64, 4), run.grids[0].sigmas[1]).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in pipe.family.networks[""].parameters())
    file.write_text(FAMILY)
    del sys.modules["my_model"]
    with pytest.raises(Fault, match="my_model.py:MyKrea; must be a pipeline"):
        meander.torch.pipeline(folder, "cpu", "f32", family=f"{file}:MyKrea")


@pytest.mark.parametrize(
    ("given", "text", "why"),
    [
        ("mine", "", r"--family: mine; must be FILE.py:NAME, such as"),
        ("absent.py:A", None, r"absent.py: no such file"),
        ("json.py:A", "", r"json.py: a package has the name json"),
        ("mine.py:A", "import no_such_package", r"mine.py: cannot be imported: ModuleNotFoundError: .*no_such_package"),
        ("mine.py:A", "def f(:", r"mine.py: cannot be imported: SyntaxError"),
        ("mine.py:B", "class A: pass", r"mine.py: no class B; it has A"),
        ("mine.py:A", "class A: pass", r"mine.py: A: must be a subclass of meander.torch.family.Family, or of diffusers"),
        (
            "mine.py:A", "from meander.torch.family import Family\nclass A(Family):\n  slug = 'a'",
            r"mine.py: A: lacks parts, velocity",
        ),
        (
            "mine.py:A", "from diffusers import DiffusionPipeline\nclass A(DiffusionPipeline): pass",
            r"mine.py: A: lacks __call__",
        ),
        (
            "mine.py:A",
            "from meander.torch.families import Krea2\nclass A(Krea2):\n  def __init__(self, folder): self.nothing",
            r"mine.py: A: AttributeError: .*nothing",
        ),
    ],
)  # fmt: skip
def test_file_is_refused_with_what_it_lacks(folders, tmp_path, given, text, why):
    file = tmp_path / given.partition(":")[0]
    if text is not None:
        file.write_text(text)
    with pytest.raises(Fault, match=why):
        families.find(Folder(folders["krea2"]), own=str(tmp_path / given) if ":" in given else given)
