"""meander-train: the command."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import nats.errors

from .config import Config, add_flags, flag

_HELP = """Trains an adapter (LoRA) of a served model by Flow-GRPO, from the stream of a meander pipeline alone:
publishes prompts, reads groups with their latents, log-probs and advantages, takes a step, pushes the adapter, which
the samplers take over between two steps, and evaluates on held-out prompts through the same pipeline.

  meander up &
  meander-train --prompts deploy/learn/prompts.txt --held-out deploy/learn/validation.jsonl \\
    --test deploy/learn/held_out.jsonl --out meander-out/learn

Several processes, on one machine or several that share --out (--run-name, for torchrun has a --run of its own):

  torchrun --nproc-per-node 4 -m meander.train --run-name learn --prompts ...

With --shard, too, each of them has a part of the network.

Run again with the same --out it goes on where it was, after a crash too. --follow reads a run that another trainer
publishes, for a second opinion.

In --out: log.jsonl, log.csv, tensorboard/, curve.png, before.png and after.png, checkpoint/ and best/, the best adapter
by the reader that is not rewarded (--gold), in PEFT's form."""


def main() -> None:
    """The command line. It ends with a line on stderr and status 1 after an error."""
    parser = argparse.ArgumentParser(
        prog="meander-train", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    replays = _add_replay(parser)
    try:
        given = vars(parser.parse_args())
        if given["replay"]:
            return _replay(parser)
        if lost := next((name for name in replays if given[name] not in (None, False)), ""):
            parser.error(f"--{lost}: is for --replay")
        config = Config(**{f.name: given[f.name] for f in dataclasses.fields(Config)})
        config.trained, config.rewards()
    except ValueError as e:
        parser.error(str(e))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out = Path(config.out)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a script starts in the background ignores it
    try:
        try:
            from . import losses
            from .loop import train
        except ImportError as e:
            sys.exit(f"meander-train: {e}; pip install 'meander-rl[train]' has what it needs")
        try:
            losses.of(config)
        except ValueError as e:
            parser.error(str(e))
        if os.environ.get("RANK", "0") == "0":
            _keep_settings(config, out)
        summary = asyncio.run(train(config))
    except KeyboardInterrupt:
        kept = (out / "checkpoint").exists()
        on = f"the same command goes on from {out}/checkpoint" if kept else "nothing is trained yet"
        print(f"\ninterrupted; {on}", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM if _terminated else 1)
    except nats.errors.Error as e:
        on = f"when {config.nats} and its pipeline answer again, the same command goes on"
        sys.exit(f"meander-train: {e or type(e).__name__}; {on}")
    except (ValueError, RuntimeError, TimeoutError, OSError, FloatingPointError) as e:
        full = f"{out}: " if getattr(e, "errno", None) == errno.ENOSPC else ""
        sys.exit(f"meander-train: {full}{e or type(e).__name__}")
    if summary:
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(table(summary))


def _add_replay(parser: argparse.ArgumentParser) -> list[str]:
    """Adds the flags of the time machine, and returns their names."""
    group = parser.add_argument_group("time machine")
    names = [
        group.add_argument(*flags, **options).dest for flags, options in (
            (("--replay",), {"metavar": "RUN@K|FILE[@K]", "help": "make update K of a stored run again, or that of an "
             "archive or a bundle, on the CPU unless --device says otherwise; settings that are given are compared "
             "with its own, as --loss gspo"}),
            (("--micro",), {"type": int, "metavar": "N", "help": "only the gradient of micro-batch N, from 0"}),
            (("--bundle",), {"metavar": "FILE", "help": "write what the update is made of: an archive for --replay"}),
            (("--keep",), {"metavar": "FILE", "help": "write its gradients and steps, for --against"}),
            (("--against",), {"metavar": "FILE", "help": "compare with what another version has kept"}),
            (("--json",), {"action": "store_true", "help": "print the verdict as a line of JSON"}),
        )
    ]  # fmt: skip
    return names[1:]


def _replay(parser: argparse.ArgumentParser) -> None:
    """Makes an update again, with the flags that are given alone."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args())
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        from .replay import main as replay
    except ImportError as e:
        sys.exit(f"meander-train: {e}; pip install 'meander-rl[train]' has what it needs")
    replay(given)


_terminated = False


def _interrupt(*_: Any) -> None:
    """SIGTERM, of schedulers, ends a run as Ctrl-C does: the lease of the lane is given back."""
    global _terminated
    _terminated = True
    signal.raise_signal(signal.SIGINT)


def _keep_settings(config: Config, out: Path) -> None:
    """Writes config.json, and says which settings are others than those before."""
    out.mkdir(parents=True, exist_ok=True)
    file, settings = out / "config.json", dataclasses.asdict(config) | {"token": ""}
    if file.exists() and (out / "checkpoint").exists():
        before = json.loads(file.read_text())
        changed = [f"--{flag(n)} {before[n]} -> {v}" for n, v in settings.items() if before.get(n, v) != v]
        if changed:
            logging.getLogger("meander.train").warning("settings of this run have changed: %s", ", ".join(changed))
    file.write_text(json.dumps(settings, indent=1) + "\n")


def table(summary: dict[str, Any]) -> str:
    """The summary for people: what was measured before, at the best and at the last update, and where the time went."""
    lines = []
    if "best" in summary:
        columns = [summary["before"], summary["best"], summary["last"]]
        lines.append(
            f"{'':12}{'before':>10}{'best, ' + str(columns[1]['update']):>12}{'last, ' + str(columns[2]['update']):>12}"
        )
        rows = {
            name: [c["rates"].get(name) for c in columns] for name in columns[0]["rates"]
        } | {"diversity": [c["diversity"] for c in columns]}
        for name, values in rows.items():
            if None not in values:
                lines.append(f"{name:12}{values[0]:>10.3f}{values[1]:>12.3f}{values[2]:>12.3f}")
    if "test" in summary:
        tests = summary["test"]
        names = [*tests["base"]["rates"], "diversity"]
        lines += ["", "test, looked at once:", " " * 18 + "".join(f"{name:>10}" for name in names)]
        for of, r in tests.items():
            values = [*r["rates"].values(), r["diversity"]]
            lines.append(f"{of:18}" + "".join(f"{v:>10.3f}" for v in values if v is not None))
        lines.append("")
    seconds = ", ".join(f"{name} {s:.0f}" for name, s in summary["seconds"].items())
    lines.append(f"{summary['updates']} updates; seconds: {seconds}")
    lines.append(f"{summary['waiting']:.0%} of the time of updates waits for rollouts")
    if summary["stopped"]:
        lines.append(f"stopped: {summary['stopped']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
