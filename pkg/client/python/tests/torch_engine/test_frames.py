"""Frames, and bytes that are none: nothing here needs torch."""

import random
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import numpy as np
import pytest

from meander.torch.faults import Fault
from meander.torch.frames import MAX_HEADER, FrameError, decode_header, read_frame, tensors_of, write_frame


def exchange(data, **options):
    """What read_frame makes of these bytes, after which the stream ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send():
            try:
                ours.sendall(data)
                ours.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the reader gave up before the end

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return read_frame(theirs, **options)
        finally:
            theirs.close()
            sender.join()


def frame(header, body=b""):
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<IQ", len(packed), len(body)) + packed + body


def described(**changes):
    return {"name": "x", "dtype": "f32", "shape": [2, 3], "at": 0, "bytes": 24, **changes}


def test_a_worker_needs_neither_torch_nor_the_nats_client_to_start():
    code = "import sys, meander.torch.families, meander.torch.server; print({'torch', 'nats'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert out.stdout == "set()\n", out.stderr


def test_what_libraries_print_does_not_reach_stdout():
    code = (
        "import os; from meander.torch.__main__ import _claim_stdout; out = _claim_stdout()\n"
        "print('noise', flush=True); os.system('echo more noise'); print('ready', file=out, flush=True)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert out.stdout == "ready\n" and out.stderr == "noise\nmore noise\n"


def test_a_frame_comes_back():
    ours, theirs = socket.socketpair()
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.uint8)
    with ours, theirs:
        write_frame(ours, {"id": 7, "result": {"k": "é"}}, [("a", a), ("b", b), ("none", np.zeros((0, 4), np.float32))])
        header, body = read_frame(theirs)
        assert header["id"] == 7 and header["result"] == {"k": "é"}
        got = tensors_of(header, body)
        assert np.array_equal(got["a"], a) and got["a"].dtype == np.float32
        assert np.array_equal(got["b"], b) and got["none"].shape == (0, 4)
        ours.close()
        assert read_frame(theirs) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x01", "ended"),
        (frame({"id": 1})[:-1], "ended"),
        (frame({"id": 1}, b"1234")[:-1], "ended"),
        (struct.pack("<IQ", 0, 0), "header: 0 bytes"),
        (struct.pack("<IQ", MAX_HEADER + 1, 0), "header: 1048577 bytes"),
        (struct.pack("<IQ", 1, 101), "body: 101 bytes"),
        (struct.pack("<IQ", 1, 2**64 - 1), "body: 18446744073709551615 bytes"),
        (frame([1]), "must be a map"),
        (frame({1: 2}), "must be a msgpack map"),
        (frame(b"\xc1"), "must be a msgpack map"),
        (frame(msgpack.packb({"id": 1}) + b"\x00"), "must be a msgpack map"),
        (frame({"id": msgpack.ExtType(5, b"x")}), "extension type"),
        (frame(b"\x91" * 5000), "must be a msgpack map"),
        (frame(b"\xdd\xff\xff\xff\xff"), "must be a msgpack map"),
    ],
)
def test_bytes_that_are_no_frame(data, why):
    with pytest.raises(FrameError, match=why):
        exchange(data, max_body=100)


def test_a_body_without_memory_is_skipped():
    """Of a process that may take 64 MB more: a body of 256 MB, and the frame after it."""
    code = """if True:
        import resource, socket, struct, threading
        import msgpack
        from meander.torch.frames import read_frame
        ours, theirs = socket.socketpair()
        size, header, part = 1 << 28, msgpack.packb({"id": 1}), bytes(1 << 20)

        def send():
            ours.sendall(struct.pack("<IQ", len(header), size + 3) + header)
            for _ in range(size >> 20):
                ours.sendall(part)
            ours.sendall(b"end" + struct.pack("<IQ", len(header), 3) + header + b"abc")
            ours.close()

        threading.Thread(target=send, daemon=True).start()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        print(read_frame(theirs))
        header, body = read_frame(theirs)
        print(header, bytes(body), read_frame(theirs))
        """
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert out.stdout == "({'id': 1}, None)\n{'id': 1} b'abc' None\n", out.stderr


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": 1},
        ["x"],
        [{"name": "x"}],
        [described(more=1)],
        [described(name=3)],
        [described(dtype="f64")],
        [described(dtype=["f32"])],
        [described(shape="23")],
        [described(shape=[-2, -3])],
        [described(shape=[2.0, 3])],
        [described(shape=[True, 6])],
        [described(shape=[2**40, 2**40])],
        [described(shape=[1] * 8 + [6])],
        [described(at=-1)],
        [described(at=8)],
        [described(at=2**63)],
        [described(bytes=20)],
        [described(bytes=-24)],
        [described(), described()],
        [described(), described(name="y", at=4, shape=[5], bytes=20)],
    ],
)
def test_tensors_that_are_none(tensors):
    with pytest.raises(Fault) as e:
        tensors_of({"tensors": tensors}, np.zeros(28, np.uint8))
    assert e.value.kind == "protocol"


def test_a_tensor_at_an_odd_place_is_read():
    body = np.frombuffer(b"!" + np.arange(6, dtype="<f4").tobytes(), np.uint8)
    got = tensors_of({"tensors": [described(at=1)]}, body)["x"]
    assert np.array_equal(got, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert got.ctypes.data % 4 == 0


def test_damaged_frames_end_in_an_error_or_a_map():
    """20 000 frames with bytes that were changed, cut off or put in."""
    draw = random.Random(0)
    call = {"id": 1, "call": "velocity", "args": {"sigmas": [0.5], "weights": ""}, "tensors": [described()]}
    whole, read = msgpack.packb(call), 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at:]
                    data += draw.randbytes(draw.randrange(8)) + b"\xc0"
                case _:
                    data[at:at] = draw.randbytes(draw.randint(1, 4))
        try:
            header = decode_header(bytes(data))
            tensors_of(header, np.zeros(24, np.uint8))
            read += 1
        except FrameError:
            pass
        except Fault as e:
            assert e.kind == "protocol"
    assert read > 100, "hardly a frame came through: nothing was tested behind the header"
