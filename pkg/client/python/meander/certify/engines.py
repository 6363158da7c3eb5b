"""The engines that certify knows, as the adapters that it judges. Each shows what an adapter is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..data.events import tensor
from .engine import Row

STEPS = 8
"""How many steps an image takes."""


class Adapter(contextlib.ExitStack):
    """What adapters share: a model's folder, by which another program computes, and folders of LoRAs to update to.
    images and texts draw; an adapter has one of them."""

    says: dict[str, Any] = {}
    """What it claims."""
    images: Any = None
    texts: Any = None
    now = 0
    """Which weights it serves."""

    def __init__(self, where: str, model: str = "", adapters: Sequence[str] = ()):
        super().__init__()
        self.where, self.model, self.adapters = where, model, [str(pathlib.Path(a).resolve()) for a in adapters]
        self.says = {**type(self).says, "weights": len(self.adapters)}
        self.lacks: tuple[str, ...] = () if self.adapters else ("update",)

    def update(self, weights: int) -> None:
        """Serves the weights of a folder of LoRAs, counted from 1; 0: those at the start."""
        raise NotImplementedError

    @functools.lru_cache(4)
    def network(self, weights: int) -> Any:
        """The model by torch, with one of the LoRAs."""
        from safetensors.torch import load_file

        from ..train import model, texts

        if not self.model:
            raise NotImplementedError("it is not compared: --model names no folder")
        made = texts.TextNetwork if pathlib.Path(self.model, "config.json").is_file() else model.Network
        if not weights:
            return made(self.model, 1)
        folder = pathlib.Path(self.adapters[weights - 1])
        c = json.loads((folder / "adapter_config.json").read_text())
        out = made(self.model, c["r"], c["lora_alpha"], tuple(c["target_modules"]))
        out.load(load_file(folder / "adapter_model.safetensors"))
        return out

    def template(self, prompt: str) -> list[int]:
        """The ids of a prompt in the template of the model's folder."""
        from transformers import AutoTokenizer

        messages = [{"role": "user", "content": prompt}]
        made = AutoTokenizer.from_pretrained(self.model).apply_chat_template(messages, add_generation_prompt=True)
        return [int(t) for t in (made["input_ids"] if hasattr(made, "keys") else made)]

    def logits(self, row: Row, weights: int) -> Any:
        """The logits by which the ids of a row were drawn."""
        import torch

        ids, n = [*row["prompt"], *row["ids"]], len(row["ids"])
        with torch.no_grad():
            return self.network(weights).networks[""](torch.tensor([ids])).logits[0, -n - 1 : -1].double().numpy()


