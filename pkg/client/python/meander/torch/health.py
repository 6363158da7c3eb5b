"""python -m meander.torch.health [--alive] HOST:PORT | /PATH [TOKEN_FILE]: exit status 0 once a worker there is ready.

It asks for hello, as samplers do, and says on stdout what the worker does. 1: it is not ready. With --alive 0 is for
any answer, also of a worker that still loads.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from . import PROTOCOL
from .frames import FrameError, read_frame, write_frame

_SECONDS = 5.0


def ask(address: str, token: str = "") -> tuple[str, str]:
    """The state of the worker at an address (loading, ready, failed, refused; "" without answer), and what it does."""
    try:
        with _connect(address) as stream:
            args = {"protocol": PROTOCOL, "token": token}
            write_frame(stream, {"id": 1, "call": "hello", "args": args}, [])
            frame = read_frame(stream)
    except (OSError, ValueError, FrameError) as e:
        return "", f"{address}: {e}"
    if frame is None:
        return "", f"{address}: ended without an answer"
    header = frame[0]
    hello = header.get("result") or {}
    error = header.get("error") or hello.get("error")
    if error:
        return hello.get("state", "refused"), f"{address}: {error.get('message')}"
    return hello.get("state", ""), f"{address}: {hello.get('detail')}"


def _connect(address: str) -> socket.socket:
    if address.startswith("/"):
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(_SECONDS)
        stream.connect(address)
        return stream
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _SECONDS)


def main() -> None:
    """Asks the worker that the arguments name."""
    args = [a for a in sys.argv[1:] if a != "--alive"]
    if not 1 <= len(args) <= 2:
        sys.exit("usage: python -m meander.torch.health [--alive] HOST:PORT | /PATH [TOKEN_FILE]")
    token = Path(args[1]).read_text("utf-8").strip() if len(args) == 2 else ""
    state, detail = ask(args[0], token)
    print(detail)
    sys.exit(0 if state == "ready" or (state and "--alive" in sys.argv) else 1)


if __name__ == "__main__":
    main()
