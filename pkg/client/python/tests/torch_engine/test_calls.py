"""Calls of a worker: what it refuses, with which class of error, and that it lives on."""

import json
import shutil
import socket
import threading

import numpy as np
import pytest
from conftest import NAMES
from talk import Refused, handle_of, latents

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from meander.torch import families  # noqa: E402
from meander.torch.engine import Engine, Handles, Settings  # noqa: E402
from meander.torch.faults import Fault  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402
from meander.torch.server import Worker  # noqa: E402

H, W = 64, 96
SIZE = {"frames": 1, "height": H, "width": W}
def refused(client, kind, *call):
    """The message of an answer that must be an error of this class."""
    with pytest.raises(Refused) as e:
        client(*call)
    assert e.value.kind == kind, e.value
    return e.value.message


def first_of(pipe, *names):
    """The first of these attributes that a pipeline has."""
    return next((getattr(pipe, n) for n in names if hasattr(pipe, n)), None)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_is_that_of_the_network(name, dial, pipelines):
    client = dial(name)
    hello = client.ready()
    card = hello["card"]
    assert card == client("inspect")[0]["card"]
    assert hello["backend"].startswith("torch-") and hello["backend"].endswith("/nondeterministic")
    for handle, tensors, cut in client.encode("a red cat", ""):
        assert list(tensors) == [c["name"] for c in card["conditioning"]]
        assert sum(a.nbytes for a in tensors.values()) <= card["conditioning_bytes"]
        assert tensors["prompt_embeds"].shape[1] * 4 == card["conditioning_token_bytes"]
        assert handle == handle_of(tensors) and cut == 0
    assert [c["mask"] for c in card["conditioning"]] == ["prompt_embeds_mask"]
    pipe = pipelines(name)
    assert card["latent"]["scale"] == first_of(pipe, "vae_scale_factor_spatial", "vae_scale_factor")
    assert (card["size"]["frames"], card["fps"], card["max_frames"], card["frames_rule"]) == (1, 0, 1, 1)
    modules, _ = client("modules")
    network = pipe.transformer
    assert modules["linear"] == {
        n: list(m.weight.shape) for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)
    }
    assert modules["tensors"] == {n: list(t.shape) for n, t in network.state_dict().items()}
    memory, _ = client("memory")
    assert 0 < memory["weights_bytes"] < memory["reserved_bytes"] <= 2 * memory["peak_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_are_too_long(name, dial, pipelines):
    client = dial(name)
    limit = client.ready()["card"]["max_prompt_tokens"]
    long = "\0" * 4000
    message = refused(client, "prompt", "encode", {"prompts": [["short"], [long]], "truncate": False})
    n = int(message.split()[1])
    assert n > limit and f"at most {limit}" in message
    [(_, tensors, cut)] = client.encode(long, truncate=True)
    assert cut == n - limit
    assert client.encode("still there")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_counted_with_the_template(dial, workers, name):
    [(_, tensors, _)] = dial(name).encode("a red cat")
    count, _ = workers(name).engine.family.count(families.Prompt(("a red cat",)))
    assert count == len(tensors["prompt_embeds"])


def test_calls_that_are_none(dial):
    client = dial("qwen-image")
    assert "nothing" in refused(client, "protocol", "nothing")
    assert "args: a list" in refused(client, "protocol", "encode", [1])
    assert "prompts: missing" in refused(client, "protocol", "encode", {})
    assert "more: unknown" in refused(client, "protocol", "memory", {"more": 1})
    assert "prompts: a str" in refused(client, "protocol", "encode", {"prompts": "x"})
    assert "frames: a bool" in refused(client, "protocol", "decode", {**SIZE, "frames": True})
    for prompt in ("x", [], ["a"] * 2, [1]):
        assert "prompts[0]" in refused(client, "protocol", "encode", {"prompts": [prompt]})
    assert "takes no tensors" in refused(client, "protocol", "memory", {}, {"x": np.zeros(1, np.float32)})
    assert "protocol: 1" in refused(client, "protocol", "hello", {"protocol": 1, "token": ""})
    assert client.ready()["state"] == "ready"


def test_headers_without_an_id_close_the_connection(dial):
    for header in (b"\x80", b"\xa1x", b"\x81\xa2id\xff", b"\x81\xa2id\xc3", b"\x00" * 7):
        client = dial("qwen-image")
        client.send_raw(header)
        with pytest.raises(EOFError):
            client.receive()


@pytest.mark.parametrize(
    "size", [{"frames": 2}, {"height": 0}, {"width": -16}, {"height": 72}, {"height": 1 << 40}]
)
def test_sizes_that_are_none(dial, size):
    client = dial("qwen-image")
    x = np.zeros((24, 64), np.float32)
    message = refused(client, "latents", "decode", {**SIZE, **size}, {"x": x})
    assert "must be" in message and next(iter(size)) in message


def test_latents_that_are_none(dial):
    client = dial("qwen-image")
    for x in (
        np.zeros((23, 64), np.float32),
        np.zeros((24, 63), np.float32),
        np.zeros((24, 64), np.uint8),
        np.zeros(0, np.float32),
    ):
        refused(client, "latents", "decode", SIZE, {"x": x})
    refused(client, "protocol", "decode", SIZE, {"y": np.zeros((24, 64), np.float32)})
    refused(client, "protocol", "decode", SIZE)
    assert "finite" in refused(client, "latents", "decode", SIZE, {"x": np.full((24, 64), np.nan, np.float32)})


def test_rows_that_are_none(dial):
    client = dial("qwen-image")
    card = client.ready()["card"]
    [(handle, _, _)] = client.encode("x")
    x = latents(card, 1, H, W)
    good = {"sigmas": [0.5], "handles": [handle], "guidance": [0.0], **SIZE, "weights": ""}
    client("velocity", good, {"x": x})
    for change in (
        {"sigmas": []},
        {"sigmas": [0.5, 0.5]},
        {"guidance": []},
        {"sigmas": ["a"]},
        {"sigmas": [float("nan")]},
        {"handles": [1]},
        {"states": [0, 0]},
        {"states": [1]},
        {"states": [-1]},
        {"states": ["0"]},
        {"states": [True]},
    ):
        refused(client, "protocol", "velocity", {**good, **change}, {"x": x})
    assert "no such input" in refused(client, "protocol", "velocity", {**good, "guidance": [3.5]}, {"x": x})
    assert "put its tensors" in refused(client, "handle", "velocity", {**good, "handles": ["0" * 64]}, {"x": x})
    assert refused(client, "weights", "velocity", {**good, "weights": "ab"}, {"x": x}).startswith("not loaded: ")
    four = {"sigmas": [0.5] * 4, "handles": [handle] * 4, "guidance": [0.0] * 4}
    for states in ([0, 2, 0, 2], [0, 1, 0], [0, 1, 0, 1.0]):
        refused(client, "protocol", "velocity", {**good, **four, "states": states}, {"x": latents(card, 2, H, W)})
    assert "f32" in refused(client, "latents", "velocity", {**good, **four, "states": [0, 0, 0, 0]},
                            {"x": latents(card, 2, H, W)})  # fmt: skip
    many = {"sigmas": [0.5] * 65, "handles": [handle] * 65, "guidance": [0.0] * 65}
    assert "64" in refused(client, "protocol", "velocity", {**good, **many}, {"x": latents(card, 65, H, W)})


def test_conditionings_are_put_again(dial, folders):
    client = dial("qwen-image")
    card = client.ready()["card"]
    [(handle, tensors, _)] = client.encode("a red cat on a mat")
    x = latents(card, 1, H, W)
    v = client.velocity(x, [0.5], [handle], H, W, [0.0])
    family = families.find(Folder(folders["qwen-image"]))
    fresh = Worker(family, Settings("cpu", "f32"))
    fresh.load(lambda say: Engine(family, Settings("cpu", "f32", threads=1), say))
    other = dial("", worker=fresh)  # as after a restart
    with pytest.raises(Refused) as e:
        other.velocity(x, [0.5], [handle], H, W, [0.0])
    assert e.value.kind == "handle"
    assert other("put", {}, tensors)[0]["handle"] == handle
    assert np.array_equal(other.velocity(x, [0.5], [handle], H, W, [0.0]), v)
    refused(other, "protocol", "put", {}, {"pooled_prompt_embeds": tensors["prompt_embeds"]})
    refused(other, "protocol", "put", {}, {**tensors, "prompt_embeds": tensors["prompt_embeds"][:, :-1]})
    refused(other, "protocol", "put", {}, {**tensors, "prompt_embeds": tensors["prompt_embeds"][None]})


def test_handles_are_forgotten_in_the_order_of_their_use():
    handles = Handles(count=2, size=100)
    one = {"x": torch.zeros(5)}
    handles.put("a", one)
    handles.put("b", one)
    handles.get("a")
    handles.put("c", one)
    handles.get("a")
    with pytest.raises(Fault, match="b: unknown"):
        handles.get("b")
    handles.put("large", {"x": torch.zeros(1000)})  # larger than the bound: kept for the call that follows, alone
    handles.get("large")
    with pytest.raises(Fault):
        handles.get("a")


def test_full_memory_is_an_error_of_the_call(dial, workers, monkeypatch):
    client = dial("qwen-image")
    card = client.ready()["card"]
    [(handle, _, _)] = client.encode("x")
    x = latents(card, 1, H, W)
    v = client.velocity(x, [0.5], [handle], H, W)
    engine, freed = workers("qwen-image").engine, []
    monkeypatch.setattr(engine, "free_cache", lambda: freed.append(1))
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
    ):
        with monkeypatch.context() as m:

            def full(*args, error=error):
                raise error

            m.setattr(engine.family, "velocity", full)
            with pytest.raises(Refused) as e:
                client.velocity(x, [0.5], [handle], H, W)
            assert e.value.kind == "memory"
    assert len(freed) == 5
    assert np.array_equal(client.velocity(x, [0.5], [handle], H, W), v)