class Lane(Adapter):
    """A lane of a pipeline: nats://HOST:PORT or, with the name of the lane, nats://HOST:PORT/LANE. Of a folder or a
    name of a model `meander up` is started."""

    says = {"transition": "sde", "log_prob_kind": "density", "reduce": "mean"}

    def __init__(self, where: str, model: str = "", adapters: Sequence[str] = ()):
        from ..client import sync

        super().__init__(where, model, adapters)
        self.version = 0
        self.process: Any = None
        self.then: Callable[[str], Any] = lambda run: None
        self.url, _, self.lane = where.removeprefix("nats://").partition("/")
        if not where.startswith("nats://"):
            self.lane, self.url = "", f"127.0.0.1:{_free()}"
            self.model = model or where
            self.store = self.enter_context(tempfile.TemporaryDirectory())
            self.callback(lambda: self._stop(self.process))
            self._start()
        else:
            self.lacks += ("restart",)
        self.client = self.enter_context(sync.connect(f"nats://{self.url}"))
        self.sync, self.policy = sync.policy, _until(lambda: sync.policy.policy(self.client, self.lane), 60)
        self.lane = self.policy["lane"]
        if self.policy.get("text"):
            self.says = {"log_prob_kind": "raw", "reduce": "each", "weights": len(self.adapters)}
            self.texts, self.images = self._drawn, None
        else:
            self.images, self.says["noise"] = self._drawn, "philox of noise_seed, in turn"

    def _start(self) -> None:
        folders = os.pathsep.join((os.environ.get("PATH", ""), os.path.dirname(sys.executable), "bin"))
        if not (program := shutil.which("meander", path=folders)):
            raise ValueError("no program meander in PATH: pip install meander-rl, or make build in a clone")
        log = pathlib.Path(self.store, "log")
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [program, "up", "--model", self.where, "--store", self.store, "--listen", self.url, "--batch", "16"],
                stdout=out, stderr=out,
            )  # fmt: skip
        host, _, port = self.url.partition(":")

        def reached() -> None:
            if self.process.poll() is not None:
                raise ValueError(f"meander up ended:\n{log.read_text().strip()}")
            socket.create_connection((host, int(port)), 1).close()

        _until(reached, 60, but=ValueError)

    @staticmethod
    def _stop(process: Any) -> None:
        process.kill()
        process.wait()

    def _drawn(self, prompts: Sequence[str], seeds: Sequence[int], **text: Any) -> list[Row]:
        """A group of one sample for each prompt, asked for at once."""
        run, by = f"certify{uuid.uuid4().hex[:10]}", {}
        image = {"num_inference_steps": STEPS, "true_cfg_scale": 2.0, "negative_prompt": "a grey wall", "rollout": {
            "sde_step_indices": [0, 1, 2, 4], "return_step_indices": list(range(STEPS + 1)),
            "return_conditioning": True, "debug": ["model_output"],
        }}  # fmt: skip
        for prompt, seed in zip(prompts, seeds):
            fields: Any = {"lane": self.lane, **({"text": text} if text else image)}
            self.client.publish(run, prompt, uid=f"s{seed}", seed=seed, group_size=1,
                                min_policy_version=self.version, reward=["confidence" if text else "synthetic"],
                                **fields)  # fmt: skip
        self.then(run)
        for told in itertools.islice(self.client.advantages(run), len(prompts)):
            by[told["uid"]] = self._row(self.client.group(run, told["uid"], told))
        return [by[f"s{seed}"] for seed in seeds]

    def _row(self, group: Any) -> Row:
        """What the events of a group say of its sample."""
        s = group.samples[0]
        t = s.facts
        if s.text is not None:
            n, ids = s.text.prompt_length, s.text.ids
            return {"prompt": ids[:n].tolist(), "ids": ids[n:], "log_probs": s.text.numbers["log_probs"][n:]}
        if not s.steps or len(s.steps) < STEPS:
            return {}
        debug = [tensor(d["tensor"]) for x in s.steps for d in x["debug"]]
        return {
            "latents": [s.latents(k) for k in range(STEPS + 1)], "sigmas": t["sigmas"], "velocities": debug,
            "timesteps": t["timesteps"][:STEPS], "image": self.client.pixels(t), "noise_level": t["noise_level"],
            "log_probs": [np.nan if p is None else p for p in t["log_probs"]], "group": group,
            "seeds": {n: t[n] for n in ("noise_seed", "sample_seed")},
        }  # fmt: skip

    def expected(self, row: Row, weights: int) -> Any:
        """What torch computes of a row, of the model's folder and one of the adapters."""
        if "group" not in row:
            return self.logits(row, weights)
        import torch

        from ..data.batch import Batch
        from ..train.rollouts import Rollouts

        net, rolls = self.network(weights), Rollouts(Batch([row["group"]]))
        texts, out, cpu = [rolls.step(np.array([0]), 0, torch.device("cpu"))[3]] * STEPS, [], torch.device("cpu")
        for x, sigma, text in zip(row["latents"], row["sigmas"], texts):
            with torch.no_grad():
                at = torch.tensor([sigma], dtype=torch.float32)
                out.append(net.guided(torch.tensor(x)[None].to(cpu), at, text, rolls.frame, rolls.rule)[0].numpy())
        return out

    def update(self, weights: int) -> None:
        pushed = self.sync.push_policy(self.client, self.adapters[weights - 1] if weights else None, self.lane)
        self.sync.taken(self.client, pushed)
        self.version = pushed["policy_version"]

    def _meanwhile(self, call: Callable[[], Row], *do: Callable[[str], Any]) -> Row:
        """Calls, with something done to its run once it is published."""
        self.then = lambda run: [done(run) for done in do]
        try:
            return call()
        finally:
            self.then = lambda run: None

    def pause(self, call: Callable[[], Row]) -> Row:
        """Pauses a run and lets it go on."""
        return self._meanwhile(call, lambda run: self.client.obeyed(self.client.pause(run)), self.client.resume)

    def abort(self, call: Callable[[], Row]) -> Row:
        """Cancels a run."""
        return self._meanwhile(call, self.client.cancel)

    def restart(self, call: Callable[[], Row]) -> Row:
        """Kills the pipeline in a run and starts it again."""
        return self._meanwhile(call, lambda run: self._stop(self.process), lambda run: self._start())


