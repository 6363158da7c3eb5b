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

from ..client import connect
from . import REWARDS
from .reward import Fault, Reward, Input
from .worker import Worker

_HELP = """Scores the samples of a pipeline by a reward function that people use, as a worker:

  meander-scorer clipscore --try fox.png 'a red fox'       # one score, without a pipeline
  meander-scorer pickscore --weights ./PickScore_v1 &      # start as many as you like, on one or many GPUs
  meander run -n 4 --reward nats:pickscore 'a red fox'

Weights are a folder, or the name of a model of the Hugging Face hub, which is fetched once. A function whose weights
are not there says what to fetch. `meander-scorer NAME --help` tells what the score means and all flags."""


def main(argv: list[str] | None = None) -> int:
    """The command line. The status is 1 after an error, which it prints in a line."""
    p = argparse.ArgumentParser(prog="meander-scorer", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = p.add_subparsers(dest="reward", metavar="NAME", required=True, title="functions")
    for cls in REWARDS.values():
        doc = "\n".join(line.removeprefix("    ") for line in (cls.__doc__ or "").splitlines())
        install = f"It needs pip install 'meander-client[{cls.extra}]'."
        sub = names.add_parser(
            cls.name, help=doc.splitlines()[0], description=f"{doc}\n{install}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        own = sub.add_argument_group("the function")
        for flag, settings in cls.flags.items():
            own.add_argument(flag, **settings)
        worker = sub.add_argument_group("the worker")
        worker.add_argument("--try", nargs=2, dest="sample", metavar=("IMAGE", "PROMPT"), help="print the score of a file and end")
        worker.add_argument("--ground-truth", default="", metavar="TEXT", help="of --try")
        worker.add_argument("--name", default=cls.name, help="prompts ask for nats:NAME (%(default)s); one for each version")
        worker.add_argument("--batch", type=int, default=8, metavar="N", help="samples that are scored together at most (%(default)s)")
        worker.add_argument(
            "--patience", type=float, default=30.0, metavar="S",
            help="a request that waited longer is not computed: the timeout in scorers.yaml (%(default)s)")  # fmt: skip
        worker.add_argument(
            "--nats", default=os.environ.get("MEANDER_NATS_URL", "nats://127.0.0.1:4222"), metavar="URL", help="of the pipeline (%(default)s)"
        )
        worker.add_argument("--creds", default=os.environ.get("MEANDER_NATS_CREDS"), metavar="FILE", help="of meander auth, role scorer")
        worker.add_argument("--tls-ca", default=os.environ.get("MEANDER_NATS_TLS_CA"), metavar="FILE", help="authority of the server's certificate")
        sub.epilog = "The token of the pipeline's server is read from MEANDER_NATS_TOKEN."
    a = p.parse_args(argv)
    if a.batch < 1 or a.patience <= 0:
        p.error("--batch must be at least 1, --patience above 0")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("meander").setLevel(logging.INFO)
    cls = REWARDS[a.reward]
    try:
        began = time.monotonic()
        reward = cls(**{name: getattr(a, name) for name in inspect.signature(cls).parameters})
        if a.sample:
            return _try(reward, a.sample[0], a.sample[1], a.ground_truth)
        print(f"{a.reward} is loaded in {time.monotonic() - began:.0f} s, version {reward.version}", flush=True)
        return asyncio.run(_serve(reward, a))
    except ImportError as e:
        print(f"meander-scorer: {e}; pip install 'meander-client[{cls.extra}]' has what it needs", file=sys.stderr)
    except (Fault, ValueError, OSError) as e:
        print(f"meander-scorer: {e}", file=sys.stderr)
    return 1


def _try(reward: Reward, file: str, prompt: str, ground_truth: str) -> int:
    from PIL import Image

    (score,) = reward.score([Input(Image.open(file).convert("RGB"), prompt, ground_truth)])
    if isinstance(score, Exception):
        raise ValueError(str(score))
    print(f"{score.value:.6g}  {score.detail}".rstrip())
    return 0


async def _serve(reward: Reward, a: argparse.Namespace) -> int:
    stop = asyncio.Event()

    def end() -> None:
        if stop.is_set():  # a second signal does not wait
            os._exit(1)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    async with connect(a.nats, os.environ.get("MEANDER_NATS_TOKEN") or None, credentials=a.creds, ca=a.tls_ca) as client:
        await Worker(reward, a.batch, a.patience).serve(
            client, a.name, stop, lambda: print(f"answers for nats:{a.name}", flush=True)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
