"""How a client logs in to the NATS server, and errors for what the server does not allow."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
import secrets
import ssl
import warnings
from typing import Any

import nats
from nats.aio.client import Client as NATS
from nats.aio.msg import Msg

from .._version import __version__
from .wire import BulkParser, Take

_log = logging.getLogger("meander")
_SEED = re.compile(r"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)
_ROLE = re.compile(r"^# role: (\S+)$", re.MULTILINE)
_BARE = re.compile(r"\.CONSUMER\.CREATE\.[^.]+$")
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]*)"')


DEFAULT_URL = "nats://127.0.0.1:4222"
"""Where `meander up` listens."""
_CONTEXT = {
    "url": "url", "token": "token", "user": "user", "password": "password", "ca": "ca", "cert": "cert", "key": "key",
    "inbox_prefix": "inbox_prefix", "jetstream_domain": "js_domain", "jetstream_api_prefix": "js_prefix",
    "tls_first": "tls_first",
}
"""The settings of a context, by their names there; what else it has is no matter of a connection."""


def add_flags(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flags of a command that name the server and how to log in to it, but for the token."""
    p.add_argument("--nats", metavar="URL", help=f"of the pipeline (MEANDER_NATS_URL, else {DEFAULT_URL})")
    p.add_argument("--creds", metavar="FILE", help="credentials of meander auth (MEANDER_NATS_CREDS)")
    p.add_argument("--tls-ca", metavar="FILE", help="authority of the server's certificate (MEANDER_NATS_TLS_CA)")
    p.add_argument(
        "--context", default=os.environ.get("NATS_CONTEXT"), metavar="NAME",
        help="context of the nats command: flags come before it, the other variables after it (NATS_CONTEXT)"
    )


def arguments(a: argparse.Namespace, token: str | None) -> dict[str, Any]:
    """Returns the arguments of connect that the flags, the context and the variables give, in this order."""
    env = os.environ.get
    given = {"url": a.nats, "token": token, "credentials": a.creds, "ca": a.tls_ca}
    context = read_context(a.context) if a.context else {}
    if a.creds or context.keys() & {"token", "credentials", "user"}:
        given["token"] = None
    found = {
        "url": env("MEANDER_NATS_URL", DEFAULT_URL), "ca": env("MEANDER_NATS_TLS_CA"),
        "credentials": env("MEANDER_NATS_CREDS") if not token and not context.keys() & {"token", "user"} else None,
    }
    found |= {k: v for k, v in context.items() if k in found}
    return found | {k: v for k, v in given.items() if v} | {"context": a.context}


def read_context(name: str) -> dict[str, Any]:
    """Reads a context of the nats command, by its name or the full path of its file, as arguments of connect.

    ValueError: there is none, or it has what this client cannot use.
    """
    file = pathlib.Path(name)
    if not file.is_absolute():
        home = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config") / "nats" / "context"
        file = home / f"{name}.json"
        if "/" in name or not file.is_file():
            there = ", ".join(sorted(f.stem for f in home.glob("*.json"))) or "none; 'nats context add' makes one"
            raise ValueError(f"context: {name!r}; must be a file by its full path, or one of those in {home}: {there}")
    held = json.loads(file.read_text())
    for setting in ("nsc", "user_jwt", "socks_proxy", "windows_cert_store"):
        if held.get(setting):
            raise ValueError(f"context {file}: {setting}: set; must be absent: this client cannot use it")
    out = {to: held.get(of) for of, to in _CONTEXT.items()}
    out["credentials"] = held.get("creds") or held.get("nkey")
    for path in ("credentials", "ca", "cert", "key"):
        if out[path]:
            out[path] = os.path.expanduser(os.path.expandvars(out[path]))
    return {k: v for k, v in out.items() if v}


