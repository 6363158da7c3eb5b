"""The scheduler as a seam: a pipeline of diffusers as a function (states, timestep) -> outputs of its loop's steps.

A session is one call of a pipeline that is parked within its loop. Its scheduler is of a subclass of its own class, so
it has all that a pipeline may ask for; only step is ours, which hands the output to the host. Its timesteps are a
tensor whose iterator is endless: the loop gets each timestep that the host asks for, in any order. What a step gives
is after guidance, rescaling and signs: they stay inside the pipeline.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import hashlib
import importlib
import inspect
import itertools
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as trees

from . import encoding, together
from .together import Call
from .whole import COUNTS

_SESSION: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)
"""The session whose pipeline runs here: threads have contexts of their own."""


class _Cancelled(BaseException):
    """Raised within a parked pipeline that is given up."""


class _Parked:
    """A function in a thread of its own, which runs only while its host waits in resume. Greenlets would switch faster,
    but torch walks the whole stack for some of its errors, and theirs is in pieces: the process ends."""

    def __init__(self, run: Callable[[], Any]):
        self._run, self._started, self.ended = run, False, False
        self._in, self._out = queue.SimpleQueue[Any](), queue.SimpleQueue[tuple[str, Any]]()

    def resume(self, value: Any) -> Any:
        """Goes on with a value, and returns what the function parks with, or its result: then it has ended."""
        if self._started:
            self._in.put(value)
        else:
            self._started = True
            threading.Thread(target=self._main, daemon=True).start()
        how, what = self._out.get()
        self.ended = how != "parked"
        if how == "raised":
            raise what
        return what

    def park(self, what: Any) -> Any:
        """Within the function: hands over what, and returns the next value of resume."""
        self._out.put(("parked", what))
        if (value := self._in.get()) is _Cancelled:
            raise _Cancelled
        return value

    def cancel(self) -> None:
        """Ends the function at the line where it is parked."""
        if self._started and not self.ended:
            self._in.put(_Cancelled)
            self._out.get()
        self.ended = True

    def _main(self) -> None:
        try:
            self._out.put(("ended", self._run()))
        except BaseException as e:
            self._out.put(("raised", e))


class Turns(torch.Tensor):
    """Timesteps of a session, whose loop gets from their iterator what the host says; elsewhere a tensor."""

    def __deepcopy__(self, memo: Any) -> Turns:
        return self.as_subclass(torch.Tensor).clone().as_subclass(Turns)

    def __iter__(self) -> Iterator[torch.Tensor]:
        plain, session = self.as_subclass(torch.Tensor), _SESSION.get()
        if session is None or not session._is_loop(sys._getframe(1)):
            return iter(plain)
        return session._turns(plain)


def _enumerate(things: Any, start: int = 0) -> Any:
    """enumerate of a pipeline's module: in its loop the index is that of the host's step, not the count of turns."""
    session, within = _SESSION.get(), getattr(things, "iterable", things)  # of a progress bar
    if session is None or not isinstance(within, Turns) or not session._is_loop(sys._getframe(1)):
        return enumerate(things, start)
    return ((session.index + start, t) for t in session._turns(within.as_subclass(torch.Tensor)))


@functools.cache
def _seam_of(base: Any) -> Any:
    """The subclass of a class of schedulers whose steps are those of the host, in a session."""
    signature = inspect.signature(base.step)

    @functools.wraps(base.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        base.set_timesteps(self, *args, **kwargs)
        if (session := _SESSION.get()) is not None:
            session._planned(self)

    @functools.wraps(base.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = _SESSION.get()
        if session is None:
            return base.step(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("per_token_timesteps") is not None:
            raise ValueError("its steps have a time for each token; must have one for all")
        x = session._step(self, bound.arguments["model_output"], bound.arguments["sample"])
        return output(prev_sample=x) if bound.arguments.get("return_dict", True) else (x, x)

    module = vars(importlib.import_module(base.__module__))
    output = next(v for n, v in module.items() if n.endswith("SchedulerOutput"))
    more = {} if hasattr(base, "scale_model_input") else {"scale_model_input": lambda self, sample, *_, **__: sample}
    return type(base.__name__, (base,), {"set_timesteps": set_timesteps, "step": step, "base": base, **more})


class Ghost:
    """A network as its pipeline sees it. In turns whose output is not read it answers with zeros of the shapes that it
    gave for such inputs before, or of those of the inputs that all it ever gave was shaped as."""

    def __init__(self, network: Any, session: Session, shapes: dict[Any, Any]):
        vars(self).update(_network=network, _session=session, _shapes=shapes)

    __class__ = property(lambda self: type(self._network))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._network, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = id(self._network), repr(trees.tree_map(_known, (args, kwargs)))
        like = self._shapes.get(key)
        self._session.calls += 1
        if self._session.unread and like is not None:
            return _full(like, 0)
        inputs, own = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)], id(self._network)
        if self._session.unread and (at := self._shapes.get(own)) is not None:
            return trees.tree_map_only(int, lambda i: torch.zeros_like(inputs[i]), at)
        if self._session.joint:
            out = self._session._park("network", (self._network, args, kwargs), like)
        else:
            out = self._network(*args, **kwargs)
        if like is None:  # of each tensor one number, with its shape
            self._shapes[key] = trees.tree_map_only(torch.Tensor, lambda t: t.new_zeros(()).expand(t.shape), out)
            shapes, at = [x.shape for x in inputs], None
            if all(x.shape in shapes for x in trees.tree_leaves(out) if isinstance(x, torch.Tensor)):
                at = trees.tree_map_only(torch.Tensor, lambda x: shapes.index(x.shape), out)
            self._shapes[own] = at if self._shapes.get(own, at) == at else None
        return out


def _known(v: Any) -> Any:
    """What of an argument the shapes depend on."""
    if isinstance(v, torch.Tensor):
        return v.shape, v.dtype, v.device
    return v if isinstance(v, int | str | None) else type(v)


def _full(like: Any, value: float) -> Any:
    """Tensors as others are, of one value."""
    return trees.tree_map_only(torch.Tensor, lambda t: torch.full_like(t, value), like)


class Memo:
    """What the encoders of a pipeline gave, by their arguments: prompts and conditions are encoded once for many
    sessions, of one sample or of several. before is called when a prompt is to be encoded."""

    def __init__(self, count: int = 64):
        self.count = count
        self.before: Callable[[], None] = lambda: None
        self.cut: list[encoding.Cut] = []
        """The prompts that were cut in what was given since this was cleared."""
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._layouts: dict[str, together.Layout | None] = {}  # of what methods give; None: it is not known

    def of(self, pipe: Any, name: str, part: str = "") -> Callable[..., Any]:
        """The method of a pipeline, or of a part of it, which remembers."""
        method, key = getattr(pipe, name), f"{part}.{name}"
        signature = inspect.signature(method)

        @functools.wraps(method)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            count = next((c for c in COUNTS if (given.arguments.get(c) or 1) > 1), "")
            if not count or _generators(args, kwargs):
                return self._once(pipe, key, method, given.args, given.kwargs)

            def of(n: int) -> Any:
                given.arguments[count] = n
                return self._once(pipe, key, method, given.args, given.kwargs)

            several = given.arguments[count]
            if key not in self._layouts:
                self._layouts[key] = together.repeated(of(1), of(2))
            layout = self._layouts[key]
            return layout.join([of(1)] * several) if layout else of(several)

        return remembered

    def _once(self, pipe: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        own = {k: v for k, v in vars(pipe).items() if isinstance(v, int | float | str | None)}
        key, generators = digest([name, args, kwargs, own]), _generators(args, kwargs)
        if key not in self._kept:
            if name.endswith("prompt"):
                self.before()
            with torch.no_grad(), encoding.cuts() as cut:
                out = method(*args, **kwargs)
            self._kept[key] = out, [g.get_state() for g in generators], cut
            if len(self._kept) > self.count:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        kept, after, cut = self._kept[key]
        self.cut += cut
        for g, state in zip(generators, after, strict=True):
            g.set_state(state)
        return copy.deepcopy(kept)

    def clear(self) -> None:
        """Forgets all."""
        self._kept.clear()


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    return [v for v in trees.tree_leaves((args, kwargs)) if isinstance(v, torch.Generator)]


def digest(v: Any) -> str:
    """The SHA-256 in hex of a value of maps, lists, scalars, tensors, arrays and images; maps have no order."""
    h = hashlib.sha256()

    def add(v: Any) -> None:
        if isinstance(v, dict):
            h.update(b"{%d" % len(v))
            for k in sorted(v):
                add(k)
                add(v[k])
        elif isinstance(v, list | tuple):
            h.update(b"[%d" % len(v))
            for x in v:
                add(x)
        elif isinstance(v, torch.Generator):
            add(v.get_state())
        elif isinstance(v, torch.Tensor | np.ndarray) or hasattr(v, "tobytes"):
            add([str(getattr(v, "dtype", getattr(v, "mode", ""))), list(getattr(v, "shape", getattr(v, "size", ())))])
            add(v.stride() if isinstance(v, torch.Tensor) else ())  # by which kernels round
            a = v.detach().cpu().reshape(-1).view(torch.uint8) if isinstance(v, torch.Tensor) else v
            h.update(np.ascontiguousarray(a).tobytes())
        else:
            text = repr(float(v) if isinstance(v, float) else v).encode()
            h.update(b"%d:" % len(text) + text)

    add(v)
    return h.hexdigest()


_IN_THE_LOOP = ("transformer", "unet", "controlnet", "prior", "dit", "decoder", "adapter", "guidance")
_ENCODERS = ("rewire_prompt", *(f"{_}encode_{of}" for _ in ("", "_") for of in ("prompt", "image", "vae_image")))


class Session:
    """One call of a pipeline, parked between the steps of its loop, on an object and schedulers of its own: the
    networks are shared, what a call sets is not.

    begin runs what comes before the loop. evaluate is one turn of it at any states. end leaves it. grad: outputs have
    the gradients of what the networks compute in a turn, and nothing before it has. shapes, of ghosts, and memo are
    those of all sessions of a pipeline. first: the first turn is computed even where it is not read, for pipelines
    that keep something of it.
    """

    def __init__(
        self, pipe: Any, call: dict[str, Any], grad: bool = False, shapes: dict[Any, Any] | None = None,
        memo: Memo | None = None, first: bool = True,
    ):  # fmt: skip
        self.pipe, self._call, self._grad, self._first = copy.copy(pipe), call, grad, first
        self.at = "new"
        """new, turn, network, step, done or failed."""
        self.unread, self.joint, self.index, self.turns = False, False, 0, 0
        """Of this turn: whether it is not read, whether the host computes its networks, its index; and their count."""
        self.calls = self.usual = 0
        """Calls of networks in this turn, and in the first."""
        self.states, self.schedulers = list[torch.Tensor](), list[Any]()
        """The states that the pipeline had in its last turn, one for each track, and what stepped them."""
        self.loop = torch.empty(0)
        """The timesteps of the loop."""
        self.encoded = dict[str, torch.Tensor]()
        """What the texts are encoded to, by the pipeline's names."""
        self._places = dict[Any, int]()  # of each scheduler that has a plan, in that
        own = vars(self.pipe)
        for name, part in pipe.components.items():
            if hasattr(part, "set_timesteps") and hasattr(part, "step"):
                own[name] = copy.deepcopy(part)
                base: Any = type(part)
                own[name].__class__ = _seam_of(base)
            elif isinstance(part, torch.nn.Module) and name.startswith(_IN_THE_LOOP):
                own[name] = Ghost(part, self, {} if shapes is None else shapes)
            elif "guider" in name:
                own[name] = copy.deepcopy(part)
            elif memo is not None and isinstance(part, torch.nn.Module) and hasattr(part, "encode"):
                own[name] = copy.copy(part)  # with the same weights
                own[name].encode = memo.of(own[name], "encode", name)
        for name in _ENCODERS:
            if memo is not None and hasattr(self.pipe, name):
                own[name] = memo.of(self.pipe, name)
        own["_progress_bar_config"] = {"disable": True}
        self._body = inspect.unwrap(type(pipe).__call__)
        if hasattr(self.pipe, "encode_prompt"):
            own["encode_prompt"] = encoding.noting(self.pipe.encode_prompt, self._body, self.encoded)
        self._body.__globals__["enumerate"] = _enumerate
        self._parked = _Parked(self._main)

    # The host's side.

    def begin(self) -> torch.Tensor:
        """Runs the pipeline to its loop, and returns the timesteps of that."""
        self._resume_seeded()
        if self.at != "turn":
            raise ValueError(f"{type(self.pipe).__name__}: ends without a loop over timesteps")
        return self.loop

    def evaluate(
        self, states: list[torch.Tensor], t: torch.Tensor, k: int, after: int | None = None,
        sigma: float | None = None, joint: bool = False, ahead: bool = False,
    ) -> Generator[list[Call], list[Any], list[torch.Tensor]]:  # fmt: skip
        """Returns the outputs of a turn at states, one for each track, a timestep and an index.

        after: the turn before must have that index, -1 before the first, for pipelines that compute on the state
        between two turns. sigma: the scheduler scales the input of the network by this one, and not by that of its
        table. joint: yields the calls of networks, and is sent what they give. ahead: yields all calls of a turn at
        once. Until then the pipeline has NaNs for what they give; where these are looked at, or calls are lacking, the
        turn is done again, call after call.
        """
        for hasty in (True, False) if ahead and joint and self.usual > 1 else (False,):
            self.place(states, after)
            outputs, waiting = list[torch.Tensor](), list[tuple[Call, Any]]()
            self.joint = joint
            try:
                self._begin_turn(t, k, sigma)
                while True:
                    while self.at == "network":
                        call, like = self._asked
                        if hasty and like is not None and self.calls < self.usual:
                            waiting.append((call, _full(like, torch.nan)))
                            self._resume(waiting[-1][1])
                            continue
                        *before, last = yield [*(call for call, _ in waiting), call]
                        for (_, held), out in zip(waiting, before, strict=True):
                            trees.tree_map_(lambda v, given: v.copy_(given) if torch.is_tensor(v) else v, held, out)
                        waiting = []
                        self._resume(last)
                    outputs.append(self._see(len(outputs)))
                    if len(outputs) == len(states):
                        break
                    self._resume(self.states[-1])
            finally:
                self.joint = False
            if not waiting and not (hasty and any(bool(out.isnan().any()) for out in outputs)):
                break
        return outputs

    def place(self, states: list[torch.Tensor], after: int | None = None) -> None:
        """Has the pipeline hold states at the beginning of a turn."""
        if self.at == "step" and len(states) == 1 and after in (None, self.index):
            self._resume(states[0])
            return
        while self.at == "step":
            self._resume(self._asked[2])  # as it was
        if not self.turns:
            self._turn(0, states, unread=not self._first)
            if after in (None, 0):
                return
        self._turn(after or 0, states, unread=True)

    def end(self, states: list[torch.Tensor]) -> Any:
        """Ends the loop with states, and returns what the pipeline makes of them."""
        self.place(states, len(self.loop) - 1)
        self._resume_seeded()
        if self.at != "done":
            raise ValueError(f"{type(self.pipe).__name__}: another loop follows the first; must be one")
        return self.result

    def cancel(self) -> None:
        """Gives the session up: the pipeline ends at the line where it is parked."""
        self._parked.cancel()
        self.at = "done"

    def first_states(self) -> list[torch.Tensor]:
        """The states that the pipeline itself begins with."""
        if not self.turns:
            self._turn(0, None, unread=not self._first)
        return self.states

    def first_output(self) -> torch.Tensor:
        """The output of the first turn at the first of them."""
        self._begin_turn(self.loop[0], 0)
        return self._see(0)

    def states_by_own_steps(self) -> list[torch.Tensor]:
        """Runs the loop with the steps of the pipeline's own schedulers, and returns the last states."""
        out: list[torch.Tensor] = []
        for k, t in enumerate(self.loop):
            self._begin_turn(t, k)
            out = []
            while not out or self.at == "step":
                output = self._see(len(out))
                scheduler, x = self.schedulers[-1], self.states[-1]
                out.append(type(scheduler).base.step(scheduler, output, t, x, return_dict=False)[0])
                self._resume(out[-1])
        return out

    def _turn(self, k: int, states: list[torch.Tensor] | None, unread: bool) -> None:
        """One whole turn, -1 before the first; its states become those given, None: stay."""
        self.unread, part = unread, 0
        try:
            self._begin_turn(self.loop[max(k, 0)], k)
            while not part or self.at == "step":
                self._see(part)
                if states is not None and part >= len(states):
                    raise ValueError(f"{type(self.pipe).__name__}: more than {len(states)} steps in a turn")
                self._resume(self.states[-1] if states is None else states[part])
                part += 1
        finally:
            self.unread = False
        self.usual = self.usual or self.calls

    def _begin_turn(self, t: torch.Tensor, k: int, sigma: float | None = None) -> None:
        """Resumes the loop with a timestep and an index, for which its schedulers are placed: those that scale the
        input of the network look their index up once, and then count."""
        self.turns, self.index, self.calls = self.turns + 1, k, 0
        for scheduler in self._places:
            table = scheduler.timesteps.as_subclass(torch.Tensor).double().cpu()
            at = int((table - t.double().cpu().flatten()[0]).abs().argmin()) if k >= 0 else -1
            self._places[scheduler] = at
            if hasattr(scheduler, "_step_index"):
                scheduler._step_index = at
            if sigma is not None:
                scheduler.sigmas = scheduler.sigmas.clone()
                scheduler.sigmas[at] = sigma
        self._resume(t)

    def _see(self, part: int) -> torch.Tensor:
        """Notes the state and the scheduler of a step, and returns what it is given."""
        if self.at != "step":
            name = type(self.pipe).__name__
            raise ValueError(f"{name}: {part} steps of a scheduler in a turn; must be {part + 1} or more")
        self.schedulers[part:], output, self.states[part:] = [self._asked[0]], self._asked[1], [self._asked[2]]
        return output

    def _resume_seeded(self) -> None:
        """Resumes a pipeline that may draw noise of torch's default generator, to encode conditions or in its decoder:
        it is the same for all sessions."""
        device = self.pipe.device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
            torch.manual_seed(0)
            self._resume(None)

    def _resume(self, value: Any) -> None:
        """Goes on with a value until the pipeline parks, or ends."""
        try:
            what = self._parked.resume(value)
        except BaseException:
            self.at = "failed"
            raise
        if self._parked.ended:
            self.at, self.result = "done", what
        else:
            self.at, *self._asked = what

    # The pipeline's side.

    def _is_loop(self, frame: Any) -> bool:
        """Whether a caller that iterates over timesteps is the loop of a pipeline, or its progress bar."""
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        of_pipeline = "/schedulers/" not in file and "/diffusers/" in file or file == self._body.__code__.co_filename
        return "/tqdm/" in file or of_pipeline and not code.co_name.startswith("<")

    def _main(self) -> Any:
        _SESSION.set(self)
        if (device := self.pipe.device).type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # a thread begins with the first
        torch.set_grad_enabled(False)
        return self._body(self.pipe, **self._call)

    def _park(self, *what: Any) -> Any:
        """Hands over what it waits for, and returns what it is given."""
        answer = self._parked.park(what)
        torch.set_grad_enabled(self._grad and what[0] != "step" and not self.unread)
        return answer

    def _planned(self, scheduler: Any) -> None:
        scheduler.timesteps = scheduler.timesteps.as_subclass(Turns)
        self._places[scheduler] = 0

    def _turns(self, timesteps: torch.Tensor) -> Iterator[torch.Tensor]:
        self.loop = timesteps
        while (t := self._park("turn")) is not None:
            yield t

    def _step(self, scheduler: Any, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if output.ndim > 1 and output.ndim == x.ndim and output.shape[1] == 2 * x.shape[1]:
            output = output[:, : x.shape[1]]  # the rest is a learned variance
        x = self._park("step", scheduler, output, x)
        if getattr(scheduler, "_step_index", None) is not None:  # inpainting adds noise by it
            scheduler._step_index = self._places.get(scheduler, self.index) + 1
        return x
