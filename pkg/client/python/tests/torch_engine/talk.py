"""A client of the protocol, written from its text and not from the worker's code."""

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np

PACKAGE = Path(__file__).parents[2]
DTYPES = {"f32": np.dtype("<f4"), "u8": np.dtype("u1")}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, kind, message):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class Client:
    """One connection. frames is of the samples of its calls."""

    def __init__(self, stream):
        self.stream, self.id, self.frames = stream, 0, 1

    def __call__(self, call, args=None, tensors=None):
        """Returns the result and the tensors by name. Refused: the answer is an error."""
        result, tensors = self.call(call, args, tensors)
        return result, dict(tensors)

    def call(self, call, args=None, tensors=None):
        """The same with the tensors in order, as (name, array): those of several prompts have the same names."""
        self.id += 1
        self.send({"id": self.id, "call": call, "args": args or {}}, tensors or {})
        header, body = self.receive()
        assert header["id"] == self.id
        if "error" in header:
            raise Refused(header["error"]["class"], header["error"]["message"])
        out = []
        for d in header["tensors"]:
            data = body[d["at"] : d["at"] + d["bytes"]]
            out.append((d["name"], np.frombuffer(data, DTYPES[d["dtype"]]).reshape(d["shape"])))
        return header["result"], out

    def send(self, header, tensors):
        described, body = [], b""
        for name, a in tensors.items():
            data = np.ascontiguousarray(a).tobytes()
            kind = "u8" if a.dtype == np.uint8 else "f32"
            described.append({"name": name, "dtype": kind, "shape": list(a.shape), "at": len(body), "bytes": len(data)})
            body += data
        self.send_raw(msgpack.packb({**header, "tensors": described}), body)

    def send_raw(self, header, body=b""):
        self.stream.sendall(struct.pack("<IQ", len(header), len(body)) + header + body)

    def receive(self):
        n, m = struct.unpack("<IQ", self.read(12))
        return msgpack.unpackb(self.read(n)), self.read(m)

    def read(self, n):
        out = b""
        while len(out) < n:
            part = self.stream.recv(min(n - len(out), 1 << 20))
            if not part:
                raise EOFError(f"the connection ended after {len(out)} of {n} bytes")
            out += part
        return out

    def ready(self, token=""):
        """Returns what hello says once the worker no longer loads; the worker answers at once, so it is asked again."""
        while True:
            hello, _ = self("hello", {"protocol": 2, "token": token})
            if hello["state"] != "loading":
                return hello
            time.sleep(0.05)

    def encode(self, *texts, truncate=False):
        """Returns the handle, the tensors by the card's names, and the cut of each prompt."""
        result, arrays = self.call(
            "encode", {"prompts": [[t] if isinstance(t, str) else t for t in texts], "truncate": truncate}
        )
        return [(i["handle"], dict(arrays[k] for k in i["tensors"]), i["cut"]) for i in result["items"]]

    def velocity(self, x, sigmas, handles, height, width, guidance=None, weights="", states=()):
        args = {
            **({"states": list(states)} if states else {}),
            "sigmas": [float(s) for s in sigmas],
            "handles": list(handles),
            "guidance": [float(g) for g in guidance or [0.0] * len(handles)],
            "frames": self.frames,
            "height": height,
            "width": width,
            "weights": weights,
        }
        return self("velocity", args, {"x": np.asarray(x, np.float32)})[1]["v"]

    def decode(self, x, height, width):
        size = {"frames": self.frames, "height": height, "width": width}
        return self("decode", size, {"x": np.asarray(x, np.float32)})[1]["media"]


def handle_of(tensors):
    """The handle of a conditioning by the text of the protocol."""
    h = hashlib.sha256()
    for name, a in tensors.items():
        h.update(
            name.encode()
            + b"\0"
            + struct.pack("<I", a.ndim)
            + b"".join(struct.pack("<I", n) for n in a.shape)
            + a.astype("<f4").tobytes()
        )
    return h.hexdigest()


def frames_of(card):
    """The frames that tests take: three latent frames of a video, or one image."""
    return 1 if card["max_frames"] == 1 else 1 + 2 * card["latent"]["temporal"]


def latents(card, n, height, width, seed=0, frames=None):
    """Standard normal latents [n, S, C] of a card."""
    c = card["latent"]
    deep = ((frames or frames_of(card)) - 1) // c["temporal"] + 1
    edge, channels = c["scale"] * c["patch"][1], c["channels"] * c["patch"][1] * c["patch"][2]
    tokens = deep * (height // edge) * (width // edge)
    return np.random.default_rng(seed).standard_normal((n, tokens, channels), np.float32)


def start(folder, *args, stderr=None, **environment):
    """Starts a worker; its stdin closes with this process."""
    command = [sys.executable, "-m", "meander.torch", "--model", str(folder), "--exit-with-stdin"]
    command += ["--device", "cpu", "--dtype", "f32", "--threads", "1", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env, text=True)


def connect(process):
    """Returns a connection once the worker says that it listens, and what it said."""
    said = json.loads(process.stdout.readline())
    if said["address"].startswith("unix:"):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(said["address"][5:])
    else:
        host, _, port = said["address"].rpartition(":")
        stream = socket.create_connection((host, int(port)))
    return Client(stream), said
