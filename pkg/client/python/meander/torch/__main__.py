"""python -m meander.torch: see --help."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .family import Family

EX_CONFIG = 78
"""Exit status for what a restart does not help."""

_DTYPES = {
    "auto": "auto",
    "f32": "f32",
    "fp32": "f32",
    "float32": "f32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f16": "f16",
    "fp16": "f16",
    "float16": "f16",
}
_NEEDS = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "msgpack", "numpy")
_MIN_TOKEN = 16


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs a worker until a signal, or until stdin closes; exits with 78 where a restart does not help."""
    stdout = _claim_stdout()
    # Before any import of these libraries: they read it then. A worker loads local folders alone.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from .faults import Fault

    try:
        _run(_parse(argv), stdout)
    except Fault as e:
        _exit(f"error: {e}", EX_CONFIG)
    _exit("", 0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = _Parser(prog="meander-torch", description="computes the networks of a diffusers pipeline for a meander sampler")
    p.add_argument("--model", required=True, metavar="MODEL",
        help="folder in the layout of diffusers, with safetensors, or ORG/NAME[@REVISION] of the Hugging Face Hub")
    p.add_argument("--socket", metavar="PATH", help="Unix socket to make, for its user alone")
    p.add_argument("--listen", metavar="HOST:PORT", help="TCP address instead; needs --token-file")
    p.add_argument(
        "--token-file", metavar="FILE", help=f"the token that clients must know, of at least {_MIN_TOKEN} characters"
    )
    p.add_argument("--tls-cert", metavar="FILE", help="PEM certificate of --listen, with --tls-key")
    p.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")
    p.add_argument(
        "--device",
        default="auto",
        help="device of torch: cpu, cuda:0, mps, xpu; auto: an accelerator or the CPU (default)",
    )
    p.add_argument(
        "--text-encoder-device",
        default="",
        metavar="DEVICE",
        help="device of the text encoders, such as cpu (default: the same)",
    )
    p.add_argument(
        "--dtype",
        default="auto",
        choices=sorted(_DTYPES),
        metavar="DTYPE",
        help="dtype of the networks: f32, bf16, f16; auto: bf16, or f32 on a CPU (default)",
    )
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="compute rows one at a time: their bits do not depend on those beside them",
    )
    p.add_argument(
        "--compile",
        action="store_true",
        help="compile the network (torch.compile), which takes minutes at the start and with the first adapters",
    )
    p.add_argument(
        "--vae-tiling",
        action="store_true",
        help="decode in tiles, which needs less memory; pixels differ a little where tiles meet",
    )
    p.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of torch on a CPU (default: torch decides)"
    )
    p.add_argument(
        "--max-rows", type=int, default=64, metavar="N", help="rows of a velocity call at most (default %(default)s)"
    )
    p.add_argument(
        "--exit-with-stdin", action="store_true", help="exit when stdin closes, so that no worker outlives its sampler"
    )
    p.add_argument(
        "--generic", action="store_true", help="compute the pipeline as a whole, also where its network is known"
    )
    p.add_argument(
        "--trust-class", action="store_true", help="try a class of diffusers that is not among those that are tested"
    )
    p.add_argument(
        "--family", default="", metavar="FILE.py:NAME", help="a family or a pipeline of your own, a class of that file"
    )
    p.add_argument(
        "--network",
        default="diffusers",
        choices=("diffusers", "vllm-omni"),
        help="what computes the networks (default %(default)s); vllm-omni: the engine of vLLM-Omni in this process, "
        "for Qwen-Image alone, on one device, with the packages of meander-rl[omni]",
    )
    a = p.parse_args(argv)
    if (a.socket is None) == (a.listen is None):
        p.error("--socket or --listen: one of them is needed")
    if a.listen is not None and a.token_file is None:
        p.error("--token-file: missing; --listen needs it")
    if (a.tls_cert is None) != (a.tls_key is None) or (a.tls_cert and a.listen is None):
        p.error("--tls-cert and --tls-key: both or none, with --listen")
    if a.family and a.generic:
        p.error("--generic: set; must be absent beside --family, whose class says how it is computed")
    if a.compile and a.deterministic:
        p.error("--compile: set; must be absent beside --deterministic, its kernels depend on what ran before")
    if a.network != "diffusers":
        beside = ("generic", "trust_class", "family", "compile", "text_encoder_device")
        if given := next((n for n in beside if getattr(a, n)), ""):
            p.error(f"--{given.replace('_', '-')}: set; must be absent beside --network {a.network}, which has it not")
    if a.threads < 0 or a.max_rows < 1:
        p.error("--threads: must be at least 0; --max-rows: at least 1")
    a.dtype = _DTYPES[a.dtype]
    return a


