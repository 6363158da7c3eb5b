"""The networks of vLLM-Omni against those of diffusers, in the environment of meander-rl[omni]: make engines-test."""

import importlib.util
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import SIGNS
from talk import Refused, connect, latents, start

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from meander.torch.faults import Fault  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402

HERE = pytest.mark.skipif(
    importlib.util.find_spec("vllm_omni") is None, reason="no vllm_omni: make engines-test makes its environment"
)
H, W, FAR = 64, 96, 1e-5
ONE, TWO = "1" * 64, "2" * 64


class Bench:
    """A worker, and the network of diffusers with the same weights."""

    def __init__(self, client):
        self.client, self.card = client, client.ready()["card"]
        self.linear = client("modules")[0]["linear"]
        self.x = latents(self.card, 3, H, W)
        self.prompts = client.encode('a red sign that says "EXIT"', "a dog", "the number 7")
        self.reference = self.network()

    @staticmethod
    def network():
        made = diffusers.QwenImageTransformer2DModel.from_pretrained(SIGNS / "transformer", dtype=torch.float32)
        return made.eval().requires_grad_(False)

    def velocity(self, weights="", rows=slice(None)):
        handles = [h for h, _, _ in self.prompts]
        return self.client.velocity(self.x[rows], [0.9, 0.5, 0.05][rows], handles[rows], H, W, weights=weights)

    def expected(self, network=None):
        """What diffusers computes, row by row."""
        edge = self.card["latent"]["scale"] * 2
        return np.concatenate([
            (network or self.reference)(
                hidden_states=torch.from_numpy(x[None]), timestep=torch.tensor([t]), return_dict=False,
                encoder_hidden_states=torch.from_numpy(p["prompt_embeds"][None].copy()),
                img_shapes=[[(1, H // edge, W // edge)]],
            )[0].numpy() for x, t, (_, p, _) in zip(self.x, (0.9, 0.5, 0.05), self.prompts, strict=True)
        ])  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    socket = tmp_path_factory.mktemp("omni") / "w.sock"
    process = start(SIGNS, "--socket", socket, "--network", "vllm-omni")
    client, _ = connect(process)
    yield Bench(client)
    client.stream.close()
    process.stdin.close()
    process.wait()


def near(got, want):
    assert got.shape == want.shape and np.linalg.norm(np.float64(got) - want) <= FAR * np.linalg.norm(want)


@HERE
def test_velocities_prompts_and_pixels_are_those_of_diffusers(bench):
    hello, _ = bench.client("hello", {"protocol": 2, "token": ""})
    assert "/vllm-omni-" in hello["backend"] and hello["card"]["family"] == "qwen-image"
    near(bench.velocity(), bench.expected())
    near(bench.velocity(rows=slice(1, 2)), bench.expected()[1:2])
    assert np.abs(bench.expected()[0] - bench.expected()[1]).max() > 0.1  # or near would say nothing
    pipe = diffusers.QwenImagePipeline.from_pretrained(SIGNS, dtype=torch.float32)
    long = "a sign " * 600
    for text, cut in (("a dog", False), (long, True)):
        (_, got, lost), = bench.client.encode(text, truncate=True)
        near(got["prompt_embeds"], pipe.encode_prompt([text], max_sequence_length=512)[0][0].detach().numpy())
        assert (lost > 0) == cut
    with pytest.raises(Refused, match="must be at most 512"):
        bench.client.encode(long)
    c = pipe.vae.config
    mean, deviation = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (c.latents_mean, c.latents_std))
    z = pipe._unpack_latents(torch.from_numpy(bench.x[:1] * 0.5), H, W, pipe.vae_scale_factor)
    with torch.no_grad():
        image = pipe.vae.decode(z * deviation + mean, return_dict=False)[0][0, :, 0]
    want = ((image / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).numpy()
    assert np.abs(bench.client.decode(bench.x[0] * 0.5, H, W)[0].astype(int) - want).max() <= 1


@HERE
def test_names_are_those_of_diffusers(bench):
    given, _ = bench.client("modules")
    layers = [(n, m) for n, m in bench.reference.named_modules() if isinstance(m, torch.nn.Linear)]
    assert given["linear"] == {n: list(m.weight.shape) for n, m in layers}
    assert given["tensors"] == {n: list(t.shape) for n, t in bench.reference.state_dict().items()}


@HERE
def test_adapters_are_added_to_every_layer(bench):
    """Also to those that vLLM-Omni computes as one; the base has its bits again."""
    base, random, merged = bench.velocity(), np.random.default_rng(3), bench.network()
    modules, tensors = [], {}
    for name, (rows, columns) in bench.linear.items():
        a, b = random.normal(0, 0.2, (2, columns)), random.normal(0, 0.2, (rows, 2))
        tensors |= {f"{name}.A": a.astype(np.float32), f"{name}.B": b.astype(np.float32)}
        modules.append({"name": name, "scale": 0.5, "rank": 2})
        merged.get_submodule(name).weight += torch.from_numpy(0.5 * (b @ a)).float()
    bench.client("load", {"weights": ONE, "kind": "adapter", "modules": modules}, tensors)
    got = bench.velocity(ONE)
    near(got, bench.expected(merged))
    assert np.abs(got - base).max() > 0.1
    for name in ("transformer_blocks.1.attn.to_k", "transformer_blocks.0.attn.add_v_proj", "proj_out"):
        one, two = bench.network(), name.replace(".", "")[:20].ljust(64, "0")
        delta = tensors[f"{name}.B"] @ tensors[f"{name}.A"]
        one.get_submodule(name).weight += torch.from_numpy(delta)
        bench.client("load", {"weights": two, "kind": "adapter", "modules": [{"name": name, "scale": 1.0, "rank": 2}]},
                     {n: t for n, t in tensors.items() if n.startswith(f"{name}.")})  # fmt: skip
        near(bench.velocity(two), bench.expected(one))
    assert np.array_equal(bench.velocity(), base)
    with pytest.raises(Refused, match="must be a linear layer"):
        bench.client("load", {"weights": TWO, "kind": "adapter", "modules": [
            {"name": "transformer_blocks.1.attn.to_qkv", "scale": 1.0, "rank": 2}]})  # fmt: skip


@HERE
def test_a_whole_version_takes_the_place_of_the_base(bench):
    base, other = bench.velocity(), bench.network()
    for t in other.state_dict().values():
        t += 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(t.numel()))
    tensors = {n: t.numpy() for n, t in other.state_dict().items()}
    bench.client("load", {"weights": TWO, "kind": "whole"}, tensors)
    near(bench.velocity(TWO), bench.expected(other))
    assert np.array_equal(bench.velocity(), base)
    name = "transformer_blocks.0.attn.to_v.weight"
    for wrong, says in (
        ({n: t for n, t in tensors.items() if n != name}, "to_v.weight' and 0 more are missing"),
        ({**tensors, name.replace("to_v", "to_qkv"): tensors[name]}, "to_qkv.weight' and 0 more are unknown"),
        ({**tensors, name: tensors[name][1:]}, "must be"),
    ):
        with pytest.raises(Refused, match=says):
            bench.client("load", {"weights": "3" * 64, "kind": "whole"}, wrong)
    assert np.array_equal(bench.velocity(), base)


@HERE
def test_another_class_or_network_is_refused(tmp_path):
    from meander.torch import omni

    shutil.copytree(SIGNS, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "transformer/config.json"
    config.write_text(config.read_text().replace('"zero_cond_t": false', '"zero_cond_t": true'))
    with pytest.raises(Fault, match="zero_cond_t: true; must be false for vllm-omni"):
        omni.find(Folder(tmp_path))

    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(Fault, match="FluxPipeline; must be QwenImagePipeline for vllm-omni"):
        omni.find(Folder(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("vllm_omni") is not None, reason="vllm_omni is there")
def test_without_its_packages_it_says_what_to_install():
    from meander.torch import omni

    with pytest.raises(Fault, match=r"no vllm_omni; pip install 'meander-rl\[omni\]'"):
        omni.find(Folder(SIGNS))


@pytest.mark.parametrize(
    "args", [["--generic"], ["--trust-class"], ["--compile"], ["--family", "a.py:A"], ["--text-encoder-device", "cpu"]]
)
def test_what_it_does_not_have_is_refused(args):
    out = subprocess.run(
        [sys.executable, "-m", "meander.torch", "--model", SIGNS, "--socket", "s", "--network", "vllm-omni", *args],
        capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode == 78 and f"{args[0]}: set; must be absent beside --network vllm-omni" in out.stderr
