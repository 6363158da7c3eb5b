"""Sharded whole pipelines in two processes (FSDP2, gloo, CPU), whose prompts are not alike, against one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from meander.plugs.accelerate import whole  # noqa: E402
from meander.train import distributed  # noqa: E402
from meander.train.model import Network, Texts  # noqa: E402

SIZE = {"frames": 1, "height": 64, "width": 64}
# By process: the prompts of its rows, whether they are guided, and sigmas.
ROWS = (
    (["a red cat", "a blue sign", "the quick brown fox"], [True, True, False], [0.9, 0.5, 0.2]),
    (["a red cat"], [False], [0.9]),
)


def passes(where, rows, shard=False):
    """Velocities of some rows by several passes, and what gradients they add up to."""
    network = Network(where, rank=2, seed=3, shard=shard, generic=True, trust_class=True)
    state = network.state()
    noise = torch.Generator().manual_seed(5)
    network.load({n: v + 0.1 * torch.randn(v.shape, generator=noise) for n, v in sorted(state.items())})
    family = network.family
    guided = next(a["name"] for a in family.card()["pipeline"]["arguments"] if a["name"] in ("true_cfg_scale",
        "guidance_scale"))  # fmt: skip
    out = []
    for prompts, guides, sigmas in rows:
        recipes = []
        for prompt, guide in zip(prompts, guides, strict=True):
            given = {"prompts": [[prompt]], "steps": 4, **SIZE}
            arguments = {"negative_prompt": "blue", guided: 4.0} if guide else {guided: 1.0}
            own = family.card()["pipeline"]["guidance"]
            given |= {"guidance": arguments.pop(own)} if own in arguments else {}
            recipes.append(network.whole.loaded.recipe(given | {"arguments": arguments}))
        shape = family.latent_shape(recipes[0].size)
        x = torch.randn(len(prompts), *shape, generator=torch.Generator().manual_seed(7))
        texts = Texts([], torch.zeros(len(prompts)), recipes=recipes)
        for grad in (False, True, True):
            with torch.set_grad_enabled(grad):
                v = network.guided(x, torch.tensor(sigmas), texts, None, "inside")
            if grad:
                (v * x).sum().mul(network.gradients).backward()
        with torch.no_grad(), network.base():
            out += [v.detach(), network.guided(x, torch.tensor(sigmas), texts, None, "inside")]
    return {"v": out, "gradient": torch.cat([whole(p.grad).flatten() for p in network.parameters()])}


def process(where, out):
    torch.set_num_threads(1)
    distributed.begin("cpu")
    torch.save(passes(where, [ROWS[distributed.rank()]], True), f"{out}/{distributed.rank()}.pt")
    distributed.end()


@pytest.mark.parametrize("name", ["sd3", "flux1", "wan-two", "sd15"])
def test_unequal_prompts_are_computed_as_in_one_process(name, tmp_path):
    import tiny
    import tiny_whole

    folder = (tiny.write(tmp_path, (name,)) if name in tiny.PIPELINES else tiny_whole.write(tmp_path, name))[name]
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    code = f"import {Path(__file__).stem} as t; t.process({str(folder)!r}, {str(tmp_path)!r})"
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
                         stderr=subprocess.PIPE, text=True)
        for r in (0, 1)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=300)[1] for p in both]
    finally:
        for p in both:
            p.kill()
    assert all(p.returncode == 0 for p in both), "\n".join(text[-3000:] for text in said)
    found = [torch.load(tmp_path / f"{r}.pt") for r in (0, 1)]
    alone = passes(folder, ROWS)
    for v, want in zip(found[0]["v"] + found[1]["v"], alone["v"], strict=True):
        assert (v - want).abs().max() <= 1e-5 * want.abs().max()  # rows beside others are added up otherwise
    want = alone["gradient"]
    assert want.norm() > 0 and torch.equal(found[0]["gradient"], found[1]["gradient"])
    assert (found[0]["gradient"] - want).norm() <= 1e-4 * want.norm()
