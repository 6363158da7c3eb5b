"""What certify measures through its own adapters: of lanes, of a recorded SGLang-Diffusion, of a played server."""

import contextlib
import http.server
import json
import pathlib
import threading

import pytest
from conftest import SIGNS, SUMS

from meander.certify import engine, engines

pytest.importorskip("torch")
RECORDED = pathlib.Path(__file__).parents[3] / "remoteimage/remoteimagetest/testdata"
ADAPTER = SIGNS.parents[1] / "demo/adapter"


def measured(adapter):
    """The findings by aspect, and those that differ."""
    found = list(engine.judge(adapter, "it"))
    return {f.aspect: f for f in found}, [f for f in found if f.state in ("differs", "unexplained")]


@contextlib.contextmanager
def served(answer):
    """A server; answer gets a path and a body, and returns bytes, or None where there is none."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
            out = answer(self.path, body)
            self.send_response(404 if out is None else 200)
            self.end_headers()
            self.wfile.write(out or b"")

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_recorded_sglang_diffusion():
    """Bytes that the real server sent, for one seed: what the numbers are needs no second one."""
    pytest.importorskip("safetensors")

    class Recorded(engines.SGLangDiffusion):
        prompts, seeds = ['a blue sign that says "4071"'], [5]

    def answer(path, body):
        asked = json.loads((RECORDED / "sde_debug_env.request.json").read_text())
        same = path == "/rollout/generate" and all(body[k] == asked[k] for k in ("prompt", "seed", "width", "height"))
        return (RECORDED / "sde_debug_env.msgpack").read_bytes() if same else None

    with served(answer) as url:
        found, differs = measured(Recorded(url))
    assert differs == []
    assert found["log-probs"].state == "agrees"
    assert found["log-probs"].says.endswith("of transitions/sde, log_prob_kind density, reduce mean")
    assert found["noise is of"].says == "torch's CPU generator of its seed, in turn"
    assert found["seed"].state == "not judged" and "404" in found["seed"].says, "another one was not recorded"
    assert found["sigmas"].off < 1e-7


@pytest.mark.parametrize("kind", [engines.OpenAI, engines.SGLang])
def test_a_played_server_of_texts(kind):
    """It computes sums as vLLM does, with log-probs before temperature and filters; or as SGLang, with them after
    temperature, where no seed decides. While it is paused it answers nothing."""
    pytest.importorskip("transformers")
    import numpy as np

    vllm, goes_on = kind is engines.OpenAI, threading.Event()
    goes_on.set()
    free = np.random.default_rng(3)
    with kind("", str(SUMS)) as reference:
        def answer(path, body):
            if path == "/v1/models":
                return b'{"data": [{"id": "sums"}]}'
            if path.startswith(("/pause", "/resume", "/continue")):
                (goes_on.clear if "pause" in path else goes_on.set)()
                return b"{}"
            if path not in ("/v1/chat/completions", "/generate"):
                return None
            assert goes_on.wait(60)
            how, ids, told = body.get("sampling_params", body), [], []
            rng = np.random.default_rng(body["seed"]) if vllm else free
            prompt = reference.template(body["messages"][0]["content"]) if vllm else body["input_ids"]
            while len(ids) < 6 and 306 not in ids:
                z = reference.logits({"prompt": prompt, "ids": [*ids, 0]}, 0)[-1]
                y = np.where(z < np.sort(z)[-how["top_k"]], -np.inf, z / how["temperature"])
                p = np.exp(y - y.max())
                ids.append(int(np.searchsorted(np.cumsum(p / p.sum()), rng.random())))
                z = z if vllm else z / how["temperature"]
                told.append(float(z[ids[-1]] - np.log(np.exp(z).sum())))
            if not vllm:
                pairs = [[p, i, None] for p, i in zip(told, ids)]
                return json.dumps({"meta_info": {"output_token_logprobs": pairs}}).encode()
            choice = {"token_ids": ids, "logprobs": {"content": [{"logprob": p} for p in told]}}
            return json.dumps({"prompt_token_ids": prompt, "choices": [choice]}).encode()

        with served(answer) as url:
            found, differs = measured(kind(f"{url}/v1" if vllm else url, str(SUMS)))
    assert found["log-probs: log_prob_kind"].says.startswith("raw, as was found" if vllm else "scaled, as was found")
    assert found["prompt"].says == "the same 34 ids" and found["abort"].state == "not judged"
    assert vllm or "log-probs: log_prob_kind" in {f.aspect for f in differs}
    assert not vllm or differs == [] and found["during pause"].off == found["after pause"].off == 0


def test_completions_without_ids():
    """A server that gives no ids of tokens is named, with what to write."""
    with served(lambda path, body: b'{"data": [{"id": "m"}], "choices": [{}]}') as url:
        with pytest.raises(ValueError, match="no token ids.*sglang=http"):
            engines.OpenAI(f"{url}/v1").texts(["a"], [1], 1.0, 5)


def test_lane_of_images(binary, monkeypatch):
    monkeypatch.setenv("PATH", str(binary.parent), prepend=":")
    with engines.Lane(str(SIGNS), str(SIGNS), [str(ADAPTER)]) as lane:
        found, differs = measured(lane)
    assert differs == []
    assert found["noise is of"].says == "philox of noise_seed, in turn"
    assert "drawn to end at 0.02" in found["sigmas"].says and found["sigmas"].off < 1e-7
    assert found["weights 1"].says.startswith("log-probs of weights 1") and found["after restart"].off == 0


def test_lane_of_texts(sums, tmp_path):
    import torch

    from meander.train.texts import TextNetwork

    drawn, generator = TextNetwork(str(SUMS), 4, 8), torch.Generator().manual_seed(3)
    for p in drawn.parameters():
        p.data = 0.05 * torch.randn(p.shape, generator=generator)
    drawn.save(tmp_path)
    with engines.Lane(f"{sums}/sums", str(SUMS), [str(tmp_path)]) as lane:
        found, differs = measured(lane)
    assert differs == []
    assert found["log-probs"].state == found["prompt"].state == found["drawing"].state == "agrees"
    assert found["weights 1"].says.startswith("log-probs of weights 1") and found["update 0 again"].off == 0
