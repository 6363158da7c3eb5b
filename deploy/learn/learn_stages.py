#!/usr/bin/env python3
"""Two models learn from one reward: sums writes the answer to a sum, signs paints a sign that says it, and glyph reads
whether that is right. Two processes of meander-train read one run, each its stage. Once a seed and a set of trained
stages, on a pipeline of its own:

    learn_stages.py [--seeds 0 1 2] [--kinds both think paint] [--out FOLDER] [--meander bin/meander]

What is held out are sums that are not trained on, drawn and rated by the pipeline before and after with equal noise. A
run that has its result is not made again. MARGIN is how much better two trained lanes must be than the better of one,
and than none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meander
from learn import ROOT, TRAINERS, Found, beside, compare, pipeline, records

COLOURS = ("red", "blue", "green", "black", "orange", "purple", "brown", "gray")
HELD_OUT, SAMPLES, MARGIN = 100, 4, 0.10
STEPS, PATIENCE = 3, 1200.0
RUNS = {"both": ("think", "paint"), "think": ("think",), "paint": ("paint",)}
COMMON = [
    "--groups", "16", "--group-size", "8", "--beta", "0", "--ema", "0", "--no-stop", "--gold", "", "--sheet", "0",
    "--patience", str(PATIENCE), "--no-tensorboard",
]  # fmt: skip
STAGES = {
    "think": ["--lane", "sums", "--model", str(ROOT / "deploy/models/sums"), "--lr", "4e-3", "--lr-schedule", "linear"],
    "paint": [
        "--lane", "signs", "--model", str(ROOT / "deploy/models/signs"), "--steps", str(STEPS), "--sde-type", "cps",
        "--loss", "diffusion_nft", "--lr", "2e-3", "--lr-schedule", "linear",
    ],
}  # fmt: skip


def main() -> None:
    compare(__doc__, "learn-stages", 0, RUNS, learn, report)


def learn(program: str, out: Path, seed: int, kind: str, updates: int) -> dict:
    """One run, from the checkpoints as they are."""
    trained = RUNS[kind]
    with pipeline(program, out, "signs") as url, sampler(program, out, url):
        base = out.parent / "before.json"  # equal weights and seeds give equal samples, in all runs
        if not base.exists():
            base.write_text(json.dumps(measured(url, out.name, "before")))
        before = json.loads(base.read_text())
        with contextlib.ExitStack() as running:
            commands = [trainer(url, out, seed, trained, stage, updates) for stage in trained]
            trainers = [running.enter_context(beside(command, TRAINERS)) for command in commands]
            while any(t.poll() is None for t in trainers) and not any(t.poll() for t in trainers):
                time.sleep(0.2)
            if failed := [t for t in trainers if t.poll()]:
                sys.exit(failed[0].returncode)
        after = measured(url, out.name, "after")
    print(f"{out.name}: {before:.3f} of the held-out signs right before, {after:.3f} after", flush=True)
    return {"before": before, "after": after, "updates": updates}


def trainer(url: str, out: Path, seed: int, trained: tuple[str, ...], stage: str, updates: int) -> list[str]:
    """The command of the trainer of a stage. That of the last stage publishes, and waits for the other."""
    flags = [*COMMON, *STAGES[stage], "--updates", str(updates), "--seed", str(seed), "--nats", url]
    flags += ["--run", out.name, "--stage", stage, "--out", str(out / stage)]
    if stage == trained[-1]:
        prompts = out / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(p) + "\n" for p in problems(random.Random(seed), 400, trained, False)))
        flags += ["--prompts", str(prompts), *(["--beside", trained[0]] if len(trained) > 1 else [])]
    return [sys.executable, "-m", "meander.train", *flags]


def problems(rng: random.Random, count: int, trained: tuple[str, ...], held_out: bool) -> list[dict]:
    """Prompts of sums of two numbers of two digits. Held out are one in five pairs, by their digits."""
    out = []
    while len(out) < count:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if ((31 * a + 7 * b) % 5 == 0) != held_out:
            continue
        think = meander.stage("think", model="sums", text={"temperature": 1.3, "tokens_per_event": 8},
                              **({} if "think" in trained else {"frozen": True}))  # fmt: skip
        paint = meander.stage("paint", f'a {rng.choice(COLOURS)} sign that says "{{think.text}}"', model="signs",
                              steps=STEPS, **({} if "paint" in trained else {"frozen": True}))  # fmt: skip
        truth = [{"name": "glyph", "stage": "paint", "ground_truth": str(a + b)}]
        out.append({"prompt": f"{a}+{b}=?", "reward": truth, **meander.stages(think, paint)})
    return out


def measured(url: str, run: str, when: str) -> float:
    """The share of held-out signs that say the true sum to the letter, by the newest weights of both lanes."""

    async def ask() -> float:
        asked = problems(random.Random(13), HELD_OUT, (), True)
        async with meander.connect(url) as client:
            versions = {lane: await newest(client, lane) for lane in ("sums", "signs")}
            for i, p in enumerate(asked):
                for s in p["stages"]:
                    s["min_policy_version"] = versions[s["model"]]
                text = p.pop("prompt")
                await client.publish(
                    f"{run}-{when}", text, timeout=PATIENCE, uid=f"h{i:03d}", group_size=SAMPLES, seed=1000 + i,
                    validation=True, batch={"id": "held-out", "groups": HELD_OUT}, **p,
                )  # fmt: skip
            batch = await asyncio.wait_for(anext(client.batch_events(f"{run}-{when}")), PATIENCE)
            metrics = {m["name"]: m["value"] for m in batch["metrics"]}
            return next(v for k, v in metrics.items() if k.endswith(f"glyph/exact/mean@{SAMPLES}"))

    return asyncio.run(ask())


async def newest(client: meander.Client, lane: str) -> int:
    """The version of the weights of a lane, once a sampler serves it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return int((await meander.policy.policy(client, lane))["policy_version"])
        except meander.policy.NoPolicy:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def sampler(program: str, out: Path, url: str) -> Iterator[None]:
    """The sampler of the second lane; it ends with the run, and the run with it."""
    binary, ended = str(Path(program).with_name("meander-sampler")), threading.Event()
    command = [binary, "--nats-url", url, "--health-addr", "", "--model", "sums", "--batch", "64", "--threads", "1"]
    with beside(command, os.environ, out / "sampler.log") as process:

        def watch() -> None:
            process.wait()
            if not ended.is_set():
                print(f"the sampler of sums has ended; why is in {out / 'sampler.log'}", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def report(found: Found, axes: Any) -> None:
    """The table and the curves of deploy/bench/learn-stages.md."""
    print("\n| trained | seed | held out before | after | gained | seconds |\n| --- | --- | --- | --- | --- | --- |")
    by_seed: dict[str, dict[str, dict]] = {}
    for trained, seed, folder, s in found:
        before, after = s["before"], s["after"]
        print(f"| {trained} | {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {s['seconds']:.0f} |")
        full = [r["full"] for r in records(folder / RUNS[trained][-1], "update")]
        by_seed.setdefault(seed, {})[trained] = s
        colour, label = f"C{list(RUNS).index(trained)}", trained if seed == found[0][1] else None
        axes[0].plot(range(1, len(full) + 1), full, color=colour, alpha=0.8, label=label)
        axes[1].plot([0, 1], [before, after], "o-", color=colour)
    axes[0].set(title="right signs of a training batch", xlabel="update", ylim=(0, 1))
    axes[1].set(title="right signs of held-out sums", xticks=[0, 1], xticklabels=["before", "after"], ylim=(0, 1))
    for seed, of in sorted(by_seed.items()):
        if len(of) == len(RUNS):
            best = max(of["think"]["after"], of["paint"]["after"], *(s["before"] for s in of.values()))
            more = of["both"]["after"] - best
            print(f"seed {seed}: both are {more:+.3f} above the best of the others, {best:.3f}; "
                  f"the margin is {MARGIN:.2f}: {'held' if more >= MARGIN else 'missed'}")  # fmt: skip


if __name__ == "__main__":
    main()