def test_a_bug_is_an_error_of_the_call(dial, workers, monkeypatch):
    client = dial("qwen-image")
    with monkeypatch.context() as m:

        def broken(*args):
            raise KeyError("gone")

        m.setattr(workers("qwen-image").engine.family, "encode", broken)
        assert "KeyError" in refused(client, "worker", "encode", {"prompts": [["x"]]})
    assert client.encode("x")


@pytest.mark.parametrize("name", NAMES)
def test_media_are_decoded_in_tiles(name, folders, dial, monkeypatch):
    monkeypatch.setattr("meander.torch.engine._TILE", 256)
    family = families.find(Folder(folders[name]))
    worker = Worker(family, Settings("cpu", "f32", vae_tiling=True))
    worker.load(lambda say: Engine(family, Settings("cpu", "f32", threads=1, vae_tiling=True), say))
    tiled, whole = dial("", worker=worker), dial(name)
    assert "/vae-tiling/nondeterministic" in tiled.ready()["backend"]
    edge = 288  # tiles are of 256 pixels
    x = latents(tiled.ready()["card"], 1, edge, edge + 64)[0]
    ours, theirs = (c.decode(x, edge, edge + 64) for c in (tiled, whole))
    assert ours.shape == theirs.shape and not np.array_equal(ours, theirs)
    alike = np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]
    print(f"{name}: correlation {alike:.4f}")
    assert alike > 0.9