class Pipeline(Adapter):
    """A folder of diffusers, whose own pipeline draws, with its own scheduler and noise."""

    says = {"noise": "torch's CPU generator of its seed, in turn"}

    def __init__(self, where: str, model: str = "", adapters: Sequence[str] = ()):
        from ..torch import families
        from ..torch.folder import Folder
        from ..torch.whole import Pipeline as Whole

        super().__init__(where, model, adapters)
        self.whole: Any = families.find(Folder(where), True, False, "")
        assert isinstance(self.whole, Whole)
        import torch

        self.pipe = self.whole.load(torch.float32, torch.device("cpu"), lambda detail: None)
        self.pipe.set_progress_bar_config(disable=True)

    def images(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Row]:
        import torch

        from ..torch.canonical import Grid
        from ..torch.reference import _Taken

        of = self.pipe.scheduler
        given, step, taken = list[Any](), of.step, _Taken(of)
        noted = of.step

        def heard(output: Any, *a: Any, **k: Any) -> Any:
            given.append(output.detach().clone())
            return noted(output, *a, **k)

        of.step = heard
        generators = [torch.Generator("cpu").manual_seed(s) for s in seeds]
        try:
            with torch.no_grad():
                made = self.pipe(
                    list(prompts), num_inference_steps=STEPS, generator=generators, output_type="np",
                    height=self.whole.size().height, width=self.whole.size().width,
                ).images  # fmt: skip
        finally:
            of.step = step
        sigmas = Grid(of, torch.tensor(taken.timesteps)).sigmas
        return [{
            "image": made[k], "latents": [x[k].numpy() for x in taken.states], "sigmas": sigmas,
            "timesteps": taken.timesteps, "velocities": [v[k].float().numpy() for v in given],
        } for k in range(len(seeds))]  # fmt: skip

    def update(self, weights: int) -> None:
        self.pipe.transformer.unload_lora()
        if weights:  # with another prefix diffusers takes none of PEFT's names, and goes on
            file = pathlib.Path(self.adapters[weights - 1], "adapter_model.safetensors")
            self.pipe.transformer.load_lora_adapter(file, prefix="base_model.model", adapter_name="certify")


class OpenAI(Adapter):
    """A server of completions with log-probs by ids, http://HOST:PORT/v1, as vLLM's, in the template of its own. What
    is expected are logits; pauses are its routes to pause and to go on."""

    says = {"reduce": "each"}
    expected = Adapter.logits
    pauses = ("/pause?mode=keep", "/resume")

    def texts(self, prompts: Sequence[str], seeds: Sequence[int], temperature: float, top_k: int) -> list[Row]:
        return list(pool(lambda p, s: self._text(p, s, temperature, top_k), prompts, seeds))

    def _text(self, prompt: str, seed: int, temperature: float, top_k: int) -> Row:
        models = json.loads(_post(f"{self.where}/models"))["data"]
        model = f"certify-{self.now}" if self.now else next(m["id"] for m in models if not m.get("parent"))
        asked = {"messages": [{"role": "user", "content": prompt}], "model": model, "seed": seed, "top_k": top_k}
        how = {"temperature": temperature, "max_tokens": 16, "logprobs": True, "return_token_ids": True}
        answer = json.loads(_post(f"{self.where}/chat/completions", asked | how))
        told = answer["choices"][0]
        if "prompt_token_ids" not in answer:
            raise ValueError(f"{self.where}: no token ids, which vLLM gives; a server of SGLang is sglang=http://...")
        return {"prompt": answer["prompt_token_ids"], "ids": told["token_ids"],
                "log_probs": [t["logprob"] for t in told["logprobs"]["content"]]}  # fmt: skip

    def update(self, weights: int) -> None:
        if weights:
            of = {"lora_name": f"certify-{weights}", "lora_path": self.adapters[weights - 1], "load_inplace": True}
            _post(f"{self.where}/load_lora_adapter", of)
        self.now = weights

    def pause(self, call: Callable[[], Row]) -> Row:
        """Calls while the server is paused, and lets it go on."""
        with concurrent.futures.ThreadPoolExecutor() as executor:
            _post(self.where.removesuffix("/v1") + self.pauses[0], {})
            waits = executor.submit(call)
            _post(self.where.removesuffix("/v1") + self.pauses[1], {})
            return waits.result()


