"""meander-scorer: the command."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from ..client import access
from ..client.client import connect
from ..client.tasks import maybe_awaited
from . import REWARDS
from .reward import Fault, Reward, Input
from .worker import Worker

_HELP = """Scores the samples of a pipeline by a reward function that people use, as a worker:

  meander-scorer clipscore --try fox.png 'a red fox'       # one score, without a pipeline
  meander-scorer pickscore --weights ./PickScore_v1 &      # start as many as you like, on one or many GPUs
  meander run -n 4 --reward nats:pickscore 'a red fox'

Weights are a folder, or the name of a model of the Hugging Face hub, which is fetched once. A function whose weights
are not there says what to fetch. `meander-scorer NAME --help` tells what the score means and all flags."""


def _flags(sub: argparse.ArgumentParser, cls: type[Reward]) -> None:
    own = sub.add_argument_group("the function")
    for flag, settings in cls.flags.items():
        own.add_argument(flag, **settings)
    add = own.add_argument
    add("--try", nargs=2, dest="sample", metavar=("IMAGE", "PROMPT"), help="print the score of an image file, and end")
    add("--ground-truth", default="", metavar="TEXT", help="of --try")
    add("--before", metavar="IMAGE", help="of --try: the condition image, which was edited")
    _worker_flags(sub, cls.name)


def _worker_flags(sub: argparse.ArgumentParser, name: str) -> None:
    worker = sub.add_argument_group("the worker")
    add = worker.add_argument
    add("--name", default=name, help="prompts ask for nats:NAME (%(default)s); one for each version")
    add("--batch", type=int, default=8, metavar="N", help="samples that are scored together at most (%(default)s)")
    add("--patience", type=float, default=30.0, metavar="S",
        help="a request that waited longer is not computed: the timeout in scorers.yaml (%(default)s)")  # fmt: skip
    access.add_flags(worker)
    sub.epilog = "Credentials are of the role scorer. MEANDER_NATS_TOKEN has the token of the pipeline's server."


def main(argv: list[str] | None = None) -> int:
    """The command line. The status is 1 after an error, which it prints in a line."""
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="meander-scorer", description=_HELP, formatter_class=raw)
    names = p.add_subparsers(dest="reward", metavar="NAME", required=True, title="functions")
    for cls in REWARDS.values():
        doc = inspect.getdoc(cls) or ""
        install = f"It needs pip install 'meander-rl[{cls.extra}]'."
        _flags(
            names.add_parser(
                cls.name, help=doc.splitlines()[0], description=f"{doc}\n\n{install}", formatter_class=raw
            ),
            cls
        )
    a = p.parse_args(argv)
    _checked(p, a)
    cls = REWARDS[a.reward]

    def load() -> Reward:
        return cls(**{name: getattr(a, name) for name in inspect.signature(cls).parameters})

    try:
        return _try(load(), a) if a.sample else asyncio.run(_serve(load, a))
    except ImportError as e:
        print(f"meander-scorer: {e}; pip install 'meander-rl[{cls.extra}]' has what it needs", file=sys.stderr)
    except (Fault, ValueError, OSError) as e:
        print(f"meander-scorer: {e}", file=sys.stderr)
    return 1


def _checked(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    """Refuses values of the worker's flags, and begins to log."""
    if a.batch < 1 or a.patience <= 0:
        p.error("--batch must be at least 1, --patience above 0")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("meander").setLevel(logging.INFO)


def serve_own(reward: Reward, argv: list[str] | None = None) -> int:
    """The command line of meander.rewards.serve."""
    p = argparse.ArgumentParser(description=f"Answers for the reward function {reward.name}, as a worker.")
    _worker_flags(p, reward.name)
    a = p.parse_args(argv)
    _checked(p, a)
    a.reward = reward.name
    try:
        return asyncio.run(_serve(lambda: reward, a))
    except (ImportError, Fault, ValueError, OSError) as e:
        print(f"{p.prog}: {e}", file=sys.stderr)
        return 1


def _try(reward: Reward, a: argparse.Namespace) -> int:
    from PIL import Image

    file, prompt = a.sample
    before = {"image": [Image.open(a.before).convert("RGB")]} if a.before else {}
    sample = Input(Image.open(file).convert("RGB"), prompt, a.ground_truth, conditions=before)
    (score,) = asyncio.run(maybe_awaited(reward.score([sample])))
    if isinstance(score, Exception):
        raise ValueError(str(score))
    print(f"{score.value:.6g}  {score.detail}".rstrip())
    return 0


async def _serve(load: Callable[[], Reward], a: argparse.Namespace) -> int:
    """Connects before it loads, which can take minutes."""
    stop, token = asyncio.Event(), os.environ.get("MEANDER_NATS_TOKEN") or None

    def end() -> None:
        if stop.is_set():  # a second signal does not wait
            os._exit(1)
        stop.set()

    async with connect(**access.arguments(a, token)) as client:
        began = time.monotonic()
        reward = await asyncio.to_thread(load)
        print(f"{a.reward} is loaded in {time.monotonic() - began:.0f} s, version {reward.version}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
        ready = f"answers for nats:{a.name}"
        await Worker(reward, a.batch, a.patience).serve(client, a.name, stop, lambda: print(ready, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
