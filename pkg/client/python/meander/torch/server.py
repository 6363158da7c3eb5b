"""The calls of a worker over its connections.

hello, inspect and health are answered at once, while the model is loaded and while it computes; the others wait for
each other. A connection has one call at a time.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from . import PROTOCOL, schedules
from .family import Family, Settings, Size
from .faults import Fault
from .frames import MAX_BODY, FrameError, read_frame, tensors_of, write_frame

if TYPE_CHECKING:
    from .engine import Engine

_log = logging.getLogger("meander.torch")

_OF_RECIPES: dict[str, type] = {
    "conditions": dict,
    "arguments": dict,
    "frames": int,
    "height": int,
    "width": int,
    "guidance": float,
    "steps": int,
}
CALLS: dict[str, dict[str, type]] = {
    "hello": {"protocol": int, "token": str},
    "inspect": {},
    "encode": {"prompts": list, "truncate": bool, **_OF_RECIPES},
    "condition": {"digest": str, "type": str, "frames": int, "height": int, "width": int, "rate": int},
    "put": {"recipe": dict},
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
    "decode": {"frames": int, "height": int, "width": int, "handle": str},
    "encode_media": {"frames": int, "height": int, "width": int},
    "modules": {},
    "load": {"weights": str, "kind": str, "modules": list, "files": list},
    "unload": {"weights": str},
    "memory": {},
    "health": {},
}
"""The arguments of each call and their types; _OPTIONAL are those that may be left out."""
_OPTIONAL = {
    ("velocity", "states"), ("load", "modules"), ("load", "files"), ("hello", "token"), ("encode", "truncate"),
    ("condition", "rate"), ("put", "recipe"), ("decode", "handle"), *(("encode", name) for name in _OF_RECIPES),
}  # fmt: skip
_ALWAYS = ("hello", "inspect", "health")
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "ftfy")
_CONNECTIONS = 64  # after login
_NEWCOMERS = 64  # before login: as many as could come in at once, so that they only push out strangers
_LOGIN_SECONDS = 30.0
_ACCEPT_AGAIN_SECONDS = 0.1
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Options of TCP, of which each platform has some: a peer that is silent for a minute is asked, and given up."""


