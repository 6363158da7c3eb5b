#!/usr/bin/env python3
"""A reward function as a NATS worker: how colourful is the image?

The score is the colourfulness of Hasler and Suesstrunk (2003), equation 10, divided by 100:
0 for grey, about 1 for "extremely colourful". Start as many workers as you like: the queue
group gives each request to one of them.

    pip install -r requirements.txt
    python worker.py --url nats://127.0.0.1:4222 --name colour
    meander publish --run demo --reward nats:colour 'a red sign that says "OPEN"'
"""

import argparse
import asyncio
import inspect
import io
import math
import os
import re
import signal
import ssl
import sys

import msgpack
import nats
import nats.aio.client
import nats.errors
import nats.micro
from PIL import Image

PROTOCOL = 1
MAX_SIDE = 8192  # an image is read into memory: bound it


def colourfulness(img):
    """The score of a Pillow image; more than 128 pixels a side tell nothing new."""
    img = img.convert("RGB")
    img.thumbnail((128, 128))
    pixels = list(zip(*[iter(img.tobytes())] * 3))
    rg = [r - g for r, g, _ in pixels]
    yb = [(r + g) / 2 - b for r, g, b in pixels]

    def moments(values):
        mean = sum(values) / len(values)
        return mean, sum((v - mean) ** 2 for v in values) / len(values)

    rg_mean, rg_var = moments(rg)
    yb_mean, yb_var = moments(yb)
    return (math.sqrt(rg_var + yb_var) + 0.3 * math.hypot(rg_mean, yb_mean)) / 100


async def answer(data):
    """The reply to one request. Whatever goes wrong with this image is its own error. The score may use more of the
    request: prompt, ground_truth, params, and metadata, the record that the prompt came with."""
    try:
        request = msgpack.unpackb(data)
        if request["v"] != PROTOCOL:
            raise ValueError(f"protocol {request['v']}; must be {PROTOCOL}")
        if request.get("group_size"):
            raise ValueError("it rates samples one by one: leave out --group-min")
        img = Image.open(io.BytesIO(request["image"]), formats=[request["image_format"]])
        if max(img.size) > MAX_SIDE:
            raise ValueError(f"image of {img.size}; must be at most {MAX_SIDE} a side")
        score = await asyncio.to_thread(colourfulness, img)
        if inspect.isawaitable(score):  # an async function, too
            score = await score
        if not math.isfinite(score):
            raise ValueError(f"score is {score}; must be a finite number")
        reply = {"v": PROTOCOL, "score": score, "detail": f"colourfulness {100 * score:.0f}"}
    except MemoryError:
        reply = {"v": PROTOCOL, "error": "out of memory", "retry": True}  # it may pass
    except Exception as e:
        reply = {"v": PROTOCOL, "error": f"{type(e).__name__}: {e}"}
    return msgpack.packb(reply)


def credentials(file):
    """The keywords of nats.connect for a file of meander auth, or of a JWT and its key."""
    if not file:
        return {}
    with open(file) as f:
        text = f.read()
    seed = re.search(r"^SU[A-Z2-7]{56}$", text, re.MULTILINE)
    if not seed or "BEGIN NATS USER JWT" in text:
        return {"user_credentials": file}
    import nkeys

    key = nkeys.from_seed(seed[0].encode()).public_key.decode()
    return {"nkeys_seed_str": seed[0], "inbox_prefix": "_INBOX." + key}  # no other user may subscribe to these inboxes


class Secured(nats.aio.client.Client):
    """Says who it is over TLS alone. The library goes on in the clear where a server offers none, tls:// or not."""

    def _connect_command(self):
        if not self._server_info.get("tls_required"):
            raise nats.errors.Error(
                "no authorization over this connection: the server does not want TLS; "
                "connect to nats://, without --tls-ca, if that is meant"
            )
        return super()._connect_command()


async def serve(args):
    """Answers requests until the process is asked to stop; returns the exit status."""
    stop = asyncio.Event()
    refused = []  # why the server will not have us: that does not pass
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, stop.set)

    async def on_error(e):
        print(f"nats: {e}", file=sys.stderr)
        why = str(e).lower()
        # On a busy machine the server's time for this process to say who it is can be over: that passes.
        if "timeout" not in why and ("authorization" in why or "authentication" in why):
            refused.append(e)
            stop.set()

    nc = Secured() if args.url.startswith("tls://") or args.tls_ca else nats.NATS()
    connecting = asyncio.create_task(nc.connect(
        args.url, error_cb=on_error, max_reconnect_attempts=-1,
        token=os.environ.get("MEANDER_NATS_TOKEN") or None, **credentials(args.creds),
        tls=ssl.create_default_context(cafile=args.tls_ca) if args.tls_ca else None,
    ))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        connecting.cancel()
        return denied(args) if refused else 0
    connecting.result()
    subject = f"mdr.v1.score.{args.name}"

    async def handle(request):
        reply = await answer(request.data)
        if error := msgpack.unpackb(reply).get("error"):
            # `nats micro stats` counts it
            await request.respond_error("500", " ".join(error.split())[:500], data=reply)
        else:
            await request.respond(reply)

    # As a service of NATS, which `nats micro ls` lists beside the workers of meander-rl.
    service = await nats.micro.add_service(nc, name="meander-scorer", version="1.0.0", description=f"nats:{args.name}")
    await service.add_endpoint(name=args.name, subject=subject, queue_group=args.name, handler=handle)
    await nc.flush()
    print(f"listening on {subject}", flush=True)
    await stop.wait()
    if refused:
        return denied(args)
    try:
        await nc.drain()  # requests in flight are answered, new ones go to other workers
    except nats.errors.Error as e:  # the server is away: no answer can be sent
        print(f"stopped while NATS is away; open requests stay unanswered: {e}", file=sys.stderr)
        await nc.close()
    return 0


def denied(args):
    print(
        f"{args.url} does not accept these credentials; set MEANDER_NATS_TOKEN, or name a file with --creds",
        file=sys.stderr
    )
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", default=os.environ.get("MEANDER_NATS_URL") or "nats://127.0.0.1:4222",
        help="NATS server, or $MEANDER_NATS_URL (default %(default)s); its token is read from $MEANDER_NATS_TOKEN"
    )
    parser.add_argument(
        "--creds", default=os.environ.get("MEANDER_NATS_CREDS"),
        help="file of credentials, a key or a JWT and its key, or $MEANDER_NATS_CREDS"
    )
    parser.add_argument(
        "--tls-ca", default=os.environ.get("MEANDER_NATS_TLS_CA"),
        help="PEM file of the authority that signed the server's certificate, or $MEANDER_NATS_TLS_CA"
    )
    parser.add_argument("--name", default="colour", help="prompts ask for nats:NAME (default %(default)s)")
    args = parser.parse_args()
    sys.exit(asyncio.run(serve(args)))


if __name__ == "__main__":
    main()
