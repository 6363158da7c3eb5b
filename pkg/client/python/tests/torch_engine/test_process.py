"""The program: how it starts, what it prints, how it ends."""

import json
import os
import select
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest
from talk import PACKAGE, Client, Refused, connect, latents, start

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

H, W = 64, 96


@pytest.fixture
def launch(tmp_path):
    """launch(folder, *args) starts a worker on a Unix socket, or as the arguments say; it ends with the test."""
    started = []

    def get(folder, *args, **environment):
        address = () if "--listen" in args or "--socket" in args else ("--socket", tmp_path / "worker.sock")
        process = start(folder, *address, *args, stderr=open(tmp_path / f"log-{len(started)}", "w"), **environment)
        started.append(process)
        return process

    yield get
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def fails(folder, *args):
    """The last line that a worker prints when it ends with status 78."""
    process = start(folder, *args, stderr=subprocess.PIPE)
    out, log = process.communicate()
    assert process.returncode == 78, log
    assert out == "", "stdout is for the one line"
    return log.strip().splitlines()[-1]


def test_a_worker_serves_and_ends(launch, folders, tmp_path):
    process = launch(folders["qwen-image"])
    client, said = connect(process)
    assert said == {"ready": True, "protocol": 2, "address": f"unix:{tmp_path / 'worker.sock'}", "pid": process.pid}
    assert stat.S_IMODE(os.stat(tmp_path / "worker.sock").st_mode) == 0o600
    hello = client.ready()
    assert hello["state"] == "ready" and hello["import_s"] > 0 and hello["load_s"] > 0
    assert client("health")[0]["pid"] == process.pid
    [(handle, _, _)] = client.encode("x")
    assert client.velocity(latents(hello["card"], 1, H, W), [0.5], [handle], H, W).std() > 0.1
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.stdout.read() == ""
    assert not (tmp_path / "worker.sock").exists()


def test_the_call_in_hand_is_answered_before_the_end(launch, folders):
    process = launch(folders["qwen-image"])
    client, said = connect(process)
    card = client.ready()["card"]
    other = Client(socket.socket(socket.AF_UNIX))
    other.stream.connect(said["address"][5:])
    [(handle, _, _)] = client.encode("x")
    n = 8
    args = {
        "sigmas": [0.5] * n,
        "handles": [handle] * n,
        "guidance": [0.0] * n,
        "frames": 1,
        "height": 512,
        "width": 512,
        "weights": "",
    }
    client.send({"id": 9, "call": "velocity", "args": args}, {"x": latents(card, n, 512, 512)})
    while other("health")[0]["call"] != "velocity":
        assert not select.select([client.stream], [], [], 0)[0], "the call was over too soon to see"
    process.send_signal(signal.SIGTERM)
    header, body = client.receive()
    assert header["id"] == 9 and len(body) == n * 1024 * 64 * 4
    assert process.wait() == 0


def test_a_killed_worker_is_started_again(launch, folders):
    process = launch(folders["qwen-image"])
    client, _ = connect(process)
    card = client.ready()["card"]
    [(handle, tensors, _)] = client.encode("a red cat")
    x = latents(card, 1, H, W)
    v = client.velocity(x, [0.5], [handle], H, W)
    process.kill()
    process.wait()
    with pytest.raises((EOFError, OSError)):
        client.velocity(x, [0.5], [handle], H, W)
    again, _ = connect(launch(folders["qwen-image"]))  # on the socket that the other left behind
    again.ready()
    with pytest.raises(Refused, match="put its tensors"):
        again.velocity(x, [0.5], [handle], H, W)
    assert again("put", {}, tensors)[0]["handle"] == handle
    assert np.array_equal(again.velocity(x, [0.5], [handle], H, W), v)


def test_a_worker_ends_with_its_stdin(launch, folders):
    process = launch(folders["qwen-image"])
    connect(process)
    process.stdin.close()
    assert process.wait() == 0


