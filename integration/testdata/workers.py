"""Workers of the Python client for TestNATS_CLI: each answers some requests, one of which fails; it ends with stdin."""

import asyncio
import io
import sys

import meander
import msgpack
from meander.rewards.reward import Reward, Score
from meander.rewards.worker import Worker
from PIL import Image


class Bright(Reward):
    name, version = "bright", "1"

    def score(self, samples):
        return [ValueError("it is dark") if s.prompt == "night" else Score(1.0) for s in samples]


def play(request):
    if request["name"] == "wrong":
        raise ValueError("no such move")
    return {"content": "go on"}


def image():
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


async def main():
    async with meander.connect(sys.argv[1]) as client:
        listens = asyncio.Queue()
        serving = [
            asyncio.create_task(
                Worker(Bright()).serve(client, "bright", asyncio.Event(), lambda: listens.put_nowait(1))
            ),
            asyncio.create_task(client.interact("game", play, lambda: listens.put_nowait(1), logits=False)),
        ]
        for _ in serving:
            await listens.get()
        for name, prompt in [
            ("bright", "day"), ("bright", "night"), ("bright", "day"), ("colour", "a"), ("colour", "b")
        ]:
            body = {"v": 1, "name": name, "prompt": prompt, "image": image(), "image_format": "png"}
            await client.nc.request(f"mdr.v1.score.{name}", msgpack.packb(body), timeout=60)
        for name in ("game", "wrong"):
            await client.nc.request("mdr.v1.interact.game", msgpack.packb({"v": 1, "name": name}), timeout=60)
        while True:
            try:
                await client.teacher_reply("old", "demo", "owls", 0)
                break
            except meander.NoTeacher:  # it starts yet
                await asyncio.sleep(0.1)
        try:
            await client.teacher_reply("old", "demo", "nobody", 0)
        except meander.Unscored:
            pass
        print("asked", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


asyncio.run(main())