class Worker:
    """A model and its state, shared by the connections.

    family gives the card. load makes the engine, in a thread of its own, and says what it does; what it raises is the
    state "failed".
    """

    def __init__(self, family: Family, settings: Settings, token: str = ""):
        self.family, self.settings, self.token = family, settings, token
        self.engine: Engine | None = None
        self.error: Fault | None = None
        self.detail, self.import_s, self.load_s = "starting", 0.0, 0.0
        self.told = list[dict[str, Any]]()
        """The schedules of the installed diffusers, once it is loaded."""
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
                engine.within(engine.check_decoder)
                self.told = schedules.told(self.family)
            self.load_s = time.monotonic() - began - self.import_s
            if engine.device.type == "cuda":
                self._gpu = "/" + torch.cuda.get_device_name(engine.device).replace(" ", "-").replace("/", "-")
            self.settings = replace(self.settings, device=str(engine.device), dtype=engine.dtype)  # perhaps auto before
            _keep_memory()
            self._say("ready")
            self.engine = engine
        except Fault as e:
            self.error = e
        except Exception as e:
            if not (missing := _lacks_compiler(e)):
                _log.error("%s", traceback.format_exc())
            self.error = missing or Fault(_class_of(e, loading=True), f"{type(e).__name__}: {e}"[:2000])
        if self.error:
            self.detail = "failed"
            _log.error("error: %s", self.error)

    def answer(
        self,
        header: dict[str, Any],
        body: np.ndarray | None,
        send: Callable[[dict[str, Any], list[tuple[str, np.ndarray]]], None],
    ) -> None:
        """Computes one call and sends its answer, before a stop ends the process. body None: no memory for it."""
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
                reply, tensors = {"id": header["id"], "error": fault.answer()}, []
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
        v, s = self.versions(), self.settings
        encoders = f"/encoders-{s.encoders}" if s.encoders and s.encoders != s.device else ""
        return (
            f"torch-{v['torch'].partition('+')[0]}/{s.device.partition(':')[0]}{self._gpu}/{s.dtype}"
            f"/diffusers-{v['diffusers']}/transformers-{v['transformers']}{'/ftfy' if v['ftfy'] else ''}{encoders}"
            f"{''.join(f'/{flag}' for flag in self.family.flags)}"
            f"{'/vae-tiling' if s.vae_tiling else ''}{'/compiled' if s.compile else ''}"
            f"/{'' if s.deterministic else 'non'}deterministic"
        )

    def _say(self, detail: str) -> None:
        self.detail = detail
        _log.info("%s", detail)

    def _compute_call(
        self, header: dict[str, Any], body: np.ndarray | None
    ) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
        call, args = _checked(header)
        if call in _ALWAYS:
            return getattr(self, "_" + call)(args), []
        if body is None:
            raise Fault("memory", f"{call}: main memory is too small for the tensors of the call")
        tensors = tensors_of(header, body)
        engine = self.engine
        if engine is None:
            raise self.error or Fault("worker", f"{call}: still loading; wait until hello says ready")
        import torch

        with self._compute, torch.no_grad():  # the mode is one of the thread
            self._call, self._since = call, time.monotonic()
            try:
                return engine.within(lambda: self._in_engine(engine, call, args, tensors))
            finally:
                self._call, self._since = "", time.monotonic()

    def _in_engine(
        self, engine: Engine, call: str, args: dict[str, Any], tensors: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
        if not engine.takes_recipes:
            args = self._without_recipe(call, args)
        elif call == "encode":
            if tensors:
                raise Fault("protocol", "encode: takes no tensors")
            return engine.encode(**args)
        size = Size(args.pop("frames", 1), args.pop("height", 0), args.pop("width", 0))
        takes: dict[str, dict[str, Any]] = {
            "velocity": {"size": size, "tensors": tensors},
            "decode": {"size": size, "tensors": tensors},
            "condition": {"size": size, "tensors": tensors},
            "encode_media": {"size": size, "tensors": tensors},
            "put": {"tensors": tensors},
            "load": {"tensors": tensors},
        }
        if tensors and call not in takes:
            raise Fault("protocol", f"{call}: takes no tensors")
        return getattr(engine, call)(**args, **takes.get(call, {}))

    def _without_recipe(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call to a family that takes texts alone. Fault of class protocol: there are others."""
        own = {"encode": _OF_RECIPES.keys(), "put": {"recipe"}, "decode": {"handle"}}.get(call, set())
        if call == "condition" or (given := [n for n in own if args[n]]):
            what = call if call == "condition" else f"{call}: {given[0]}"
            raise Fault("protocol", f"{what}: must be absent: {self.family.folder.class_name} takes texts alone")
        return {n: v for n, v in args.items() if n not in own}

    def _hello(self, args: dict[str, Any]) -> dict[str, Any]:
        if args["protocol"] != PROTOCOL:
            raise Fault(
                "protocol", f"protocol: {args['protocol']}; must be {PROTOCOL}, install the same version of both sides"
            )
        state = self.state  # before the rest, which loading changes first
        out = {
            "protocol": PROTOCOL,
            "class": self.family.folder.class_name,
            "card": self._card(),
            "device": self.settings.device,
            "dtype": self.settings.dtype,
            "backend": self.backend(),
            "fingerprint": self.family.folder.fingerprint,
            "versions": self.versions(),
            "limits": {"body_bytes": MAX_BODY, "rows": self.settings.max_rows},
            "state": state,
            "import_s": self.import_s,
            "load_s": self.load_s,
            "detail": self.detail,
        }
        return {**out, "error": self.error.answer()} if self.error else out

    def _inspect(self, args: dict[str, Any]) -> dict[str, Any]:
        if self.engine is None and not self.told:
            self.told = schedules.told(self.family)
        return {"card": self._card()}

    def _card(self) -> dict[str, Any]:
        return self.family.card() | {"told": self.told}

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
    """Accepts connections on a listening socket and answers calls until it is closed.

    A connection has a place of its own once it knows the token. Before that it is one of the newcomers, of which the
    oldest gives way to a new one: strangers who hold connections open keep no client out.
    """

    def __init__(self, worker: Worker, listener: socket.socket, tls: ssl.SSLContext | None = None):
        self.worker, self.listener, self.tls = worker, listener, tls
        self._changed = threading.Condition()
        self._newcomers: dict[int, socket.socket] = {}  # by number, the oldest first
        self._accepted = self._inside = 0

    def run(self) -> None:
        """Returns when the listening socket is closed."""
        while self.listener.fileno() >= 0:
            try:
                stream, _ = self.listener.accept()
                number = self._greet(stream)
                try:
                    threading.Thread(target=self._serve, args=(stream, number), daemon=True).start()
                except BaseException:
                    self._part(stream, number, inside=False)
                    raise
            # A peer that left again; or no file descriptor, thread or memory is free.
            except (OSError, RuntimeError, MemoryError) as e:
                _log.warning("accept: %s", e)
                time.sleep(_ACCEPT_AGAIN_SECONDS)

    def _greet(self, stream: socket.socket) -> int:
        """Makes a connection the last of the newcomers and returns its number; the first gives way."""
        with self._changed:
            self._accepted += 1
            if len(self._newcomers) >= _NEWCOMERS:
                oldest = next(iter(self._newcomers))
                with contextlib.suppress(OSError):
                    # Not that of a TLS stream, which is not for two threads.
                    socket.socket.shutdown(self._newcomers[oldest], socket.SHUT_RDWR)
                del self._newcomers[oldest]
                self._changed.notify_all()
            self._newcomers[self._accepted] = stream
            return self._accepted

    def _admit(self, number: int) -> None:
        """Gives a newcomer a place, and waits for one. FrameError: it had to give way."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside < _CONNECTIONS or number not in self._newcomers)
            if self._newcomers.pop(number, None) is None:
                raise FrameError("gave way to another one before login")
            self._inside += 1

    def _part(self, stream: socket.socket, number: int, inside: bool) -> None:
        with self._changed:
            self._newcomers.pop(number, None)
            stream.close()
            self._inside -= inside
            self._changed.notify_all()

    def _serve(self, stream: socket.socket, number: int) -> None:
        inside = False

        def admit() -> None:
            nonlocal inside
            self._admit(number)
            inside = True
            stream.settimeout(None)

        try:
            if stream.family != socket.AF_UNIX:
                _prepare(stream)
            if self.tls is not None:
                with self._changed:  # the stream that gives way changes, too
                    stream = self.tls.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
                    if number in self._newcomers:
                        self._newcomers[number] = stream
                stream.do_handshake()
            serve(stream, self.worker, admit)
        except (OSError, FrameError, MemoryError) as e:
            _log.info("connection: %s", e)
        finally:
            self._part(stream, number, inside)


def _prepare(stream: socket.socket) -> None:
    """Options of a TCP connection."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.settimeout(_LOGIN_SECONDS)


def serve(stream: socket.socket, worker: Worker, admit: Callable[[], None] = lambda: None) -> None:
    """Answers the calls of one connection until it ends; admit is called once it may make calls.

    FrameError, OSError: it cannot go on.
    """
    trusted = not worker.token
    if trusted:
        admit()
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
            admit()
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


def _lacks_compiler(e: Exception) -> Fault | None:
    """The fault of --compile on a machine without a compiler; torch wraps that error, by version in other types."""
    if "InvalidCxxCompiler" in f"{type(e).__name__}: {e}" or "Failed to find C compiler" in str(e):  # that of triton
        return Fault("config", "--compile: no C++ compiler; install g++ (or clang), or leave out --compile")
    return None


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
