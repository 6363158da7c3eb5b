"""A vision language model as the judge, asked over any OpenAI-compatible URL, such as a server of vLLM or SGLang."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .reward import Busy, Fault, Reward, Input, Score, Scored

if TYPE_CHECKING:
    from PIL import Image

_LONGEST = 1 << 20  # bytes of an answer that are read
_AT_ONCE = 16  # questions in flight
_YES_OR_NO = 'Does this image show "{prompt}"? Answer with yes or no only.'
_EDIT = (
    'The last image was made from the one before it, which was to be changed as in "{prompt}". Is it changed so, and '
    "everything else left as it was? Answer with yes or no only."
)
_EDIT_NUMBER = (
    'The last image was made from the one before it, which was to be changed as in "{prompt}". How well is it changed '
    "so, with everything else left as it was? Answer with a number from {low} to {high} only, higher is better."
)
_NUMBER = 'How well does this image show "{prompt}"? Answer with a number from {low} to {high} only, higher is better.'


Places = list[tuple[str, list[tuple[str, float]]]]
"""The tokens of an answer, each with the likeliest ones at its place and their log-probs."""


class Judge(Reward):
    """A vision language model as the judge, over an OpenAI-compatible URL.

    It is asked with yes or no whether the image shows the prompt. The score is P(yes) / (P(yes) + P(no)) of its first
    word that is either, by the log-probs of the server; without them 1 for yes and 0 for no. With --range LOW:HIGH it
    is asked for a number instead, and the score is where that lies between the two: 0 to 1. Any other answer fails the
    sample. OPENAI_API_KEY of the environment goes along as the bearer token, and appears nowhere else.

        vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8000
        meander-scorer judge --url http://127.0.0.1:8000/v1
    """

    name = "judge"
    questions = (_YES_OR_NO, _NUMBER)
    """What is asked without --question: for yes or no, and for a number."""
    extra = "images"
    flags = {
        "--url": {"required": True, "help": "of the server, up to and with /v1"},
        "--model": {"default": "", "help": "the model to ask (the first one that the server lists)"},
        "--range": {"default": "", "metavar": "LOW:HIGH", "help": "ask for a number in it, such as 0:10"},
        "--question": {
            "default": "",
            "help": "another question; {prompt} and {ground_truth} are replaced, with --range {low} and {high} too",
        },
        "--tokens": {"type": int, "default": 16, "help": "the longest answer (%(default)s)"},
        "--no-logprobs": {"dest": "logprobs", "action": "store_false", "help": "for a server that refuses log-probs"},
        "--timeout": {
            "type": float,
            "default": 25.0,
            "help": "seconds for a sample, with all tries (%(default)s); keep it below the timeout of scorers.yaml",
        },
        "--retries": {"type": int, "default": 3, "help": "tries after the first one that fails for now (%(default)s)"},
    }

    def __init__(
        self, url: str, model: str = "", range: str = "", question: str = "", tokens: int = 16, logprobs: bool = True,
        timeout: float = 25.0, retries: int = 3,
    ):  # fmt: skip
        if not re.match("https?://[^/]", url):
            raise Fault(f"--url {url}: must begin with http:// or https:// and a host")
        self.url, self.tokens, self.timeout, self.retries = url.rstrip("/"), tokens, timeout, retries
        bounds = re.fullmatch(r"(-?\d+(?:\.\d+)?):(-?\d+(?:\.\d+)?)", range)
        if range and (bounds is None or float(bounds[1]) >= float(bounds[2])):
            raise Fault(f"--range {range}: must be LOW:HIGH, two numbers that rise, such as 0:10")
        self.bounds, self.logprobs = bounds and (bounds[1], bounds[2]), logprobs and not bounds
        self.question = question or self.questions[bounds is not None]
        self.open = urllib.request.build_opener(_Stay).open
        try:
            self.model = model or str(self._ask("/models", None, time.monotonic() + timeout)["data"][0]["id"])
        except (Busy, ValueError, LookupError, TypeError) as e:
            raise Fault(
                f"--url {url}: no list of models: {e}; is it the URL up to /v1, and does the server run?"
            ) from None

    @property
    def version(self) -> str:
        """The model, and a digest of the question and how its answer is read."""
        said = json.dumps([self.question, self.bounds, self.logprobs, self.tokens])
        return f"judge-{self.model[-80:]}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Asks about all samples at once, 16 at most."""

        def one(sample: Input) -> Scored:
            try:
                return self._judge(sample)
            except Exception as e:
                return e

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(one, samples))

    def _before(self, sample: Input) -> Sequence[Image.Image]:
        """The images that the judge sees before the sample."""
        return ()

    def _judge(self, sample: Input) -> Score:
        low, high = self.bounds or ("", "")
        truth = sample.ground_truth if isinstance(sample.ground_truth, str) else json.dumps(sample.ground_truth)
        words = {"prompt": sample.prompt, "ground_truth": truth, "low": low, "high": high}
        question = re.sub(r"\{(prompt|ground_truth|low|high)\}", lambda m: words[m[1]], self.question)
        answer, ended, places = self._asked(question, [*self._before(sample), sample.image])
        if ended == "length" and (self.bounds or answer.lstrip().startswith("<think")):
            raise ValueError(f"the answer is longer than --tokens {self.tokens}: {answer[:200]!r}")
        if self.bounds:
            return Score(_number(answer, float(low), float(high)), answer)
        return Score(_yes(answer, places), answer)

    def answer(self, question: str, *images: Image.Image) -> str:
        """What the model answers to a question about images. Busy: not now. ValueError: it refuses, or gives none."""
        return self._asked(question, images)[0]

    def _asked(self, question: str, images: Sequence[Image.Image]) -> tuple[str, str, Places]:
        """The answer to a question about images, why it ended, and the likeliest tokens at each of its places."""
        content = [*map(_part, images), {"type": "text", "text": question}]
        body: dict[str, Any] = {
            "model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": self.tokens,
        }  # fmt: skip
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        reply = self._ask("/chat/completions", body, time.monotonic() + self.timeout)
        try:
            choice = reply["choices"][0]
            places = [(p["token"], [(t["token"], t["logprob"]) for t in p["top_logprobs"]])
                      for p in ((choice.get("logprobs") or {}).get("content") or [])]  # fmt: skip
            return str(choice["message"]["content"] or ""), str(choice.get("finish_reason")), places
        except (LookupError, TypeError, AttributeError) as e:
            raise ValueError(f"the judge's reply has no {e}: {json.dumps(reply)[:200]}") from None

    def _ask(self, path: str, body: dict[str, Any] | None, end: float) -> Any:
        """The answer of the server. Busy: it gave none in time, or in all tries. ValueError: it refuses, or is no
        JSON."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.retries + 1):
            pause, left = 0.5 * 2**attempt, end - time.monotonic()
            try:
                with self.open(
                    urllib.request.Request(self.url + path, data, headers), timeout=max(left, 0.001)
                ) as reply:
                    return json.loads(_read(reply, end))
            except urllib.error.HTTPError as e:
                why = f"HTTP {e.code}: {_said(e)}"
                if e.code not in (408, 429) and e.code < 500:
                    hint = "; --no-logprobs asks without" if "logprobs" in why else ""
                    raise ValueError(f"the judge refuses: {why}{hint}") from None
                after = str(e.headers.get("Retry-After") or "")
                pause = float(after) if after.isdecimal() else pause
            except json.JSONDecodeError as e:
                raise ValueError(f"the judge's reply is no JSON: {e}") from None
            except (OSError, http.client.HTTPException) as e:
                why = str(getattr(e, "reason", e)) or type(e).__name__
            if attempt == self.retries or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        raise Busy(f"the judge does not answer after {attempt + 1} tries: {why}")


class EditJudge(Judge):
    """A vision language model as the judge of edits, over an OpenAI-compatible URL.

    It is shown the condition images of the sample, then the sample, and asked with yes or no whether the sample is the
    image before it, changed as the prompt says and otherwise left alone. The score is that of judge, with its
    settings. A sample without a condition image is an error.

        meander-scorer edit-judge --url http://127.0.0.1:8000/v1
    """

    name = "edit-judge"
    questions = (_EDIT, _EDIT_NUMBER)

    def _before(self, sample: Input) -> Sequence[Image.Image]:
        return sample.before(self.name)


def _part(image: Image.Image) -> dict[str, Any]:
    """An image as a part of a message."""
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _read(reply: Any, end: float) -> bytes:
    """The body of a reply. OSError, HTTPException: it is cut off, or not whole at the time end."""
    out = bytearray()
    while piece := reply.read1(1 << 16):
        out += piece
        if len(out) > _LONGEST:
            raise ValueError(f"the judge's reply has more than {_LONGEST} bytes")
        if time.monotonic() > end:
            raise TimeoutError("its reply comes too slowly")
    if len(out) < int(reply.headers.get("Content-Length") or 0):
        raise http.client.IncompleteRead(bytes(out))
    return bytes(out)


def _said(e: urllib.error.HTTPError) -> str:
    try:
        return e.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "no reason given"


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the image and the key are for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _yes(answer: str, places: Places) -> float:
    """How sure the judge is of yes, by the first of its tokens that is yes or no; 1 or 0 without log-probs."""

    def word(token: str) -> str:
        return token.strip(" \t\n\"'*.,!▁Ġ").lower()

    for token, top in places:
        if word(token) in ("yes", "no"):
            p = {w: math.fsum(math.exp(min(x, 0.0)) for t, x in top if word(t) == w) for w in ("yes", "no")}
            if p["yes"] + p["no"] > 0:
                return p["yes"] / (p["yes"] + p["no"])
    said = re.findall(r"\b(yes|no)\b", answer.lower())
    if len(set(said)) != 1:
        raise ValueError(f"the judge says neither yes nor no: {answer[:200]!r}")
    return float(said[0] == "yes")


def _number(answer: str, low: float, high: float) -> float:
    """Where the one number of an answer lies between low and high; "8/10" is 8."""
    said = re.findall(r"(?<![\d./])-?\d+(?:\.\d+)?", answer)
    if len(said) != 1 or not low <= float(said[0]) <= high:
        raise ValueError(f"the judge gives no one number from {low:g} to {high:g}: {answer[:200]!r}")
    return (float(said[0]) - low) / (high - low)