class SGLang(OpenAI):
    """A server of SGLang, sglang=http://HOST:PORT. Prompts go out as ids, in the template of --model."""

    pauses = ("/pause_generation", "/continue_generation")

    def _text(self, prompt: str, seed: int, temperature: float, top_k: int) -> Row:
        ids = self.template(prompt)
        how = {"temperature": temperature, "top_k": top_k, "sampling_seed": seed, "max_new_tokens": 16}
        asked: Any = {"input_ids": ids, "return_logprob": True, "sampling_params": how}
        asked |= {"lora_path": f"certify-{self.now}"} if self.now else {}
        told = json.loads(_post(f"{self.where}/generate", asked))["meta_info"]["output_token_logprobs"]
        return {"prompt": ids, "ids": [t[1] for t in told], "log_probs": [t[0] for t in told]}

    def update(self, weights: int) -> None:
        if weights:
            of = {"lora_name": f"certify-{weights}", "lora_path": self.adapters[weights - 1]}
            with contextlib.suppress(OSError):  # there is none
                _post(f"{self.where}/unload_lora_adapter", of)
            _post(f"{self.where}/load_lora_adapter", of)
        self.now = weights


class SGLangDiffusion(Adapter):
    """A server of SGLang-Diffusion, sglang-diffusion=http://HOST:PORT."""

    says = {"transition": "sde", "noise_level": 0.7, "log_prob_kind": "density", "reduce": "mean"}

    def images(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Row]:
        return list(pool(self._image, prompts, seeds))

    def _image(self, prompt: str, seed: int) -> Row:
        import msgpack

        body = {
            "prompt": prompt, "seed": seed, "width": 64, "height": 32, "num_inference_steps": 4,
            "num_outputs_per_prompt": 1, "generator_device": "cpu", "true_cfg_scale": 1.0, "rollout_debug_mode": True,
            "rollout_return_dit_trajectory": True, "extra_sampling_params": {"quality": "exact"},
        }  # fmt: skip
        row = msgpack.unpackb(_post(f"{self.where}/rollout/generate", body))[0]
        told, debug = row["dit_trajectory"], row["rollout_debug_tensors"]
        out = {"image": row["generated_output"], "velocities": debug["rollout_model_outputs"],
               "log_probs": row["rollout_log_probs"], **{k: told[k] for k in ("latents", "sigmas", "timesteps")}}
        out = {k: _tensor(v) for k, v in out.items()}  # fmt: skip
        return out | {"timesteps": out["timesteps"][: len(out["sigmas"]) - 1]}

    def update(self, weights: int) -> None:
        _post(f"{self.where}/v1/unmerge_lora_weights", {"target": "all"})
        if weights:
            lora = {"lora_nickname": f"certify-{weights}", "lora_path": self.adapters[weights - 1]}
            _post(f"{self.where}/v1/set_lora", lora)


ENGINES: dict[str, Callable[..., Any]] = {
    "lane": Lane, "diffusers": Pipeline, "openai": OpenAI, "sglang": SGLang, "sglang-diffusion": SGLangDiffusion
}
"""The engines by name: NAME=WHERE."""


def pool(call: Callable[..., Row], *of: Sequence[Any]) -> list[Row]:
    """Calls at once, in order."""
    with concurrent.futures.ThreadPoolExecutor() as executor:
        return list(executor.map(call, *of))


def _post(url: str, body: Any = None) -> bytes:
    """What a server answers. OSError: it is not there, or refuses."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return bytes(answer.read())
    except urllib.error.URLError as e:
        raise OSError(f"{url}: {e if isinstance(e, urllib.error.HTTPError) else e.reason}") from e


def _tensor(of: Any) -> Any:
    """A tensor of a server: the safetensors file of one, in its bytes."""
    from safetensors.torch import load

    return load(of["data"])["t"].float().numpy()


def _free() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _until(call: Callable[[], Any], seconds: float, but: tuple[type[Exception], ...] | type[Exception] = ()) -> Any:
    """What a call returns once it does not fail; its last failure after some seconds, and one of but at once."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as fault:
            if isinstance(fault, but) or time.monotonic() > end:
                raise
            time.sleep(0.1)
