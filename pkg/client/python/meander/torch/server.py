"""The calls of a worker over its connections.

hello, inspect and health are answered at once, while the model is loaded and while it computes; the others wait for
each other. A connection has one call at a time.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from . import PROTOCOL
from .family import Family, Size
from .faults import Fault
from .frames import MAX_BODY, FrameError, read_frame, tensors_of, write_frame

if TYPE_CHECKING:
    from .engine import Engine

_log = logging.getLogger("meander.torch")

CALLS: dict[str, dict[str, type]] = {
    "hello": {"protocol": int, "token": str},
    "inspect": {},
    "encode": {"prompts": list, "truncate": bool},
    "put": {},
    "velocity": {
        "states": list,
        "sigmas": list,
        "handles": list,
        "guidance": list,
        "frames": int,
        "height": int,
        "width": int,
        "weights": str,
    },
    "decode": {"frames": int, "height": int, "width": int},
    "encode_media": {"frames": int, "height": int, "width": int},
    "modules": {},
    "load": {"weights": str, "kind": str, "modules": list, "files": list},
    "unload": {"weights": str},
    "memory": {},
    "health": {},
}
"""The arguments of each call and their types; _OPTIONAL are those that may be left out."""
_OPTIONAL = {("velocity", "states"), ("load", "modules"), ("load", "files"), ("hello", "token"), ("encode", "truncate")}
_ALWAYS = ("hello", "inspect", "health")
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "ftfy")
_CONNECTIONS = 64
_LOGIN_SECONDS = 30.0
_ACCEPT_AGAIN_SECONDS = 0.1


class Worker:
    """A model and its state, shared by the connections.

    family gives the card. load makes the engine, in a thread of its own, and says what it does; what it raises is the
    state "failed".
    """

    def __init__(
        self,
        family: Family,
        device: str,
        dtype: str,
        deterministic: bool = False,
        encoders: str = "",
        token: str = "",
        rows: int = 64,
    ):
        self.family, self.device, self.dtype, self.deterministic, self.encoders = (
            family,
            device,
            dtype,
            deterministic,
            encoders,
        )
        self.token, self.rows, self.compile, self.vae_tiling = token, rows, False, False
        self.engine: Engine | None = None
        self.error: Fault | None = None
        self.detail, self.import_s, self.load_s = "starting", 0.0, 0.0
        self._gpu = ""
        self._compute = threading.Lock()
        self._busy = threading.Condition()
        self._calls, self._stopping = 0, False
        self._call, self._since = "", time.monotonic()

    @property
    def state(self) -> str:
        """loading, ready or failed."""
        return "failed" if self.error else "ready" if self.engine else "loading"

    def load(self, make: Callable[[Callable[[str], None]], Engine]) -> None:
        """Imports torch and makes the engine; whatever goes wrong is kept as the error of hello."""
        try:
            began = time.monotonic()
            self._say("importing torch")
            import torch

            self.import_s = time.monotonic() - began
            with torch.no_grad():
                engine = make(self._say)
            self.load_s = time.monotonic() - began - self.import_s
            if engine.device.type == "cuda":
                self._gpu = "/" + torch.cuda.get_device_name(engine.device).replace(" ", "-").replace("/", "-")
            self.device, self.dtype = str(engine.device), engine.dtype  # until now perhaps auto
            _keep_memory()
            self._say("ready")
            self.engine = engine
        except Fault as e:
            self.error = e
        except Exception as e:
            _log.error("%s", traceback.format_exc())
            self.error = Fault(_class_of(e, loading=True), f"{type(e).__name__}: {e}"[:2000])
        if self.error:
            self.detail = "failed"
            _log.error("error: %s", self.error)

    def answer(
        self,
        header: dict[str, Any],
        body: np.ndarray,
        send: Callable[[dict[str, Any], list[tuple[str, np.ndarray]]], None],
    ) -> None:
        """Computes one call and sends its answer, before a stop ends the process."""
        with self._busy:
            if self._stopping:
                raise FrameError("the worker stops")
            self._calls += 1
        try:
            try:
                result, tensors = self._compute_call(header, body)
                reply = {"id": header["id"], "result": result}
            except Exception as e:
                fault = e if isinstance(e, Fault) else self._fault_of(e)
                reply, tensors = {"id": header["id"], "error": {"class": fault.kind, "message": str(fault)}}, []
            send(reply, tensors)
        finally:
            with self._busy:
                self._calls -= 1
                self._busy.notify_all()

    def stop(self) -> None:
        """Takes no more calls, and returns once the answer of the last is sent."""
        with self._busy:
            self._stopping = True
            self._busy.wait_for(lambda: self._calls == 0)

    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages that decide the bits; "" for one that is not installed."""
        import platform

        return {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}}

    def backend(self) -> str:
        """Names what computes: torch-2.9.1/cpu/f32/diffusers-0.42.1/transformers-5.23.0/ftfy/nondeterministic."""
        v = self.versions()
        encoders = f"/encoders-{self.encoders}" if self.encoders and self.encoders != self.device else ""
        return (
            f"torch-{v['torch'].partition('+')[0]}/{self.device.partition(':')[0]}{self._gpu}/{self.dtype}"
            f"/diffusers-{v['diffusers']}/transformers-{v['transformers']}{'/ftfy' if v['ftfy'] else ''}{encoders}"
            f"{'/vae-tiling' if self.vae_tiling else ''}{'/compiled' if self.compile else ''}"
            f"/{'' if self.deterministic else 'non'}deterministic"
        )

    def _say(self, detail: str) -> None:
        self.detail = detail
        _log.info("%s", detail)

    def _compute_call(
        self, header: dict[str, Any], body: np.ndarray
    ) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
        call, args = _checked(header)
        if call in _ALWAYS:
            return getattr(self, "_" + call)(args), []
        tensors = tensors_of(header, body)
        engine = self.engine
        if engine is None:
            raise self.error or Fault("worker", f"{call}: still loading; wait until hello says ready")
        import torch

        with self._compute, torch.no_grad():  # the mode is one of the thread
            self._call, self._since = call, time.monotonic()
            try:
                return self._in_engine(engine, call, args, tensors)
            finally:
                self._call, self._since = "", time.monotonic()

    def _in_engine(
        self, engine: Engine, call: str, args: dict[str, Any], tensors: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
        size = Size(args.pop("frames", 1), args.pop("height", 0), args.pop("width", 0))
        takes: dict[str, dict[str, Any]] = {
            "velocity": {"size": size, "tensors": tensors},
            "decode": {"size": size, "tensors": tensors},
            "encode_media": {"size": size, "tensors": tensors},
            "put": {"tensors": tensors},
            "load": {"tensors": tensors},
        }
        if tensors and call not in takes:
            raise Fault("protocol", f"{call}: takes no tensors")
        return getattr(engine, call)(**args, **takes.get(call, {}))

    def _hello(self, args: dict[str, Any]) -> dict[str, Any]:
        if args["protocol"] != PROTOCOL:
            raise Fault(
                "protocol", f"protocol: {args['protocol']}; must be {PROTOCOL}, install the same version of both sides"
            )
        state = self.state  # before the rest, which loading changes first
        out = {
            "protocol": PROTOCOL,
            "class": self.family.folder.class_name,
            "card": self.family.card(),
            "device": self.device,
            "dtype": self.dtype,
            "backend": self.backend(),
            "fingerprint": self.family.folder.fingerprint,
            "versions": self.versions(),
            "limits": {"body_bytes": MAX_BODY, "rows": self.rows},
            "state": state,
            "import_s": self.import_s,
            "load_s": self.load_s,
            "detail": self.detail,
        }
        return {**out, "error": {"class": self.error.kind, "message": str(self.error)}} if self.error else out

    def _inspect(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"card": self.family.card()}

    def _health(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"state": self.state, "call": self._call, "since_s": time.monotonic() - self._since, "pid": os.getpid()}

    def _fault_of(self, e: Exception) -> Fault:
        """The fault of any other exception: memory, which is given back, or a bug, whose trace is logged."""
        kind = _class_of(e)
        if kind == "memory" and self.engine is not None:
            self.engine.free_cache()
        if kind == "worker":
            _log.error("%s", "".join(traceback.format_exception(e)))
        return Fault(kind, f"{type(e).__name__}: {e}"[:2000])


class Server:
    """Accepts connections on a listening socket and answers calls until it is closed."""

    def __init__(self, worker: Worker, listener: socket.socket, tls: ssl.SSLContext | None = None):
        self.worker, self.listener, self.tls = worker, listener, tls
        self._room = threading.BoundedSemaphore(_CONNECTIONS)

    def run(self) -> None:
        """Returns when the listening socket is closed."""
        while self.listener.fileno() >= 0:
            self._room.acquire()
            try:
                stream, _ = self.listener.accept()
            except OSError as e:  # a peer that left again, or no file descriptor is free
                self._room.release()
                _log.warning("accept: %s", e)
                time.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            if stream.family != socket.AF_UNIX:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.settimeout(_LOGIN_SECONDS)
            if self.tls is not None:
                stream = self.tls.wrap_socket(stream, server_side=True)
            with stream:
                serve(stream, self.worker)
        except (OSError, FrameError) as e:
            _log.info("connection: %s", e)
        finally:
            stream.close()
            self._room.release()


def serve(stream: socket.socket, worker: Worker) -> None:
    """Answers the calls of one connection until it ends. FrameError, OSError: it cannot go on."""
    trusted = not worker.token
    while (frame := read_frame(stream, MAX_BODY if trusted else 0)) is not None:
        header, body = frame
        if type(header.get("id")) is not int or header["id"] < 0:
            raise FrameError("header: no id; must be a number of at least 0")
        if not trusted:
            if not _knows_token(header, worker.token):
                error = {"class": "config", "message": "token: wrong; must be that of --token-file"}
                write_frame(stream, {"id": header["id"], "error": error}, [])
                return
            trusted = True
            stream.settimeout(None)
        worker.answer(header, body, lambda reply, tensors: write_frame(stream, reply, tensors))
        del frame, header, body  # a large body does not wait for the next call


def _knows_token(header: dict[str, Any], token: str) -> bool:
    args = header.get("args")
    given = args.get("token") if header.get("call") == "hello" and isinstance(args, dict) else None
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


def _checked(header: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The call of a header and its arguments. Fault of class protocol: an unknown call, or other arguments."""
    call, args = header.get("call"), header.get("args")
    if not isinstance(call, str) or call not in CALLS:
        raise Fault("protocol", f"call: {call!r:.80}; must be one of {', '.join(CALLS)}")
    args, known = ({} if args is None else args), CALLS[call]
    if not isinstance(args, dict):
        raise Fault("protocol", f"{call}: args: a {type(args).__name__}; must be a map")
    if unknown := [str(k) for k in args if k not in known]:
        raise Fault("protocol", f"{call}: args: {unknown[0]:.80}: unknown; must be of {', '.join(known) or 'none'}")
    out = {}
    for name, kind in known.items():
        if name not in args and (call, name) not in _OPTIONAL:
            raise Fault("protocol", f"{call}: args: {name}: missing")
        value = args.get(name)
        if value is None and (call, name) in _OPTIONAL:
            value = kind()
        if type(value) is not kind:
            raise Fault("protocol", f"{call}: args: {name}: a {type(value).__name__}; must be a {kind.__name__}")
        out[name] = value
    return call, out


def _class_of(e: Exception, loading: bool = False) -> str:
    from .engine import is_out_of_memory

    if is_out_of_memory(e):
        return "memory"
    # What loading finds in files or packages is no better after a restart.
    return "config" if loading and isinstance(e, OSError | ValueError | ImportError) else "worker"


def _keep_memory() -> None:
    """Has the C library keep memory that is freed, up to a bound: new memory costs a call more than its bytes do."""
    try:
        keep = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not of glibc
        return
    trim_threshold, mmap_threshold = -1, -3  # the names of mallopt(3)
    keep(mmap_threshold, 32 << 20)
    keep(trim_threshold, 256 << 20)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