def _run(a: argparse.Namespace, stdout: IO[str]) -> None:
    from . import PROTOCOL, families
    from .faults import Fault
    from .folder import Folder

    if missing := [n for n in _NEEDS if importlib.util.find_spec(n) is None]:
        raise Fault("config", f"packages: no {', '.join(missing)}; pip install 'meander-rl[torch]'")
    from .family import Settings
    from .server import Server, Worker

    if a.network == "vllm-omni":
        from . import omni

        engine_of: Any = omni.OmniEngine
        family: Family = omni.find(Folder(a.model))
    else:
        engine_of, family = None, families.find(Folder(a.model), a.generic, a.trust_class, a.family)
    family.check()
    family.folder.fingerprint  # noqa: B018 # it is read before hello, which answers at once
    token = _read_token(a.token_file) if a.listen is not None else ""
    tls = _tls(a.tls_cert, a.tls_key) if a.tls_cert else None
    listener, address = _listen_unix(a.socket) if a.socket else _listen_tcp(a.listen)
    settings = Settings(
        a.device, a.dtype, a.text_encoder_device, a.deterministic, a.threads, a.max_rows, a.compile, a.vae_tiling
    )
    worker = Worker(family, settings, token)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    if a.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    server = Server(worker, listener, tls)

    def accept() -> None:
        try:
            server.run()
        except BaseException:
            logging.getLogger("meander.torch").exception("accept")
        if not ended.is_set():  # a worker that takes no calls is worse than none
            _exit("error: the worker accepts no connections any more", 1)

    threading.Thread(target=accept, daemon=True).start()
    print(
        json.dumps({"ready": True, "protocol": PROTOCOL, "address": address, "pid": os.getpid()}),
        file=stdout,
        flush=True,
    )

    def load() -> None:
        from .engine import make_engine

        worker.load(lambda say: (engine_of or make_engine)(family, settings, say))

    threading.Thread(target=load, daemon=True).start()
    ended.wait()
    listener.close()
    worker.stop()
    if a.socket:
        Path(a.socket).unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        _exit(f"error: {message}", EX_CONFIG)


def _claim_stdout() -> IO[str]:
    """Returns stdout for the one line, and leads what libraries print to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _exit(message: str, status: int) -> NoReturn:
    """Ends at once: threads that load or compute do not hold the process."""
    if message:
        print(message, file=sys.stderr)
    sys.stderr.flush()
    # torch makes this folder as it is imported, and removes it in an exit that waits for threads.
    folder = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if isinstance(folder, tempfile.TemporaryDirectory):
        with contextlib.suppress(Exception):
            folder.cleanup()
    os._exit(status)


def _exit_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    _exit("stdin closed: the worker ends", 0)


def _read_token(file: str) -> str:
    from .faults import Fault

    try:
        token = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise Fault("config", f"--token-file: {e}") from e
    if len(token) < _MIN_TOKEN:
        raise Fault(
            "config",
            f"--token-file: {file}: {len(token)} characters; must be at least {_MIN_TOKEN}: openssl rand -hex 32",
        )
    return token


def _tls(cert: str, key: str) -> ssl.SSLContext:
    from .faults import Fault

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as e:
        raise Fault("config", f"--tls-cert {cert}, --tls-key {key}: {e}") from e
    return context


def _listen_unix(path: str) -> tuple[socket.socket, str]:
    """A socket that its user alone may use; one that a worker left behind is replaced."""
    from .faults import Fault

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if not stat.S_ISSOCK(os.lstat(path).st_mode) or other.connect_ex(path) == 0:
                    raise Fault(
                        "config", f"--socket: {path} is in use; name another, or end the worker that listens there"
                    )
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, 0o600)
        listener.listen(16)
    except OSError as e:
        raise Fault("config", f"--socket: {path}: {e}") from e
    return listener, "unix:" + os.path.abspath(path)


def _listen_tcp(address: str) -> tuple[socket.socket, str]:
    from .faults import Fault

    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise Fault("config", f"--listen: {address}; must be HOST:PORT, such as 127.0.0.1:7070 (port 0: any free one)")
    try:
        listener = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as e:
        raise Fault("config", f"--listen: {address}: {e}") from e
    bound = listener.getsockname()
    return listener, f"[{bound[0]}]:{bound[1]}" if ":" in host else f"{bound[0]}:{bound[1]}"


if __name__ == "__main__":
    main()
