"""What is proven of a pipeline beyond its admission: it ends where diffusers ends, a trainer finds the ratio 1 and the
gradient of finite differences, and a worker that is killed goes on in another."""

import contextlib
import os
import signal
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch
from talk import connect

from meander.torch.admission import check_euler

NOISE = 0.7
STEP = 3e-4  # of finite differences, of the norm of the weights


def sigmas_of(run):
    return run.grids[0].sigmas


def first_state(run):
    """The state that the pipeline begins with itself, canonical [1, n]."""
    states = run.session.first_states()
    return run.joined([g.canonical(x, g.find(g.sigmas[0])) for g, x in zip(run.grids, states, strict=True)])


def euler(velocity, y, sigmas):
    """The states of Euler's steps over sigmas, the first among them."""
    ys = [y]
    for s, s2 in zip(sigmas, sigmas[1:], strict=False):
        ys.append((ys[-1].double() + (s2 - s) * velocity(ys[-1], s).double()).float())
    return ys


def arrays(result):
    """The media of a pipeline's output, float64."""
    values = result.values() if isinstance(result, dict) else result
    return [
        np.asarray(v.detach().float().numpy() if isinstance(v, torch.Tensor) else v, np.float64)
        for v in values
        if v is not None
    ]


_OF_A_PERSON = {"prompt", "height", "width", "max_area", "num_frames", "video_length", "num_inference_steps",
                "output_type", "generator", "strength"}  # fmt: skip


def asked(loaded, recipe, **given):
    """The pipeline's call with what the recipe of a test gives, and nothing else: guidance is the pipeline's own."""
    needed = {x["name"] for x in (*loaded.family.conditions, *loaded.family.arguments) if x["required"]}
    return {n: v for n, v in loaded.call_of(recipe).items() if n in _OF_A_PERSON | needed} | given


def end_of_diffusers(loaded, recipe, **given):
    """How far the media of Euler's steps are from those of the pipeline's own call, of the largest value. given: what
    that call is given besides, as in the recipe."""
    run = loaded.session(recipe)
    ours = arrays(run.end(euler(run.velocity, first_state(run), sigmas_of(run))[-1]))
    run.session.cancel()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        theirs = arrays(loaded.family.pipe(**asked(loaded, recipe, **given)))
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def ratio(loaded, recipe):
    """The largest |ratio - 1| of a trainer's log-probs to those of a rollout by sde, in a session of its own."""
    from meander.maths.transition import kernel

    run = loaded.session(recipe)
    sigmas, y = sigmas_of(run), first_state(run)
    noise, steps = torch.Generator().manual_seed(3), []
    for k, s in enumerate(sigmas[:-1]):
        step = kernel("sde", NOISE, sigmas, k)
        v = run.velocity(y, s).numpy()
        eps = torch.randn(y.shape, generator=noise).double().numpy()
        after = torch.from_numpy((step.mean(y.numpy(), v) + step.noise_std * eps).astype(np.float32))
        steps.append((step, y, after, step.log_prob(y.numpy(), v, after.numpy())))
        y = after
    run.session.cancel()
    again = loaded.session(recipe, grad=True)
    with torch.enable_grad():
        vs = [again.velocity(y, step.sigma).detach().numpy() for step, y, _, _ in steps]
    again.session.cancel()
    news = [step.log_prob(y.numpy(), v, after.numpy()) for v, (step, y, after, _) in zip(vs, steps, strict=True)]
    return max(abs(float(np.exp(new - old)) - 1) for new, (_, _, _, old) in zip(news, steps, strict=True))


def gradient(loaded, recipe):
    """A finite difference along the gradient of a loss, by the norm of that: 1."""
    run = loaded.session(recipe, grad=True)
    sigma, y = sigmas_of(run)[1], first_state(run)
    weights = [p.requires_grad_(True) for p in loaded.family.networks[""].parameters() if p.is_floating_point()]
    project = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).double()

    def loss():
        return (run.velocity(y, sigma).double() * project).sum()

    try:
        with torch.enable_grad():
            slopes = torch.autograd.grad(loss(), weights, allow_unused=True)
        pairs = [(p, g.double()) for p, g in zip(weights, slopes, strict=True) if g is not None]
        norm = float(sum(g.square().sum() for _, g in pairs)) ** 0.5
        size = float(sum(p.detach().double().square().sum() for p, _ in pairs)) ** 0.5
        kept = [p.detach().clone() for p, _ in pairs]

        def at(h):
            with torch.no_grad():
                for (p, g), w in zip(pairs, kept, strict=True):
                    p.copy_((w.double() + h / norm * g).float())
                return float(loss())

        def difference(h):
            return (at(h) - at(-h)) / (2 * h)

        h = STEP * size
        found = (4 * difference(h / 2) - difference(h)) / 3
        at(0)
        return found / norm
    finally:
        run.session.cancel()
        for p in weights:
            p.requires_grad_(False)


