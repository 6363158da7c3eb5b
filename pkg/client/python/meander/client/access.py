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

_log = logging.getLogger("meander")
_SEED = re.compile(r"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)
_ROLE = re.compile(r"^# role: (\S+)$", re.MULTILINE)
_BARE = re.compile(r"^\$JS\.API\.CONSUMER\.CREATE\.[^.]+$")
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]*)"')


def add_flags(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flags of a command that name the server and how to log in to it, but for the token."""
    env = os.environ.get
    p.add_argument(
        "--nats", default=env("MEANDER_NATS_URL", "nats://127.0.0.1:4222"), metavar="URL",
        help="of the pipeline (%(default)s)"
    )
    p.add_argument("--creds", default=env("MEANDER_NATS_CREDS"), metavar="FILE", help="credentials of meander auth")
    p.add_argument(
        "--tls-ca", default=env("MEANDER_NATS_TLS_CA"), metavar="FILE", help="authority of the server's certificate"
    )


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


async def open_connection(url: str, **options: Any) -> NATS:
    """Calls nats.connect. If the URL or the options ask for TLS, the connection uses TLS or ClearText is raised."""
    nc = _Secured() if url.startswith("tls://") or options.get("tls") else _Connection()
    try:
        await nc.connect(url, **options)
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
            f"pip install 'meander-rl=={theirs.partition('+')[0]}' changes the client; to change the pipeline, start it "
            "again with another program", VersionMismatch, stacklevel=4,
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
            if args and _BARE.match(subject):
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