def options(
    token: str | None = None, credentials: str | None = None, ca: str | None = None, cert: str | None = None,
    key: str | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments of nats.connect. credentials is a file of meander auth, or a JWT and its key; the
    others are PEM files.

    ValueError: the file has no credentials, or the arguments exclude each other.
    """
    out: dict[str, Any] = {"token": token}
    if token and credentials:
        raise ValueError("token: excludes credentials; use one of them")
    if (cert is None) != (key is None):
        raise ValueError("cert: needs key, and key needs cert")
    if credentials:
        text = pathlib.Path(credentials).read_text()
        seed = _SEED.search(text)
        if "BEGIN NATS USER JWT" in text:
            out["user_credentials"] = credentials
        elif seed:
            import nkeys

            out["nkeys_seed_str"] = seed[1]
            # The inboxes of a user are named after its key; no other user may subscribe to them.
            out["inbox_prefix"] = "_INBOX." + nkeys.from_seed(seed[1].encode()).public_key.decode()
        else:
            raise ValueError(f"credentials: {credentials}; must have the seed of a user (SU...), or a JWT and its key")
    if ca or cert:
        out["tls"] = ssl.create_default_context(cafile=ca)
        if cert:
            out["tls"].load_cert_chain(cert, key)
    return out


_HEADERS = re.compile(rb"NATS/1.0\r\n(?:[!-9;-~]+: [!-~]+\r\n)+\r\n")  # values without spaces
_HEADER = re.compile(r"([!-9;-~]+): (\S+)\r\n")


class ClearText(Exception):
    """The connection should use TLS, but would not be encrypted."""


class _Connection(NATS):
    """Outlives an answer to a ping that was given up. The library's own would not read on, and nothing would say so."""

    js_api = "$JS.API"  # what the subjects of the JetStream API begin with

    def __init__(self) -> None:
        super().__init__()
        self.bulk: dict[int, Take] = {}
        """By the number of a subscription: what takes its messages, data and raw headers, as they arrive."""
        self._ps = BulkParser(self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """As the library's, which parses all headers of a message, queues it and wakes a task: of small steps that
        takes half of the time. Answers of many messages need none of it."""
        if (take := self.bulk.get(sid)) is None:
            return await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        take(data, headers)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        """As the library's, which looks at each character of a name: of small steps it took a fifth of their time."""
        if headers and _HEADERS.fullmatch(headers):
            return dict(_HEADER.findall(headers.decode()))
        out: dict[str, str] | None = await super()._process_headers(headers)
        return out


class _Secured(_Connection):
    """Sends nothing before the connection uses TLS. The library itself goes on unencrypted if the server offers no TLS,
    even for tls://."""

    looked = False

    def _connect_command(self) -> bytes:  # the first message, with the token or the signature
        self.looked = True
        if not self._server_info.get("tls_required"):
            why = (
                "the server does not want TLS, and a token or signature would be sent in the clear; nothing was sent. "
                "Connect to nats://, without ca, if that is meant"
            )
            # To reconnect, the library must try again: it does so after errors of its own type.
            raise nats.errors.Error(why) if self.is_reconnecting else ClearText(why)
        return super()._connect_command()


async def open_connection(url: str, api: str = "", **options: Any) -> NATS:
    """Calls nats.connect. If the URL or the options ask for TLS, the connection uses TLS or ClearText is raised. api is
    what the subjects of the JetStream API begin with, in place of $JS.API."""
    nc = _Secured() if url.startswith("tls://") or options.get("tls") else _Connection()
    nc.js_api = api or nc.js_api
    try:
        await nc.connect(url.split(",") if "," in url else url, **options)
    except ClearText:
        with contextlib.suppress(Exception):
            await nc.close()
        raise
    if isinstance(nc, _Secured) and not nc.looked:
        await nc.close()
        raise ClearText("this release of nats-py connects in another way than 2.9 to 2.16 do; install one of these")
    return nc


def mark(credentials: str | None) -> str:
    """Returns the prefix for the names of our durable consumers. A user who knows such a name can change the consumer;
    without the credentials the prefix cannot be guessed. Without credentials it is empty: then every user may do
    everything."""
    seed = _SEED.search(pathlib.Path(credentials).read_text()) if credentials else None
    return hashlib.sha256(b"meander consumers " + seed[1].encode()).hexdigest()[:20] if seed else ""


class VersionMismatch(UserWarning):
    """The pipeline is of another release than this client."""


async def compare_versions(nc: NATS, patience: float) -> None:
    """Warns of VersionMismatch if an intake of another release answers. None may run, and what the server does not let
    us ask stays unsaid."""
    try:
        answer = await nc.request("$SRV.INFO.meander-intake", b"", min(patience, 1))
        theirs = str(json.loads(answer.data)["metadata"]["version"])
    except (nats.errors.Error, PermissionError, ValueError, LookupError, TypeError) as e:
        _log.debug("the version of the pipeline is not known: %s", e)
        return
    if theirs.partition("+")[0] != __version__:
        warnings.warn(
            f"the pipeline is meander {theirs}, this client is meander-rl {__version__}: use one release for both. "
            f"pip install 'meander-rl=={theirs.partition('+')[0]}' changes the client; to change the pipeline, start "
            "it again with another program", VersionMismatch, stacklevel=4,
        )


def hint(error: Exception) -> str:
    """Says what to do if the connection fails."""
    text = str(error).lower()
    if "authorization" in text or "authentication" in text:
        return "it does not let us in: connect with credentials or a token that it knows, with ca where it wants TLS"
    if "expired" in text:
        return "the server needs a new certificate (meander auth update), or a clock is wrong"
    if "mismatch" in text or "not valid for" in text:
        return "connect by a name that its certificate has, or give it this one (meander auth update --tls-host)"
    if "certificate" in text:
        return "ca names the authority that signed its certificate"
    return "is a pipeline up? 'meander up' starts one"


class Denials:
    """Turns denied permissions into errors. The server does not answer a denied request; it only sends a note with the
    subject on the connection."""

    def __init__(self, credentials: str | None = None):
        role = _ROLE.search(pathlib.Path(credentials).read_text()) if credentials else None
        self._who = f"role {role[1]}" if role else "this user of the server"
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self.last: Exception | None = None

    async def note(self, error: Exception) -> None:
        """Is the error callback of nats.connect: it ends the requests on the denied subject."""
        self.last = error
        m = _DENIED.search(str(error).lower())
        if not m:
            _log.debug("connection: %s", error)
            return
        waiting = [f for f in self._waiting.get(m[1], ()) if not f.done()]
        for denied in waiting:
            denied.set_result(None)
        if not waiting:
            _log.error("no permission: %s may not use %s", self._who, m[1])

    def watch(self, nc: NATS) -> None:
        """Makes denied requests of nc raise PermissionError at once, instead of waiting for their timeout."""
        plain = nc.request

        async def request(subject: str, *args: Any, **kwargs: Any) -> Msg:
            if args and _BARE.search(subject):
                # The library does not name its consumers, but permissions of roles need a name in the subject.
                body = json.loads(args[0])
                name = body["config"]["name"] = secrets.token_hex(12)
                only = body["config"].get("filter_subject")
                subject = ".".join([subject, name, *([only] if only and only != ">" else [])])
                args = json.dumps(body).encode(), *args[1:]
            denied = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(subject.lower(), set())  # the library has the note in lower case
            waiting.add(denied)
            answer = asyncio.ensure_future(plain(subject, *args, **kwargs))
            try:
                await asyncio.wait([answer, denied], return_when=asyncio.FIRST_COMPLETED)
                if denied.done() and not answer.done():
                    raise PermissionError(
                        f'no permission: {self._who} may not publish on "{subject}"; see meander auth show'
                    )
                return await answer
            finally:
                answer.cancel()
                waiting.discard(denied)
                if not waiting:
                    self._waiting.pop(subject.lower(), None)

        setattr(nc, "request", request)  # noqa: B010 - a method of the library