def test_no_call_keeps_gradients(dial, workers, monkeypatch):
    client, seen = dial("qwen-image"), []
    family = workers("qwen-image").engine.family
    encode = family.encode
    monkeypatch.setattr(family, "encode", lambda *a: (seen.append(torch.is_grad_enabled()), encode(*a))[1])
    client.encode("x")
    assert seen == [False]


def test_a_worker_answers_while_it_loads_and_computes(folders, dial):
    family = families.find(Folder(folders["qwen-image"]))
    worker, go, computing = Worker(family, Settings("cpu", "f32")), threading.Event(), threading.Event()
    loads = threading.Event()

    def make(say):
        say("loading transformer: 0.0 of 0.1 GB")
        loads.set()
        go.wait()
        return Engine(family, Settings("cpu", "f32", threads=1))

    loading = threading.Thread(target=worker.load, args=(make,))
    loading.start()
    one, two = dial("", worker=worker), dial("", worker=worker)
    loads.wait()
    hello, _ = one("hello", {"protocol": 2, "token": ""})
    assert hello["state"] == "loading" and hello["detail"] == "loading transformer: 0.0 of 0.1 GB"
    assert one("inspect")[0]["card"]["family"] == "qwen-image"
    assert "still loading" in refused(one, "worker", "encode", {"prompts": [["x"]]})
    go.set()
    loading.join()
    assert one.ready()["state"] == "ready"
    go.clear()
    encode = worker.engine.family.encode

    def slow(*args):
        computing.set()
        go.wait()
        return encode(*args)

    worker.engine.family.encode = slow
    thread = threading.Thread(target=one.encode, args=("x",))
    thread.start()
    computing.wait()
    assert two("health")[0]["call"] == "encode"
    assert two.ready()["state"] == "ready"
    go.set()
    thread.join()
    assert two("health")[0]["call"] == ""


