"""The judge of meander.rewards against a server of this file that speaks as OpenAI's."""

import base64
import http.server
import io
import json
import math
import threading

import pytest

from meander.rewards import Busy, Fault, Input
from meander.rewards.judge import EditJudge, Judge
from test_rewards import Image, image


class Server(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible server that says what the test wants: a list of (status, headers, body) for each prompt."""

    said: dict = {}
    seen: list = []
    shown: list = []

    def do_GET(self):
        self.answer(200, {}, {"data": [{"id": "tiny-vlm"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *images, question = body["messages"][0]["content"]
        Server.seen.append((self.headers, body, question["text"]))
        Server.shown.append([])
        for shown in images:
            assert shown["image_url"]["url"].startswith("data:image/png;base64,")
            pixels = Image.open(io.BytesIO(base64.b64decode(shown["image_url"]["url"].partition(",")[2])))
            assert pixels.size == (40, 40)
            Server.shown[-1].append(pixels.tobytes())
        turns = next(v for k, v in Server.said.items() if k in question["text"])
        self.answer(*(turns.pop(0) if len(turns) > 1 else turns[0]))

    def answer(self, status, headers, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {"Content-Length": len(data), **headers}.items():
            self.send_header(k, v)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Server, "said", {})
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Server, "shown", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_port}/v1"
        s.shutdown()


def says(text, **top):
    """An answer of one token, with log-probs of the likeliest tokens where they are given."""
    choice = {"message": {"content": text}}
    if top:
        likeliest = [{"token": t.replace("_", " "), "logprob": math.log(p)} for t, p in top.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": likeliest}]}
    return 200, {}, {"choices": [choice]}


def test_judge_takes_how_sure_a_model_is_of_yes(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    Server.said = {
        "fox": [says("Yes", Yes=0.6, yes=0.1, _No=0.1, Maybe=0.2)], "cat": [says("No.")],
        "sky": [says("**Yes**, it does.")],
        "sea": [says("It is hard to say yes or no.")], "sun": [(200, {}, {"error": "busy"})],
        "ant": [(200, {}, b"<html>")],
        "bee": [(200, {}, {"choices": [{"message": {"content": "<think>\nNo, wait"}, "finish_reason": "length"}]})],
    }  # fmt: skip
    reward = Judge(server)
    assert reward.model == "tiny-vlm" and reward.version.startswith("judge-tiny-vlm-")
    a, b, c, *bad = reward.score([Input(image(0), f"a {p}") for p in Server.said])
    assert a == (pytest.approx(0.7 / 0.8), "Yes") and b.value == 0 and c.value == 1
    for e, why in zip(bad, ("neither yes nor no", "no 'choices'", "no JSON", "longer than --tokens 16"), strict=True):
        assert isinstance(e, ValueError) and why in str(e)
    headers, body, question = Server.seen[0]
    assert headers["Authorization"] == "Bearer a-key" and body["logprobs"] and body["temperature"] == 0
    assert question.startswith('Does this image show "a ')


def test_judge_takes_a_number(server):
    Server.said = {
        "fox": [says("8")], "cat": [says("7.5/10")], "sky": [says("11")], "sea": [says("from 3 to 4")],
        "sun": [says("none")]
    }
    reward = Judge(server, range="0:10", question="How red is {prompt}, {low} to {high}? {x} {ground_truth}")
    a, b, *bad = reward.score([Input(image(0), f"a {p}", "{prompt}") for p in Server.said])
    assert (a.value, b.value) == (pytest.approx(0.8), pytest.approx(0.75))
    assert all(isinstance(e, ValueError) and "no one number from 0 to 10" in str(e) for e in bad) and len(bad) == 3
    # What a prompt says is not replaced again.
    assert "How red is a fox, 0 to 10? {x} {prompt}" in [q for _, _, q in Server.seen]
    assert not Server.seen[0][1].get("logprobs") and reward.version != Judge(server).version


def test_judge_asks_again_and_gives_up(server):
    again = 429, {"Retry-After": "0"}, {}
    Server.said = {
        "fox": [again, (503, {"Retry-After": "0"}, {}), says("yes")], "cat": [again],
        "sky": [(400, {}, {"message": "logprobs is not known"})],
        "sea": [(302, {"Location": server + "/models"}, {})], "sun": [(500, {"Retry-After": "60"}, {})],
        "ant": [(200, {"Content-Length": "999"}, says("no")[2]), says("yes")],  # an answer that is cut off
    }  # fmt: skip
    a, b, c, d, e, f = Judge(server, retries=2).score([Input(image(0), f"a {p}") for p in Server.said])
    assert a.value == f.value == 1
    assert isinstance(b, Busy) and "after 3 tries: HTTP 429" in str(b)
    assert isinstance(c, ValueError) and "--no-logprobs" in str(c)
    assert isinstance(d, ValueError) and "302" in str(d)
    assert isinstance(e, Busy) and "after 1 tries" in str(e)  # a minute is more than a sample has


def test_edit_judge_sees_both_images(server):
    Server.said = {"make it red": [says("Yes", Yes=0.6, No=0.2)], "make it blue": [says("6")]}
    before, after = image(1), image(0)
    edit = Input(after, "make it red", conditions={"image": [before], "mask": [image(2)]})
    (score, bare) = EditJudge(server).score([edit, Input(after, "make it red")])
    assert score.value == pytest.approx(0.75) and "no condition of type image" in str(bare)
    assert Server.shown == [[before.tobytes(), after.tobytes()]]
    assert 'changed as in "make it red"' in Server.seen[0][2]
    (number,) = EditJudge(server, range="1:11").score([Input(after, "make it blue", conditions={"image": [before]})])
    assert number.value == 0.5 and "from 1 to 11" in Server.seen[1][2]
    assert EditJudge(server).version != Judge(server).version


def test_judge_needs_a_server_and_a_range():
    with pytest.raises(Fault, match="http://"):
        Judge("file:///etc/passwd")
    with pytest.raises(Fault, match="LOW:HIGH"):
        Judge("http://127.0.0.1:1/v1", range="10:0")
    with pytest.raises(Fault, match="no list of models"):
        Judge("http://127.0.0.1:1/v1", retries=0)