class Standby:
    """A worker process of a folder that begins once start is called; it ends with this process.

    It is forked from one that has imported torch: make it before that computes.
    """

    def __init__(self, folder, address, *args):
        self.wait, self.go = os.pipe()
        here, there = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                os.close(self.go)
                os.close(here)
                os.dup2(there, 1)
                os.dup2(self.wait, 0)
                if not os.read(0, 1):
                    os._exit(0)
                from meander.torch.__main__ import main

                main(["--model", str(folder), "--socket", str(address), "--device", "cpu", "--dtype", "f32", "--generic",
                      "--trust-class", "--threads", "1", "--exit-with-stdin", *args])  # fmt: skip
            os._exit(1)
        os.close(self.wait)
        os.close(there)
        self.stdout = os.fdopen(here)

    def start(self):
        os.write(self.go, b"1")

    def client(self):
        """A connection to the worker once it is ready."""
        client, _ = connect(SimpleNamespace(stdout=self.stdout))
        hello = client.ready()
        if hello["state"] != "ready":
            raise RuntimeError(f"worker: {hello}")
        return client

    def kill(self):
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def resumes(workers, loaded, recipe):
    """Whether a rollout that loses its worker in the middle ends with the same bits in the next one, media too."""
    run = loaded.session(recipe)
    sigmas, y = sigmas_of(run), first_state(run)
    run.session.cancel()
    shape = (1, *loaded.family.latent_shape(recipe.size))
    whole, rest = Caller(workers[0].client(), loaded, recipe, shape), None
    ys = euler(whole.velocity, y, sigmas)
    media = whole.decode(ys[-1])
    workers[0].kill()
    workers[1].start()
    rest, half = Caller(workers[1].client(), loaded, recipe, shape), len(sigmas) // 2
    again = euler(rest.velocity, ys[half], sigmas[half:])
    same = all(torch.equal(a, b) for a, b in zip(again, ys[half:], strict=True))
    other = rest.decode(again[-1])
    workers[1].kill()
    return same and media.keys() == other.keys() and all(np.array_equal(media[n], other[n]) for n in media)


class Caller:
    """A recipe in a worker, by its protocol."""

    def __init__(self, client, loaded, recipe, shape):
        self.client, self.shape, self.size = client, shape, asdict(recipe.size)
        for digest in {d for digests in recipe.conditions.values() for d in digests}:
            kind, value = loaded.conditions.get(digest)
            a = value if kind == "audio" else np.stack([np.asarray(v) for v in (value if kind == "video" else [value])])
            a = a[..., None] if a.ndim == 3 and kind == "mask" else a
            head = (*a.shape, 0, 0)[:3] if kind != "audio" else (len(a), 0, 0)
            args = {"digest": digest, "type": kind, **dict(zip(("frames", "height", "width"), head, strict=True))}
            client("condition", args, {"condition": a})
        given = {"prompts": [list(recipe.texts)], "conditions": recipe.conditions, "arguments": recipe.arguments,
                 "truncate": recipe.truncate, "guidance": recipe.guidance, "steps": recipe.steps, **self.size}  # fmt: skip
        self.handle = client("put", {"recipe": given})[0]["handle"]

    def velocity(self, y, sigma):
        args = {"sigmas": [sigma], "handles": [self.handle], "guidance": [0.0], "weights": "", **self.size}
        v = self.client("velocity", args, {"x": y.reshape(self.shape).numpy()})[1]["v"]
        return torch.from_numpy(v.copy()).reshape(1, -1)

    def decode(self, y):
        return self.client("decode", {"handle": self.handle, **self.size}, {"x": y.reshape(self.shape[1:]).numpy()})[1]


def prove(workers, loaded, recipe):
    """The columns of the table: a number or a truth, or why there is none."""
    out = {}
    for name, f, args in (
        ("state", check_euler, ()), ("media", end_of_diffusers, ()), ("ratio", ratio, ()), ("resume", resumes, (workers,)), ("gradient", gradient, ()),
    ):  # fmt: skip
        try:
            out[name] = f(*args, loaded, recipe)
        except Exception as e:
            out[name] = f"{type(e).__name__}: {e}"[:200]
            print(f"{name}: {out[name]}", file=sys.stderr)
    return out