def test_connections_side_by_side(dial):
    """Calls of several connections are computed one after the other, each with its own inputs."""
    clients = [dial("qwen-image") for _ in range(4)]
    card = clients[0].ready()["card"]
    handles = [h for h, _, _ in clients[0].encode("one", "two", "three", "four")]
    x, wrong = latents(card, 4, H, W), []
    alone = [clients[0].velocity(x[i : i + 1], [0.2 * i], handles[i : i + 1], H, W, [0.0]) for i in range(4)]

    def run(i):
        for _ in range(5):
            v = clients[i].velocity(x[i : i + 1], [0.2 * i], handles[i : i + 1], H, W, [0.0])
            wrong.append(not np.array_equal(v, alone[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == [False] * 20


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError("no file"), "config"), (torch.OutOfMemoryError("full"), "memory"), (KeyError("x"), "worker")],
)
def test_a_load_that_fails_is_said(folders, dial, error, kind):
    worker = Worker(families.find(Folder(folders["qwen-image"])), Settings("cpu", "f32"))

    def make(say):
        raise error

    worker.load(make)
    client = dial("", worker=worker)
    hello = client.ready()
    assert hello["state"] == "failed" and hello["error"]["class"] == kind
    refused(client, kind, "encode", {"prompts": [["x"]]})


def test_a_device_that_is_not_there(folders):
    family = families.find(Folder(folders["qwen-image"]))
    with pytest.raises(Fault, match="^device: cuda:9") as e:
        Engine(family, Settings("cuda:9", threads=1))
    assert e.value.kind == "config"
    with pytest.raises(Fault, match="^text_encoder_device: nope"):
        Engine(family, Settings("cpu", encoders="nope", threads=1))


def test_device_and_dtype_are_chosen(folders, dial, monkeypatch):
    family = families.find(Folder(folders["qwen-image"]))
    with monkeypatch.context() as m:
        m.setattr(torch.accelerator, "is_available", lambda: False)
        worker = Worker(family, Settings("auto", "auto"))
        worker.load(lambda say: Engine(family, Settings(threads=1), say))
    hello = dial("", worker=worker).ready()
    assert (hello["device"], hello["dtype"]) == ("cpu", "f32") and "/cpu/f32/" in hello["backend"]
    with monkeypatch.context() as m:
        m.setattr(torch.accelerator, "is_available", lambda: True)
        m.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        engine = Engine(family, Settings(threads=1))
        assert (engine.device.type, engine.dtype) == ("meta", "bf16")
        assert Engine(family, Settings(dtype="f32", threads=1)).dtype == "f32"


