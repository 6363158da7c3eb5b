#!/usr/bin/env python3
"""A reward function in an ONNX file, as a worker: images [N, 3, H, W] in float32 of 0 to 1 in, a number for each out.

    pip install meander-rl pillow onnxruntime
    python onnx_worker.py aesthetic.onnx --name aesthetic &
    meander run -n 4 --reward nats:aesthetic 'a red fox'
"""

import argparse
import asyncio
import hashlib
import pathlib
import signal

import meander
import numpy as np
import onnxruntime
from meander.rewards.reward import Reward, Score
from meander.rewards.worker import Worker


class Onnx(Reward):
    def __init__(self, file):
        self.network = onnxruntime.InferenceSession(file, providers=onnxruntime.get_available_providers())
        self.input = self.network.get_inputs()[0]
        self.version = "sha256:" + hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()

    version = ""  # changes with the file

    def score(self, samples):
        """Images of other sizes than the network's are scaled to it; the preparation of your network goes here."""
        side = tuple(n if isinstance(n, int) else 224 for n in self.input.shape[:1:-1])
        images = np.stack([np.asarray(s.image.resize(side)) for s in samples])
        values = self.network.run(None, {self.input.name: images.transpose(0, 3, 1, 2).astype(np.float32) / 255})[0]
        return [Score(float(v)) for v in values.reshape(len(samples))]


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the network")
    parser.add_argument("--name", default="onnx", help="prompts ask for nats:NAME (%(default)s)")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="NATS server (%(default)s)")
    args = parser.parse_args()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with meander.connect(args.nats) as client:
        await Worker(Onnx(args.file)).serve(
            client, args.name, stop, lambda: print(f"answers for nats:{args.name}", flush=True)
        )


asyncio.run(main())
