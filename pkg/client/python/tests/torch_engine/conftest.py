"""Tests of meander.torch, which need torch and diffusers: make engines-torch. Without them they are skipped."""

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_OFFLINE="1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the worker has it: deterministic engines need it
sys.path.insert(0, str(Path(__file__).parent))

NAMES = ("qwen-image", "krea2")  # of families; all others of tiny.py are whole pipelines
DEVICE = os.environ.get("MEANDER_TEST_DEVICE", "cpu")  # of the tests in this process, such as cuda:0
SIGNS = Path(__file__).parents[5] / "deploy/models/signs"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A tiny checkpoint of each family, and signs."""
    pytest.importorskip("diffusers")
    import tiny
    import torch

    torch.set_num_threads(1)
    return {**tiny.write(tmp_path_factory.mktemp("models"), (*NAMES, "sd3", "flux2", "wan-two")), "signs": SIGNS}


@pytest.fixture(scope="session")
def pipelines(folders):
    """pipelines(name) is the pipeline of diffusers itself, in float32."""
    import diffusers
    import torch

    kept = {}

    def get(name):
        if name not in kept:
            kept[name] = diffusers.DiffusionPipeline.from_pretrained(folders[name], dtype=torch.float32)
            kept[name].set_progress_bar_config(disable=True)
            kept[name].to(DEVICE)
        return kept[name]

    return get


@pytest.fixture(scope="session")
def workers(folders):
    """workers(name, deterministic=False) is a worker of this process with that model, loaded once."""
    from meander.torch import families
    from meander.torch.engine import Engine, Settings
    from meander.torch.folder import Folder
    from meander.torch.server import Worker

    kept = {}

    def get(name, deterministic=False):
        if (name, deterministic) not in kept:
            family = families.find(Folder(folders[name]))
            family.check()
            worker = kept[name, deterministic] = Worker(family, Settings(DEVICE, "f32", deterministic=deterministic))
            worker.load(
                lambda say: Engine(family, Settings(DEVICE, "f32", deterministic=deterministic, threads=1), say)
            )
            assert worker.error is None, worker.error
        return kept[name, deterministic]

    return get


@pytest.fixture
def dial(workers):
    """dial(name, ...) is a connection to a worker of this process."""
    from talk import Client, frames_of

    from meander.torch.frames import FrameError
    from meander.torch.server import serve

    ends, threads = [], []

    def get(name, deterministic=False, worker=None):
        ours, theirs = socket.socketpair()
        worker = worker or workers(name, deterministic)

        def run():
            with theirs:
                try:
                    serve(theirs, worker)
                except (OSError, FrameError):
                    pass

        thread = threading.Thread(target=run)
        thread.start()
        ends.append(ours)
        threads.append(thread)
        client = Client(ours)
        client.family, client.frames = worker.family, frames_of(worker.family.card())
        return client

    yield get
    for end in ends:
        end.close()
    for thread in threads:
        thread.join()
