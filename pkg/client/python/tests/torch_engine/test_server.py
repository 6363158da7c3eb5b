"""Connections: who gets in, who gives way, and that nothing makes a worker deaf."""

import select
import shutil
import socket
import ssl
import subprocess
import threading

import numpy as np
import pytest
from talk import Client, Refused

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from meander.torch import families, server  # noqa: E402
from meander.torch.family import Settings  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402
from meander.torch.server import Server, Worker  # noqa: E402

TOKEN = "0123456789abcdef"
PATIENCE = 60.0
"""Seconds after which a test gives up on a peer."""


class Recorder(socket.socket):
    """A listening socket that keeps what it accepted."""

    def accept(self):
        stream, address = super().accept()
        self.accepted = stream
        return stream, address


class Serving:
    """A server on a port of its own, of a worker that still loads."""

    def __init__(self, folder, token, tls, trust):
        with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
            self.listener = Recorder(fileno=made.detach())
        self.trust, self.opened = trust, []
        worker = Worker(families.find(Folder(folder)), Settings("cpu", "f32"), token=token)
        threading.Thread(target=Server(worker, self.listener, tls).run, daemon=True).start()

    def silent(self):
        """A connection that says nothing."""
        stream = socket.create_connection(self.listener.getsockname(), PATIENCE)
        self.opened.append(stream)
        return stream

    def client(self, stream=None):
        """A client, which has said nothing yet."""
        stream = stream or self.silent()
        if self.trust:
            stream = self.trust.wrap_socket(stream, server_hostname="127.0.0.1")
            self.opened.append(stream)
        return Client(stream)


@pytest.fixture
def serving(folders, monkeypatch):
    """serving() starts a server whose patience with a login never ends while a test runs."""
    monkeypatch.setattr(server, "_LOGIN_SECONDS", 3600.0)
    made = []

    def get(token=TOKEN, tls=None, trust=None):
        made.append(Serving(folders["qwen-image"], token, tls, trust))
        return made[-1]

    yield get
    for one in made:
        for stream in one.opened:
            stream.close()
        one.listener.close()


@pytest.fixture(scope="session")
def contexts(tmp_path_factory):
    """The TLS contexts of a server and of its clients."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    at = tmp_path_factory.mktemp("tls")
    make = "req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *make.split(), "-keyout", at / "key", "-out", at / "cert"], check=True, capture_output=True
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(at / "cert", at / "key")
    return {"tls": tls, "trust": ssl.create_default_context(cafile=at / "cert")}


def log_in(client):
    assert client("hello", {"protocol": 2, "token": TOKEN})[0]["state"] == "loading"
    return client


def ended(stream):
    """Waits until the other side has ended a connection."""
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("secure", [False, True])
def test_strangers_keep_nobody_out(secure, serving, request):
    one = serving(**(request.getfixturevalue("contexts") if secure else {}))
    strangers = [one.silent() for _ in range(70)]
    client = log_in(one.client())
    assert all(ended(s) for s in strangers[:7]), "the oldest must give way"
    log_in(one.client(strangers[7]))  # the others need not
    strangers = [one.silent() for _ in range(70)]
    log_in(one.client(strangers[-1]))
    assert client("health")[0]["state"] == "loading", "one that has logged in must stay"


def test_a_full_worker_takes_one_more_when_another_ends(serving, monkeypatch):
    monkeypatch.setattr(server, "_CONNECTIONS", 2)
    monkeypatch.setattr(server, "_NEWCOMERS", 2)
    one = serving()
    hello = {"id": 0, "call": "hello", "args": {"protocol": 2, "token": TOKEN}}
    first, second = log_in(one.client()), log_in(one.client())
    third = one.client()
    third.send(hello, {})
    assert second("health") and not select.select([third.stream], [], [], 0)[0]
    first.stream.close()
    assert third.receive()[0]["id"] == 0
    # Two are inside. One that waits for its place is a newcomer still.
    fourth = one.client()
    fourth.send(hello, {})
    one.silent()
    one.silent()
    assert ended(fourth.stream)
    assert second("health") and third("health")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_thread_that_cannot_start_costs_one_connection(error, serving, monkeypatch):
    monkeypatch.setattr(server, "_ACCEPT_AGAIN_SECONDS", 0.0)
    one, start, failing = serving(), threading.Thread.start, [error] * 140  # more than there are places

    def fails(thread):
        if failing:
            raise failing.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(140):
        assert ended(one.silent())
    log_in(one.client())
    assert not failing


def test_a_peer_that_vanished_is_noticed(serving):
    """Without keepalive the place of a machine that lost its power is taken for ever."""
    one = serving()
    log_in(one.client())
    stream = one.listener.accepted
    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if not hasattr(socket, "TCP_KEEPIDLE"):
        pytest.skip("the platform has no intervals to set")
    idle, between, count = (
        stream.getsockopt(socket.IPPROTO_TCP, o)
        for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + between * count <= 120


def test_a_call_without_memory_is_an_error_of_the_call(serving, monkeypatch):
    """Its host sends fewer rows then; a connection that ends is a lost worker."""
    client, empty = log_in(serving().client()), np.empty

    def full(n, *args):
        if n == 40_000_000:
            raise MemoryError
        return empty(n, *args)

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(Refused) as e:
        client("put", {}, {"x": np.zeros(10_000_000, np.float32)})
    assert e.value.kind == "memory" and "main memory" in e.value.message
    with pytest.raises(Refused, match="still loading"):
        client("put", {}, {"x": np.zeros(10, np.float32)})
