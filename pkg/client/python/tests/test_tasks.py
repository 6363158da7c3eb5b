"""Calls side by side end together, and what a trainer asks of readers."""

import asyncio
import contextlib
import sys

import pytest

from meander.client.client import Refused
from meander.client.tasks import check_cancelled, together
from meander.train import evaluate, prompts
from meander.train.config import Config


def test_the_first_that_fails_stops_the_others():
    ended = []

    async def call(i):
        with contextlib.suppress(asyncio.CancelledError):
            if i == 2:
                raise ValueError("the second")
            await asyncio.Event().wait()
        ended.append(i)

    async def run():
        with pytest.raises(ValueError, match="the second"):
            await together(call(i) for i in range(5))
        return list(ended)

    assert sorted(asyncio.run(run())) == [0, 1, 3, 4]
    assert asyncio.run(together(asyncio.sleep(0, i) for i in range(3))) == [0, 1, 2]


def test_a_reader_that_is_not_there_is_one_error():
    """Prompts that wait for an answer while another is refused do not outlive the refusal."""
    waiting = []

    class Client:
        async def publish(self, run, prompt, **fields):
            if fields["uid"] == "a":
                await asyncio.sleep(0)  # the others wait by then
                raise Refused({"code": "invalid", "error": "ocr: tesseract is not installed"})
            waiting.append(fields["uid"])
            try:
                await asyncio.Event().wait()
            finally:
                waiting.remove(fields["uid"])

    async def run():
        with pytest.raises(Refused, match="tesseract is not installed"):
            await evaluate.publish(Client(), "run", [{"uid": uid, "prompt": "x"} for uid in "abc"], 1.0)
        return list(waiting)

    assert asyncio.run(run()) == []


READERS = [{"name": "glyph"}, {"name": "ocr", "weight": 0.0, "params": {"whitelist": "01"}}]
HELD_OUT = [{"prompt": 'a red sign that says "1"', "reward": READERS}]
CASES = [("ocr", ["glyph", "ocr"]), ("glyph", ["glyph"]), ("", ["glyph"]), ("diversity", ["glyph", "diversity"])]


@pytest.mark.parametrize("gold, names", CASES)
def test_only_the_rewarded_reader_and_the_gold_one_read(gold, names):
    (asked,) = prompts.held_out(Config(prompts="x", gold=gold), "read", HELD_OUT, 0)
    assert [r["name"] for r in asked["reward"]] == names
    assert [r.get("weight", 1.0) for r in asked["reward"]] == [1.0, 0.0][: len(names)]
    if gold == "ocr":
        assert asked["reward"][1]["params"] == {"whitelist": "01"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="such a Python raises KeyboardInterrupt instead")
def test_a_cancellation_that_comes_with_a_result():
    went_on = []

    async def work(result):
        await asyncio.wait_for(result, 60)
        check_cancelled()
        went_on.append(True)

    async def run():
        result = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work(result))
        await asyncio.sleep(0)
        result.set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not went_on


def test_a_file_adds_readers_to_none():
    (asked,) = prompts.held_out(Config(prompts="x"), "read", [{"prompt": "x"}], 0)
    assert [(r["name"], r["weight"]) for r in asked["reward"]] == [("glyph", 1.0), ("ocr", 0.0)]
