"""The client without asyncio against a real pipeline: threads, interrupts, forks and running loops."""

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import uuid

import pytest

import meander
from conftest import ENVIRONMENT, ROOT
from meander.client.client import Client


@pytest.fixture
def client(url):
    with meander.sync.connect(url) as c:
        yield c


@pytest.fixture
def name():
    return "sync" + uuid.uuid4().hex[:8]


def ask(client, run, uid, batch="", groups=1, **fields):
    """The small prompt of conftest.publish."""
    if batch:
        fields["batch"] = {"id": batch, "groups": groups}
    return client.publish(
        run, "a red fox", uid=uid, group_size=2, num_inference_steps=4, reward=[{"name": "synthetic"}], **fields
    )


def test_names():
    """Each public call of the asynchronous client is here, under its name, with its arguments and its docstring."""
    for module, twin in ((Client, meander.sync.Client), (meander.policy, meander.sync.policy)):
        for call in vars(module) if module is meander.policy else dir(module):
            made = getattr(module, call)
            if (
                not call.startswith("_")
                and callable(made)
                and getattr(made, "__module__", "").startswith(module.__name__ if module is meander.policy
                else "meander.")
                and not isinstance(made, type)
            ):
                if call in ("check_adapter", "check_weights", "weights_digest"):
                    continue  # they wait for nothing
                waits = getattr(twin, call)
                assert waits.__doc__ == made.__doc__ and not inspect.iscoroutinefunction(waits), call
                assert inspect.signature(waits).parameters == inspect.signature(made).parameters, call


def test_batches(client, name):
    for i in range(3):
        assert ask(client, name, f"u{i}", f"b{i}")["accepted"]
    reader = client.batches(name, "trainer", timeout=30)
    seen = [next(reader).name, next(reader).name]
    assert reader.health.batches == 2
    reader.close()
    with pytest.raises(RuntimeError, match="the stream is closed"):
        next(reader)
    again = client.batches(name, "trainer", timeout=30)  # the second was not acknowledged
    seen += [(batch := next(again)).name]
    assert seen[2] == seen[1]
    seen += [(batch := next(again)).name]
    again.done(batch)
    assert sorted({*seen}) == ["b0", "b1", "b2"]
    assert list(client.batches(name, "trainer", follow=False)) == []
    assert len(list(client.stream_groups(name, follow=False))) == 3
    events = client.batch_events(name)
    assert {next(events)["batch"] for _ in range(3)} == {"b0", "b1", "b2"}
    events.close()


def test_errors(client, name):
    """Errors are those of the call, where it is made."""
    with pytest.raises(meander.Refused, match="group_size"):
        client.publish(name, "x", group_size=-1)
    with pytest.raises(meander.Gone):
        client.group(name, "none")
    with pytest.raises(TimeoutError, match="nothing came for 1 s"):
        next(client.batches(name, "trainer", timeout=1))
    with pytest.raises(ConnectionError), meander.sync.connect("nats://127.0.0.1:1", patience=0.2):
        pass
    with pytest.raises(meander.policy.NoPolicy):
        meander.sync.policy.policy(client, "no-such-lane")


def test_threads(client, name):
    """Threads call side by side over one connection."""
    failed = []

    def one(i):
        try:
            ask(client, name, f"u{i}", "b", 4)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and next(client.batches(name, timeout=30)).size == 8


def test_running_loop(url, client, name):
    async def inside():
        with pytest.raises(RuntimeError, match="inside a running event loop.*await"):
            client.status(name)
        with pytest.raises(RuntimeError, match="inside a running event loop"), meander.sync.connect(url):
            pass
        ask_there = await asyncio.to_thread(ask, client, name, "u")  # a thread of its own may wait
        assert ask_there["accepted"]

    asyncio.run(inside())

    def log_probs(batch):  # runs on the loop of the background
        client.status(name)

    ask(client, name, "u2", "b")
    with pytest.raises(RuntimeError, match="inside a running event loop"):
        next(client.batches(name, log_probs=log_probs, timeout=30))
    assert client.status(name)["state"]


def test_exit_in_a_callback(client, name):
    """SystemExit of a user's function is raised by the call; the next call works."""

    def log_probs(batch):
        raise SystemExit("enough")

    ask(client, name, "u", "b")
    with pytest.raises(SystemExit, match="enough"):
        next(client.batches(name, log_probs=log_probs, timeout=30))
    assert client.status(name)["state"]


INTERRUPTED = """
import os, signal, sys, time, meander

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it

def keep(group):  # on the thread in the background, while next waits
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)  # the group must not be there before the signal
    return ""

with meander.sync.connect(sys.argv[1]) as client:
    client.publish(sys.argv[2], "a red fox", uid="u", group_size=2, reward=[{"name": "synthetic"}])
    reader = client.stream_groups(sys.argv[2], "trainer", keep=keep)
    try:
        next(reader)
    except KeyboardInterrupt:
        print("interrupted")
    try:
        next(reader)
    except RuntimeError as e:
        print(e)
    print(next(client.stream_groups(sys.argv[2], "trainer")).uid)  # what it had in hand comes again
"""


def test_interrupt(url, name):
    """Ctrl-C ends the wait; the connection goes on, and nothing is left behind at the end."""
    p = subprocess.run([sys.executable, "-W", "default", "-c", INTERRUPTED, url, name], capture_output=True,
                       text=True, timeout=60,
                       env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python")})  # fmt: skip
    assert p.stdout.splitlines() == ["interrupted", "the stream was interrupted: read on with a new one", "u"], p.stderr
    assert p.returncode == 0 and p.stderr == ""


def test_fork(url, client, name):
    """A fork is told that the connection is its parent's, and makes one of its own."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            client.status(name)
        except RuntimeError as e:
            said.append(str(e))
        try:
            with meander.sync.connect(url) as own:
                ask(own, name, "child")
            said.append("published")
        finally:
            os.write(w, "; ".join(said).encode())
            os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        said = f.read()
    os.waitpid(pid, 0)
    assert "is a fork: connect again" in said and said.endswith("published")
    ask(client, name, "parent")
    groups = client.stream_groups(name, timeout=30)
    assert {next(groups).uid for _ in range(2)} == {"child", "parent"}
