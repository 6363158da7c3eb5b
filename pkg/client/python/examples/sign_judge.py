"""A judge of signs that speaks: a stage that sees what was painted, says what is wrong with it, and ends a sample that
is right, so that the writer and the painter try again.

    meander up & meander-sampler --model sums &
    python sign_judge.py --name glyph_judge &
    meander publish --run demo --prompts deploy/demo/judged.jsonl

Without --url it follows a rule: the sum must be right, and the sign must show as many characters. With --url a vision
language model reads the sign, over any OpenAI-compatible URL, such as http://127.0.0.1:8000/v1.
"""

import argparse
import asyncio
import io
import os
import re

import meander
import numpy as np
from meander.rewards.judge import Judge
from meander.rewards.reward import Fault
from PIL import Image

CELL = 20  # pixels from one character of a sign to the next
QUESTION = "Which number is on this sign? Answer with the number alone."


def characters(image: Image.Image) -> int:
    """How many characters a sign shows: the cells of its row that have ink, which is brighter than the sign."""
    y = np.asarray(image.convert("L"), np.float32)[8:56, 4:-4]
    ink = y > (np.median(y) + np.percentile(y, 99.5)) / 2
    columns = np.flatnonzero(ink[4:-4].any(axis=0))
    if not len(columns) or np.ptp(y) < 40:
        return 0
    return round((columns[-1] - columns[0] + 6) / CELL)


class Reader(Judge):
    """A vision language model that reads the number on a sign."""

    def read(self, image: Image.Image) -> str:
        """What the sign says, as the model says it."""
        return self.answer(QUESTION, image)


def judge(request: dict, reader: Reader | None = None) -> dict:
    """Says what is wrong with the newest sign, or ends the sample."""
    a, plus, b = re.search(r"(\d+)([-+])(\d+)=", request["messages"][0]["content"]).groups()
    want = int(a) + int(b) if plus == "+" else int(a) - int(b)
    said = request["messages"][-1]["content"].strip()
    image = Image.open(io.BytesIO(request["conditions"][0]["file"]))
    if not re.fullmatch(r"-?\d+", said):
        return {"content": "no number", "score": 0.0}
    if int(said) != want:
        return {"content": "too low" if int(said) < want else "too high", "score": 0.0}
    if reader is not None:
        shown = reader.read(image).strip()
        wrong = "" if shown == said else f"the sign says {shown}"
    else:
        shown = characters(image)
        wrong = "" if shown == len(said) else f"the sign shows {shown} characters"
    return {"content": wrong, "score": 0.5} if wrong else {"terminate": True, "content": "right", "score": 1.0}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nats", default=os.environ.get("MEANDER_NATS_URL") or "nats://127.0.0.1:4222",
        help="NATS server (default %(default)s)"
    )
    parser.add_argument("--name", default="glyph_judge", help="stages ask for this interaction (default %(default)s)")
    parser.add_argument("--url", default="", help="of the vision language model, up to and with /v1")
    args = parser.parse_args()
    reader = Reader(args.url) if args.url else None
    async with meander.connect(args.nats) as client:
        await client.interact(
            args.name, lambda request: judge(request, reader),
            ready=lambda: print(f"listening on mdr.v1.interact.{args.name}", flush=True),
        )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
    except Fault as e:
        raise SystemExit(f"sign_judge: {e}") from None
