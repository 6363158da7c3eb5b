#!/usr/bin/env python3
"""A reward function as an HTTP server: how bright is the image?

The score is the mean luma (ITU-R BT.601) of the pixels, 0 black to 1 white. Python's standard
library is all it needs.

    python http_server.py --port 8900
    meander run --scorers scorers.yaml --reward http:bright 'a red sign that says "OPEN"'
"""

import argparse
import asyncio
import base64
import hmac
import inspect
import json
import os
import signal
import struct
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROTOCOL = 1
MAX_BODY = 64 << 20
MAX_PIXELS = 1 << 26


def decode_png(data):
    """Width, height and RGB bytes of an 8-bit RGB or RGBA PNG file without interlacing."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("no PNG file")
    header, packed, at = None, b"", 8
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", data[at + 8 : at + 21])
        elif kind == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = header
    channels = {2: 3, 6: 4}.get(colour)
    if depth != 8 or channels is None or interlaced or width * height > MAX_PIXELS:
        raise ValueError("want 8-bit RGB without interlacing")
    stride = width * channels
    raw = zlib.decompressobj().decompress(packed, (stride + 1) * height)
    if len(raw) != (stride + 1) * height:
        raise ValueError("PNG file ends early")
    rows, above = [], bytearray(stride)
    for y in range(height):
        start = y * (stride + 1)
        how, row = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for i in range(stride):
            left = row[i - channels] if i >= channels else 0
            up = above[i]
            corner = above[i - channels] if i >= channels else 0
            if how == 1:
                row[i] = (row[i] + left) & 255
            elif how == 2:
                row[i] = (row[i] + up) & 255
            elif how == 3:
                row[i] = (row[i] + (left + up) // 2) & 255
            elif how == 4:
                p = left + up - corner
                nearest = min((left, up, corner), key=lambda v: abs(p - v))
                row[i] = (row[i] + nearest) & 255
        rows.append(bytes(row) if channels == 3 else bytes(b for i, b in enumerate(row) if i % 4 != 3))
        above = row
    return width, height, b"".join(rows)


def brightness(data):
    width, height, rgb = decode_png(data)
    return (0.299 * sum(rgb[0::3]) + 0.587 * sum(rgb[1::3]) + 0.114 * sum(rgb[2::3])) / (255 * width * height)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        token = os.environ.get("SCORE_TOKEN", "")
        length = int(self.headers.get("Content-Length") or -1)
        if token and not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()
        ):
            return self.reply(401, {"error": "wrong or missing token"})
        if not 0 <= length <= MAX_BODY:
            return self.reply(413, {"error": f"body of {length} bytes; must be at most {MAX_BODY}"})
        try:
            request = json.loads(self.rfile.read(length))
            samples = request["samples"]
            if request["v"] != PROTOCOL or not isinstance(samples, list):
                raise ValueError(f"want a list of samples, protocol {PROTOCOL}")
        except (ValueError, KeyError, TypeError) as e:
            return self.reply(400, {"error": f"{type(e).__name__}: {e}"})
        scores, errors = [], []
        for sample in samples:  # one bad image fails alone
            try:
                score = brightness(base64.b64decode(sample["image"]))
                if inspect.isawaitable(score):  # an async function, too
                    score = asyncio.run(score)
                scores.append(score)
                errors.append(None)
            except Exception as e:
                scores.append(None)
                errors.append(f"{type(e).__name__}: {e}")
        self.reply(200, {"scores": scores, "errors": errors})

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status != 200:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, form, *args):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8900, help="port; 0: any free one (default %(default)s)")
    args = parser.parse_args()
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"listening on http://{args.host}:{server.server_address[1]}/score", flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    sys.exit(main())
