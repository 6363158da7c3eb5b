"""The model of a worker: it loads a folder, and computes one call at a time."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .family import Family, Prompt, Settings, Size
from .faults import Fault, first_sentence
from .weights import Weights, tensor_bytes

_TILE = 512  # pixels
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""dtypes of networks by their names in Settings."""
Tensors = dict[str, np.ndarray]
"""Arrays of a call by name."""
Answer = tuple[dict[str, Any], list[tuple[str, np.ndarray]]]
"""What a call returns: fields of the header, and named arrays."""


class Handles:
    """Encoded prompts by the digest of their tensors; what was used longest ago goes first."""

    def __init__(self, count: int = 1024, size: int = 1 << 29):
        self._count, self._size, self._held = count, size, 0
        self._kept: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()

    def put(self, handle: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the tensors of one prompt, and forgets others where there are too many or too large ones."""
        if handle in self._kept:
            self._kept.move_to_end(handle)
            return
        self._kept[handle] = tensors
        self._held += tensor_bytes(tensors)
        while len(self._kept) > 1 and (len(self._kept) > self._count or self._held > self._size):
            self._held -= tensor_bytes(self._kept.popitem(last=False)[1])

    def get(self, handle: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a handle. Fault of class handle: it is not kept."""
        if handle not in self._kept:
            raise Fault("handle", f"handles: {handle:.80}: unknown; put its tensors and repeat the call")
        self._kept.move_to_end(handle)
        return self._kept[handle]


class Engine:
    """The networks of one folder. Every call must be under one lock, and leaves no gradients.

    Calls take arguments that were checked for their types, and tensors by name; they return the result and the tensors
    of the answer, which hold no memory of the model.
    """

    takes_recipes = False
    """Whether encode and put take recipes, with conditions and arguments."""

    def __init__(
        self, family: Family, settings: Settings, say: Callable[[str], None] = lambda detail: None, networks: str = ""
    ):
        """Loads the folder of a family, whole pipelines' networks on a device that may be another, and says what it
        does. Fault of class config: it cannot be read, or the device is not there."""
        self.family, self.settings = family, settings
        device = find_device(settings.device)
        encoders = find_device(settings.encoders, "text_encoder_device") if settings.encoders else device
        self.dtype = settings.dtype if settings.dtype != "auto" else "f32" if device.type == "cpu" else "bf16"
        _prepare(settings, self.dtype)
        family.attach(family.load(DTYPES[self.dtype], device, say, encoders, networks), encoders)
        if settings.vae_tiling:
            _tile(family)
        self.device, self.handles = device, Handles()
        self.weights = Weights(family.networks, settings.compile)  # its tables are taken before anything is added
        if settings.compile:
            self._compile(say)

    def within(self, compute: Callable[[], Any]) -> Any:
        """Computes in the thread that the engine wants."""
        return compute()

    def check_decoder(self) -> None:
        """Decodes a small latent, so that a VAE that cannot is found before samples are made. Fault of class config."""
        size = _small(self.family)
        try:
            with torch.no_grad():
                _, [(_, media)] = self.decode(size, {"x": np.zeros(self.family.latent_shape(size), np.float32)})
            shape, want = list(media.shape), [1, size.height, size.width, 3]
            if shape != want:
                raise ValueError(f"pixels {shape}; must be {want} of {size.height} x {size.width}")
        except Exception as e:
            if is_out_of_memory(e):
                raise
            raise Fault("config", f"vae: a small latent is not decoded: {type(e).__name__}: {e}") from e

    def _compile(self, say: Callable[[str], None]) -> None:
        """Compiles the networks at the default size, for one row and for several, and at another size: with it the code
        is for all of them."""
        compile_networks(self.family)
        card = self.family.card()
        default = Size(**card["size"])
        item = self.encode([[""]], True)[0]["items"][0]
        small = _small(self.family)
        counts = range(1, min(2, self.settings.max_rows) + 1)
        for n, size in [(n, default) for n in counts] + [(1, small)]:
            of = "all sizes" if size == small else f"{n} of {self.settings.max_rows} rows"
            say(f"compiling the network for {of}")
            x = np.zeros((n, *self.family.latent_shape(size)), np.float32)
            for sigma in (0.99, 0.01):  # a second transformer has the small ones
                self.velocity([], [sigma] * n, [item["handle"]] * n, [card["guidance"]] * n, size, "", {"x": x})

    def encode(self, prompts: list[Any], truncate: bool) -> Answer:
        """Encodes prompts, a list of texts each: items [{handle, cut, tensors}], where tensors are the places of their
        arrays, f32, in the answer. Fault: prompt, protocol."""
        items: list[dict[str, Any]] = []
        tensors: list[tuple[str, np.ndarray]] = []
        for i, texts in enumerate(prompts):
            if (
                not isinstance(texts, list)
                or not 1 <= len(texts) <= self.family.prompts
                or not all(isinstance(t, str) for t in texts)
            ):
                raise Fault("protocol", f"prompts[{i}]: must be a list of 1 to {self.family.prompts} texts")
        for texts in prompts:
            encoded, cut = self.family.encode(Prompt(tuple(texts)), truncate)
            arrays = [(n, _array(encoded[n])) for n in self.family.conditioning]
            items.append(
                {"handle": self._keep(arrays), "cut": cut, "tensors": [len(tensors) + k for k in range(len(arrays))]}
            )
            tensors += arrays
        return {"items": items}, tensors

    def put(self, tensors: Tensors) -> Answer:
        """Keeps the conditioning of one prompt, f32 by name, and returns its handle. Fault of class protocol: names,
        dtypes or shapes."""
        if set(tensors) != set(self.family.conditioning):
            raise Fault(
                "protocol", f"tensors: {', '.join(tensors) or 'none'}; must be {', '.join(self.family.conditioning)}"
            )
        dims = {n: 1 if n.startswith("pooled_") or n.endswith("_mask") else 2 for n in tensors}
        for name, a in tensors.items():
            if (
                a.dtype != np.float32
                or a.ndim != dims[name]
                or 0 in a.shape
                or a.nbytes > self.family.card()["conditioning_bytes"]
            ):
                raise Fault(
                    "protocol",
                    f"{name}: {a.dtype} {list(a.shape)}; must be f32 of {dims[name]} axes, as large as the card allows",
                )
        if (width := tensors["prompt_embeds"].shape[1]) != self.family.width():
            raise Fault("protocol", f"prompt_embeds: {width} channels; must be {self.family.width()}")
        return {"handle": self._keep([(n, tensors[n]) for n in self.family.conditioning])}, []

    def velocity(
        self, states: list[Any], sigmas: list[Any], handles: list[Any], guidance: list[Any], size: Size, weights: str,
        tensors: Tensors,
    ) -> Answer:  # fmt: skip
        """Returns v = eps - x0, f32 [n, S, C], at n sigmas under the conditionings of n handles and a version of the
        weights. states says which of the states x f32 [k, S, C] each row has; empty: each its own. Fault: handle,
        weights, latents, protocol."""
        n, x = len(sigmas), self.rows(states, sigmas, handles, guidance, size, tensors)
        rows = [self.handles.get(h) for h in handles]
        self.weights.select(weights)
        t = torch.tensor(sigmas, dtype=torch.float32, device=self.device) * 1000  # float32, as the schedulers make it
        g = torch.tensor(guidance, dtype=torch.float32, device=self.device)
        step = 1 if self.settings.deterministic else n
        v = [
            self.family.velocity(x[i : i + step], t[i : i + step], rows[i : i + step], size, g[i : i + step]).float()
            for i in range(0, n, step)
        ]
        return {}, [("v", _array(torch.cat(v)))]

    def rows(
        self, states: list[Any], sigmas: list[Any], handles: list[Any], guidance: list[Any], size: Size,
        tensors: Tensors,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the state x f32 [n, S, C] of each row of a velocity call. Fault: latents, protocol."""
        n = len(sigmas)
        if not 1 <= n <= self.settings.max_rows or len(handles) != n or len(guidance) != n:
            raise Fault(
                "protocol",
                f"rows: {n} sigmas, {len(handles)} handles, {len(guidance)} guidance; must be equal, and 1 to "
                f"{self.settings.max_rows}",
            )
        if not all(_is_number(v) for v in (*sigmas, *guidance)) or not all(isinstance(h, str) for h in handles):
            raise Fault("protocol", "sigmas and guidance: must be finite numbers; handles: must be text")
        if any(guidance) and not self.family.takes_guidance():
            raise Fault("protocol", f"guidance: {guidance[:4]}; must be 0, the network has no such input")
        own = list(range(n))
        states = states or own
        if any(type(k) is not int for k in states) or len(states) != n or set(states) != set(own[: len(set(states))]):
            raise Fault("protocol", f"states: {states[:4]}; must be a number for each of {n} rows, from 0 without gaps")
        x = self._latents(tensors, (len(set(states)), *self.family.latent_shape(size)))
        return x if states == own else x[states]

    def decode(self, size: Size, tensors: Tensors) -> Answer:
        """Returns media u8 [F, H, W, 3] of latents x f32 [S, C]. Fault of class latents: a size that cannot be, or
        pixels that are not finite."""
        x = self._latents(tensors, self.family.latent_shape(size))
        pixels = self.family.decode(x[None], size).float()
        if not bool(torch.isfinite(pixels).all()):
            raise Fault("latents", "x: decodes to pixels that are not finite numbers; must be the latents of an image")
        media = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)  # as VaeImageProcessor does
        return {}, [("media", media.permute(0, 2, 3, 1).contiguous().cpu().numpy())]

    def encode_media(self, size: Size, tensors: Tensors) -> Answer:
        """Returns latents x f32 [S, C] of media f32 [F, H, W, 3] in -1..1."""
        self.family.latent_grid(size)
        media = self._tensor(tensors, "media", (size.frames, size.height, size.width, 3))
        return {}, [("x", _array(self.family.encode_media(media.permute(0, 3, 1, 2), size)[0]))]

    def modules(self) -> Answer:
        """Returns what weights must fit: [out, in] of linear layers, and shapes of tensors, by name."""
        return {"linear": self.weights.linear, "tensors": self.weights.tensors}, []

    def load(self, weights: str, kind: str, modules: list[Any], files: list[Any], tensors: Tensors) -> Answer:
        """Makes a version of the weights resident, an adapter or a whole; files are shards to read. Fault: weights,
        protocol."""
        began = time.monotonic()
        if not weights:
            raise Fault("protocol", "weights: empty; must be a digest, the base is always loaded")
        given = {n: torch.from_numpy(a) for n, a in tensors.items()}
        if kind == "adapter" and not files:
            self.weights.load_adapter(weights, modules, given)
        elif kind == "whole" and not modules and not (files and given):
            if not self.weights.use(weights):  # what is resident is not read again
                self.weights.load_whole(weights, _read_shards(files) if files else given)
        else:
            raise Fault(
                "protocol",
                f"kind: {kind!r:.40}; must be adapter with modules and tensors, or whole with files or tensors",
            )
        return {"ms": 1e3 * (time.monotonic() - began)}, []

    def unload(self, weights: str) -> Answer:
        """Frees a version of the weights."""
        self.weights.unload(weights)
        return {}, []

    def memory(self) -> Answer:
        """Bytes: of the weights; on a GPU what torch holds and most held, on a CPU those of the process."""
        networks = [c for c in self.family.pipe.components.values() if isinstance(c, torch.nn.Module)]
        weights = sum(p.numel() * p.element_size() for c in networks for p in c.parameters())
        module: Any = getattr(torch, self.device.type, None)
        if hasattr(module, "max_memory_reserved"):  # cuda, xpu
            reserved, peak = module.memory_reserved(self.device), module.max_memory_reserved(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            reserved = _resident() or peak
        return {"weights_bytes": weights, "reserved_bytes": reserved, "peak_bytes": peak}, []

    def free_cache(self) -> None:
        """Gives back what torch's allocator keeps for later."""
        module: Any = getattr(torch, self.device.type, None)
        if hasattr(module, "empty_cache"):  # cuda, xpu, mps
            module.empty_cache()

    def _keep(self, arrays: list[tuple[str, np.ndarray]]) -> str:
        """Keeps the tensors of one prompt as the network takes them, and returns their handle."""
        handle = handle_of(arrays)
        self.handles.put(handle, {n: torch.from_numpy(a.copy()).to(self.device, self.family.dtype) for n, a in arrays})
        return handle

    def _latents(self, tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensor(tensors, "x", shape)

    def _tensor(self, tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The one tensor of a call, on the device."""
        if set(tensors) != {name}:
            raise Fault("protocol", f"tensors: {', '.join(tensors) or 'none'}; must be {name}")
        a = tensors[name]
        if a.dtype != np.float32 or a.shape != shape:
            raise Fault("latents", f"{name}: {a.dtype} {list(a.shape)}; must be f32 {list(shape)}")
        return torch.from_numpy(a).to(self.device)


def compile_networks(family: Family) -> None:
    """Has the networks of a family compile themselves when they are called."""
    # Adapters are hooks, which a compiled network looks at only where it is told to.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for network in family.networks.values():
        network.compile()


def make_engine(family: Family, settings: Settings, say: Callable[[str], None] = lambda detail: None) -> Engine:
    """Loads the engine of a family."""
    from .whole import Pipeline

    if not isinstance(family, Pipeline):
        return Engine(family, settings, say)
    from .sessions import PipelineEngine

    return PipelineEngine(family, settings, say)


def handle_of(arrays: list[tuple[str, np.ndarray]]) -> str:
    """Returns the SHA-256 in hex of tensors in the card's order: name, 0x00, u32 axes, u32 each, f32 data (all LE)."""
    h = hashlib.sha256()
    for name, a in arrays:
        h.update(name.encode() + b"\0" + struct.pack(f"<{1 + a.ndim}I", a.ndim, *a.shape))
        h.update(np.ascontiguousarray(a, "<f4").tobytes())
    return h.hexdigest()


# Of torch, of C++, and of oneDNN, which goes on to fail for these shapes once it had too little memory for its code.
_FULL = re.compile("can't allocate memory|std::bad_alloc|could not create a primitive(?! descriptor)")


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an error says that memory is full; torch has no type of its own for the CPU's."""
    return isinstance(e, torch.OutOfMemoryError | MemoryError) or (
        isinstance(e, RuntimeError) and _FULL.search(str(e)) is not None
    )


def _prepare(settings: Settings, dtype: str) -> None:
    """Settings of torch for the whole process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if dtype == "f32" or settings.deterministic:
        # torch lets convolutions take TF32, whose 10 bits are far from what verify allows of f32.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if not settings.deterministic:
        return
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # One kernel of attention for each dtype: flash takes no float32.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(dtype != "f32")
    torch.backends.cuda.enable_mem_efficient_sdp(dtype == "f32")


def _tile(family: Family) -> None:
    """Has the VAE compute in tiles of 256 or 512 pixels; those of images have tiles of the whole default image."""
    vae = family.pipe.vae
    vae.enable_tiling()
    if hasattr(vae, "tile_latent_min_size"):
        latent = _TILE * vae.tile_latent_min_size // vae.tile_sample_min_size
        vae.tile_sample_min_size, vae.tile_latent_min_size = _TILE, latent


def _small(family: Family) -> Size:
    """A small size of any model of a family, that of a host's canary."""
    return Size(1, *(4 * edge * family.scale for edge in family.patch[1:]))


def find_device(name: str, setting: str = "device") -> torch.device:
    """The device of a name, auto for any. Fault of class config, with the name of the setting: it is not there."""
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = found.type if found else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as e:
        if is_out_of_memory(e):
            raise
        must = f"must be a device of this torch {torch.__version__}, such as cpu or cuda:0"
        raise Fault("config", f"{setting}: {name}: {e}; {must}") from e
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _read_shards(files: list[Any]) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files. Fault of class weights: one that cannot be read, or a tensor in two of them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    out: dict[str, torch.Tensor] = {}
    for file in files:
        if not isinstance(file, str) or not os.path.isabs(file) or not os.path.isfile(file):
            raise Fault("weights", f"files: {file!r:.300}; must be absolute paths of files that the worker can read")
        try:
            shard = load_file(file)
        except (OSError, SafetensorError) as e:
            raise Fault("weights", f"files: {file}: {e}; must be safetensors files") from e
        if twice := sorted(out.keys() & shard.keys()):
            raise Fault("weights", f"files: {twice[0]!r} is in two of them")
        out |= shard
    return out


def _array(t: torch.Tensor) -> np.ndarray:
    """A float32 copy on the CPU."""
    return t.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and v - v == 0


def _resident() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