@pytest.mark.parametrize(("dtype", "allowed"), [("f32", False), ("bf16", True)])
def test_float32_is_float32(folders, dtype, allowed):
    """Convolutions of a GPU would round to TF32 by default, and a row beside others differ by more than verify
    allows."""
    kept = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        Engine(families.find(Folder(folders["qwen-image"])), Settings("cpu", dtype, threads=1))
        assert torch.backends.cudnn.allow_tf32 == allowed
    finally:
        torch.backends.cudnn.allow_tf32 = kept


def test_text_encoders_on_a_device_of_their_own(folders, dial):
    family = families.find(Folder(folders["qwen-image"]))
    worker = Worker(family, Settings("cpu", "bf16", encoders="cpu:0"))
    worker.load(lambda say: Engine(family, Settings("cpu", "bf16", encoders="cpu", threads=1), say))
    client = dial("", worker=worker)
    hello = client.ready()
    assert "/cpu/bf16/" in hello["backend"] and "/encoders-cpu:0/" in hello["backend"]
    [(handle, tensors, _)] = client.encode("x")
    # What a host stores and puts again are the same bits.
    assert client("put", {}, tensors)[0]["handle"] == handle
    v = client.velocity(latents(hello["card"], 1, H, W), [0.5], [handle], H, W, [0.0])
    assert np.isfinite(v).all() and v.std() > 0.01


def test_hello_says_ready_with_what_loading_decided(folders, dial, monkeypatch):
    family = families.find(Folder(folders["qwen-image"]))
    worker, versions = Worker(family, Settings("auto", "auto")), Worker.versions

    def load_first(self):
        if self.state == "loading":  # loading ends in the middle of a hello
            self.load(lambda say: Engine(family, Settings("cpu", "f32", threads=1), say))
        return versions(self)

    monkeypatch.setattr(Worker, "versions", load_first)
    client = dial("", worker=worker)
    hello, _ = client("hello", {"protocol": 2, "token": ""})
    assert (hello["state"], hello["device"], hello["dtype"]) in [("loading", "auto", "auto"), ("ready", "cpu", "f32")]
    hello, _ = client("hello", {"protocol": 2, "token": ""})
    assert (hello["state"], hello["device"], hello["dtype"]) == ("ready", "cpu", "f32")


def test_health_is_that_of_hello(folders, workers, tmp_path, monkeypatch):
    from meander.torch import health
    from meander.torch.server import Server

    loading = Worker(families.find(Folder(folders["qwen-image"])), Settings("cpu", "f32"), token="a token of the test")
    failed = Worker(loading.family, Settings("cpu", "f32"))
    failed.error = Fault("config", "device: gone")
    for worker, token, want, says in [
        (workers("qwen-image"), "", "ready", "ready"),
        (loading, "a token of the test", "loading", "starting"),
        (loading, "another", "refused", "token: wrong"),
        (failed, "", "failed", "device: gone"),
    ]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=Server(worker, listener).run, daemon=True).start()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            state, detail = health.ask(address, token)
            assert state == want and says in detail
            (tmp_path / "token").write_text(token)
            for alive in [[], ["--alive"]]:
                monkeypatch.setattr("sys.argv", ["health", *alive, address, str(tmp_path / "token")])
                with pytest.raises(SystemExit) as e:
                    health.main()
                assert e.value.code == (0 if alive or want == "ready" else 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        threading.Thread(target=Server(workers("qwen-image"), listener).run, daemon=True).start()
        assert health.ask(str(tmp_path / "s"))[0] == "ready"
    assert health.ask(str(tmp_path / "none")) == ("", f"{tmp_path}/none: [Errno 2] No such file or directory")
