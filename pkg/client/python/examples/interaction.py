"""A worker of an interaction: it answers a language model between its turns, so that the model can try again.

Prompts ask for it by its name:

    meander up &
    python interaction.py --name tutor &
    meander publish --run demo --interaction tutor --max-turns 3 --reward turns "347+58=?"

Any number of these share the work; they come and go as they like.
"""

import argparse
import asyncio
import os
import re

import meander


def answer(request: dict) -> dict:
    """Says whether the last number of the answer is what the first message asks for."""
    asked = re.search(r"(-?\d+)\s*([-+])\s*(-?\d+)\s*=", request["messages"][0]["content"])
    if asked is None:
        return {"error": "the first message asks no sum"}
    a, b = int(asked[1]), int(asked[3])
    want = a + b if asked[2] == "+" else a - b
    said = re.findall(r"-?\d+", request["messages"][-1]["content"])
    if not said:
        return {"content": "too low", "score": 0.0}
    off = int(said[-1]) - want
    if off == 0:
        return {"terminate": True, "score": 1.0}
    return {"content": "too low" if off < 0 else "too high", "score": 0.0, "metadata": {"off": off}}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", default=os.environ.get("MEANDER_NATS_URL") or "nats://127.0.0.1:4222",
        help="NATS server (default %(default)s)"
    )
    parser.add_argument("--name", default="tutor", help="prompts ask for this interaction (default %(default)s)")
    args = parser.parse_args()
    async with meander.connect(args.url) as client:
        await client.interact(
            args.name, answer, ready=lambda: print(f"listening on mdr.v1.interact.{args.name}", flush=True)
        )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