@pytest.mark.parametrize("by", ["signal", "stdin"])
def test_a_worker_leaves_no_files(by, launch, folders, tmp_path):
    (tmp_path / "t").mkdir()
    process = launch(folders["qwen-image"], TMPDIR=str(tmp_path / "t"))
    client, _ = connect(process)
    client.ready()
    if by == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()
    assert process.wait() == 0
    assert list((tmp_path / "t").iterdir()) == []


def test_a_worker_that_is_deaf_ends(folders, tmp_path):
    code = (
        "import sys; from meander.torch import server; server.Server.run = lambda self: 1 / 0\n"
        "from meander.torch.__main__ import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "--model", str(folders["qwen-image"]), "--socket", str(tmp_path / "s")]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(PACKAGE)}
    )
    assert out.returncode == 1
    assert "ZeroDivisionError" in out.stderr and "error: the worker accepts no connections" in out.stderr


def test_a_socket_in_use_is_refused(launch, folders, tmp_path):
    process = launch(folders["qwen-image"])
    connect(process)
    assert "is in use" in fails(folders["qwen-image"], "--socket", tmp_path / "worker.sock")
    (tmp_path / "file").write_text("kept")
    assert "is in use" in fails(folders["qwen-image"], "--socket", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_tcp_needs_the_token(launch, folders, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    process = launch(folders["qwen-image"], "--listen", "127.0.0.1:0", "--token-file", tmp_path / "token")
    client, said = connect(process)
    host, _, port = said["address"].rpartition(":")

    def another():
        return Client(socket.create_connection((host, int(port))))

    for call, args in (
        ("health", {}),
        ("hello", {"protocol": 2, "token": "wrong"}),
        ("hello", {"protocol": 2}),
        ("inspect", {}),
    ):
        stranger = another()
        with pytest.raises(Refused) as e:
            stranger(call, args)
        assert e.value.kind == "config" and "token" in e.value.message
        with pytest.raises(EOFError):
            stranger.receive()
    stranger = another()
    stranger.stream.sendall((1).to_bytes(4, "little") + (1 << 20).to_bytes(8, "little"))  # a body before the token
    with pytest.raises(EOFError):
        stranger.receive()
    assert client.ready("0123456789abcdef")["state"] == "ready"
    assert client("health")[0]["state"] == "ready"


def test_tls(launch, folders, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *make.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    at = ("--listen", "127.0.0.1:0", "--token-file", tmp_path / "token", "--tls-key", key)
    assert "--tls-cert" in fails(folders["qwen-image"], *at, "--tls-cert", tmp_path / "token")
    plain, _ = connect(launch(folders["qwen-image"], *at, "--tls-cert", cert))
    port = plain.stream.getpeername()[1]
    plain.stream.sendall(b"no TLS at all")
    with pytest.raises((EOFError, OSError, struct.error)):
        while True:
            plain.receive()
    trust = ssl.create_default_context(cafile=cert)
    with trust.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1") as stream:
        client = Client(stream)
        hello, _ = client("hello", {"protocol": 2, "token": "0123456789abcdef"})
        assert hello["card"]["family"] == "qwen-image"


def test_rubbish_does_not_stop_a_worker(launch, folders):
    process = launch(folders["qwen-image"])
    client, said = connect(process)
    draw = np.random.default_rng(0)
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(said["address"][5:])
            s.sendall(draw.bytes(draw.integers(1, 4096)))
    assert client("health")[0]["pid"] == process.pid


def damaged(folder, tmp_path, change):
    copy = tmp_path / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    change(copy)
    return copy


def rewrite(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_folders_that_are_none(folders, tmp_path):
    at = ("--socket", tmp_path / "s")
    assert "ORG/NAME of the Hugging Face Hub" in fails(tmp_path, *at)
    qwen, sd3 = folders["qwen-image"], folders["sd3"]
    index = "model_index.json"
    bad = damaged(sd3, tmp_path, lambda f: rewrite(f / index, _class_name="OtherPipeline"))
    assert "must be a pipeline of diffusers" in fails(bad, *at)
    bad = damaged(qwen, tmp_path, lambda f: rewrite(f / index, transformer=["diffusers", "UNet2DConditionModel"]))
    assert "must be QwenImageTransformer2DModel" in fails(bad, *at)
    bad = damaged(qwen, tmp_path, lambda f: rewrite(f / index, transformer=["mine", "Qwen.py", "x"]))
    assert "must be QwenImageTransformer2DModel" in fails(bad, *at)
    bad = damaged(qwen, tmp_path, lambda f: rewrite(f / index, tokenizer=["custom", "Evil"]))
    assert "tokenizer: Evil" in fails(bad, *at)
    bad = damaged(sd3, tmp_path, lambda f: (f / index).write_text("{"))
    assert index in fails(bad, *at)
    bad = damaged(sd3, tmp_path, lambda f: shutil.rmtree(f / "text_encoder_2"))
    assert "text_encoder_2" in fails(bad, *at)
    bad = damaged(sd3, tmp_path, lambda f: shutil.rmtree(f / "vae"))
    assert "vae" in fails(bad, *at)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    bad = damaged(sd3, tmp_path, lambda f: (f / weights).rename(f / "transformer/diffusion_pytorch_model.bin"))
    assert "pickles are never loaded" in fails(bad, *at)
    bad = damaged(sd3, tmp_path, lambda f: (f / weights).rename(f / "transformer/weights.safetensors"))
    assert "must be named so" in fails(bad, *at)
    bad = damaged(sd3, tmp_path, lambda f: shutil.rmtree(f / "tokenizer_2"))
    assert "tokenizer_2, which model_index.json names: copy the folder again" in fails(bad, *at)
    bad = damaged(qwen, tmp_path, lambda f: rewrite(f / "transformer/config.json", guidance_embeds=True))
    assert "guidance_embeds" in fails(bad, *at)


def test_arguments_that_are_none(folders, tmp_path):
    folder = folders["qwen-image"]
    (tmp_path / "short").write_text("short")
    for args, why in (
        ((), "--socket or --listen"),
        (("--socket", "s", "--listen", "127.0.0.1:0"), "--socket or --listen"),
        (("--listen", "127.0.0.1:0"), "--token-file"),
        (("--listen", "nowhere", "--token-file", tmp_path / "short"), "at least 16"),
        (("--listen", "127.0.0.1:0", "--token-file", tmp_path / "none"), "--token-file"),
        (("--socket", "s", "--dtype", "f64"), "--dtype"),
        (("--socket", "s", "--tls-cert", "c"), "--tls-key"),
        (("--socket", tmp_path / "no" / "s"), "--socket"),
        (("--socket", "s", "--max-rows", "0"), "--max-rows"),
    ):
        line = fails(folder, *args)
        assert line.startswith("error: ") and why in line, line


def test_a_device_that_is_not_there_is_said_by_hello(launch, folders):
    client, _ = connect(launch(folders["qwen-image"], "--device", "cuda:7"))
    hello = client.ready()
    assert hello["state"] == "failed" and hello["error"]["class"] == "config" and "cuda:7" in hello["error"]["message"]


def test_a_missing_compiler_is_said_by_hello(launch, folders, tmp_path):
    client, _ = connect(launch(folders["qwen-image"], "--compile", CXX=str(tmp_path / "no-compiler")))
    error = client.ready()["error"]
    assert error["class"] == "config"
    assert error["message"] == "--compile: no C++ compiler; install g++ (or clang), or leave out --compile"
    assert "Traceback" not in (tmp_path / "log-0").read_text()


def test_weights_that_do_not_fit_are_said_by_hello(launch, folders, tmp_path):
    folder = damaged(folders["qwen-image"], tmp_path, lambda f: rewrite(f / "transformer/config.json", num_layers=4))
    client, _ = connect(launch(folder))
    hello = client.ready()
    assert hello["state"] == "failed" and hello["error"]["class"] == "config", hello["error"]
    assert hello["error"]["message"].startswith("transformer: tensors are missing")
