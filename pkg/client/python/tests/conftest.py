"""A pipeline to test against: the one that MEANDER_URL names, or one that is started here from MEANDER_BIN (default
bin/meander)."""

import asyncio
import os
import pathlib
import socket
import subprocess
import time
import uuid

import pytest

import meander

ROOT = pathlib.Path(__file__).parents[4]
SIGNS = ROOT / "deploy/models/signs"
SUMS = ROOT / "deploy/models/sums"
BINARY = pathlib.Path(os.environ.get("MEANDER_BIN") or ROOT / "bin/meander")


# What a program of ours is set up by: nothing that is meant for the tests.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("MEANDER_")}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port, process):
    """Waits until a process listens there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended with {process.returncode}")
        with socket.socket() as s:
            s.settimeout(1)
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"no process listens on {port}")


class Up:
    """meander up, on a store of its own."""

    def __init__(self, folder, port=None, *args, model="synthetic"):
        self.folder, self.port, self.args, self.model, self.process = folder, port or free_port(), args, model, None

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def start(self):
        command = [
            str(BINARY), "up", "--model", str(self.model), "--store", str(self.folder / "store"), "--listen",
            f"127.0.0.1:{self.port}", *self.args
        ]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=ENVIRONMENT)
        listens(self.port, self.process)
        return self

    def stop(self, kill=False):
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait(30)


class Apart:
    """The server and the services, each a program of its own that can be killed. samplers are their models, by name.
    NATS_SERVER is the server's binary; without it, or without the services beside meander, the test is skipped."""

    def __init__(self, folder, **samplers):
        server, self.folder, self.port, self.running = os.environ.get("NATS_SERVER"), folder, free_port(), {}
        if not server or not BINARY.with_name("meander-intake").is_file():
            pytest.skip("NATS_SERVER is not set, or the services are not beside meander: 'make python-test' builds one")
        self.url = f"nats://127.0.0.1:{self.port}"
        listen = ["-a", "127.0.0.1", "-p", str(self.port)]
        self.commands = {"server": [server, "-js", *listen, "-sd", str(folder / "nats")]}
        programs = {p: p for p in ("intake", "reward", "advantage")} | dict.fromkeys(samplers, "sampler")
        for name, program in programs.items():
            # One sample after the other: each may be the last before its sampler is killed.
            model = ["--model", str(samplers[name]), "--batch", "1", "--workers", "1"] if name in samplers else []
            self.commands[name] = [
                str(BINARY.with_name("meander-" + program)), "--nats-url", self.url, "--health-addr", "",
                "--ack-wait", "1s", *model,
            ]  # fmt: skip

    def start(self, name):
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                self.commands[name], stdout=log, stderr=log, cwd=self.folder, env=ENVIRONMENT
            )

    def kill(self, name):
        """Kills a program, and starts it again."""
        self.running[name].kill()
        self.running[name].wait(30)
        self.start(name)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.commands:
            self.start(name)
            if name == "server":
                listens(self.port, self.running[name])
        return self

    def __exit__(self, *_):
        for process in reversed(self.running.values()):
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def binary():
    if not BINARY.is_file():
        pytest.skip(f"{BINARY} is not there: 'make build' makes it, MEANDER_BIN names another")
    return BINARY


@pytest.fixture(scope="session")
def url(request, tmp_path_factory):
    if given := os.environ.get("MEANDER_URL"):
        yield given
        return
    request.getfixturevalue("binary")
    up = Up(tmp_path_factory.mktemp("up")).start()
    asyncio.run(announced(up.url))
    yield up.url
    up.stop()


@pytest.fixture(scope="session")
def signs(binary, tmp_path_factory):
    """The address of a pipeline that serves the model signs, which takes adapters."""
    up = Up(tmp_path_factory.mktemp("signs"), None, "--batch", "16", model=SIGNS).start()
    asyncio.run(announced(up.url))
    yield up.url
    up.stop()


@pytest.fixture(scope="session")
def sums(binary, tmp_path_factory):
    """The address of a pipeline that serves the language model sums and, where its program is there, images of the
    synthetic model."""
    folder = tmp_path_factory.mktemp("sums")
    up, processes = Up(folder, None, "--batch", "16", model=SUMS).start(), []
    if (sampler := binary.with_name("meander-sampler")).is_file():
        with open(folder / "sampler", "wb") as log:
            command = [str(sampler), "--nats-url", up.url, "--health-addr", "", "--model", "synthetic"]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=ENVIRONMENT))
    asyncio.run(announced(up.url, "sums"))
    yield up.url
    for process in processes:
        process.terminate()
        process.wait(30)
    up.stop()


@pytest.fixture(scope="session")
def lanes(binary, tmp_path_factory):
    """The address of a pipeline that serves sums and signs."""
    if not (program := binary.with_name("meander-sampler")).is_file():
        pytest.skip(f"{program} is not there: 'make build' makes it")
    folder = tmp_path_factory.mktemp("lanes")
    up = Up(folder, None, "--batch", "16", model=SIGNS).start()
    with open(folder / "sampler", "wb") as log:
        command = [str(program), "--nats-url", up.url, "--health-addr", "", "--model", str(SUMS)]
        sampler = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=ENVIRONMENT)
    for lane in ("sums", "signs"):
        asyncio.run(announced(up.url, lane))
    yield up.url
    sampler.terminate()
    sampler.wait(30)
    up.stop()


async def announced(url, lane=""):
    """Waits for the first sampler."""
    async with meander.connect(url) as client:
        while True:
            try:
                return await asyncio.wait_for(meander.policy.policy(client, lane), 60)
            except meander.policy.NoPolicy:
                await asyncio.sleep(0.05)


@pytest.fixture
def run(url):
    """Runs a test, a coroutine function of a client and a name for its run, for a minute at most."""

    def bounded(test, at=None):
        async def connected():
            async with meander.connect(at or url) as client:
                return await asyncio.wait_for(test(client, "py" + uuid.uuid4().hex[:8]), 60)

        return asyncio.run(connected())

    return bounded


async def first(events):
    async for e in events:
        return e


async def stored_updates(client, run):
    """The updates of a run that are stored, in their order."""
    found = await client.js.stream_info("MDR_UPDATES", subjects_filter=f"mdr.v1.update.{run}.>")
    told = client.updates(run)
    return [await anext(told) for _ in found.state.subjects or ()]


async def publish(client, run, uid, batch="", groups=1, **fields):
    """A small prompt, whose stochastic steps are 1 and 2 of 4."""
    rollout = {"sde_step_indices": [1, 2], "debug": ["model_output"], **fields.pop("rollout", {})}
    if batch:
        fields["batch"] = {"id": batch, "groups": groups}
    return await client.publish(
        run, "a red fox", uid=uid, group_size=2, num_inference_steps=4, reward=[
            {"name": "synthetic"}
        ], rollout=rollout, **{"seed": 7, **fields})
