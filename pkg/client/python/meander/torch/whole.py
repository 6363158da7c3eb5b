"""The generic family: any pipeline of diffusers whose loop steps a scheduler, with conditions and guidance inside.

A recipe is all that a call of the pipeline is conditioned on: texts, conditions by their digests, arguments, size and
steps. Its digest is the handle by which velocity and decode name it; sessions are begun again from it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import accounts
from .family import MAX_FRAMES, TOKENIZERS, Family, Size
from .faults import Fault, first_sentence
from .folder import Folder

_MOST_TEMPORAL, _MOST_CHANNELS, _MOST_OF_TRACKS = 64, 4096, 1 << 24  # of a card; of tracks of whatever sizes
_CLASSES = Path(__file__).with_name("classes.json")
COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
"""Arguments of pipelines for the number of samples of a prompt."""
_FRAMES = ("num_frames", "video_length", "frames")
_TEXTS = ("prompt", "prompt_2", "prompt_3")
_OF_THE_HOST = {
    *COUNTS, *_FRAMES, *_TEXTS, "prompt_4", "height", "width", "num_inference_steps", "timesteps", "sigmas", "eta",
    "generator", "latents", "output_type", "return_dict", "callback", "callback_steps", "callback_on_step_end",
    "max_area", "batch_size", "use_resolution_binning",
    "callback_on_step_end_tensor_inputs", "denoising_end", "denoising_start", "decode_timestep", "decode_noise_scale",
}  # fmt: skip
"""Arguments of pipelines that a recipe does not have: the host gives them otherwise, or they change the loop."""
_MEDIA = re.compile(r"(^|_)(images?|mask|video|audio)(s|_image|_video|$)|^conditioning_frames$")
_TYPES = (("bool", "boolean"), ("int", "integer"), ("float", "number"), ("str", "text"))
_SCALARS: dict[str, Any] = {"number": (int, float), "integer": int, "boolean": bool, "text": str}
_SEVERAL = {"QwenImageEditPlusPipeline"}
_NEEDS_ITS_IMAGES = re.compile(
    r"Edit|ImageToVideo|Image2Video|VideoToVideo|I2V|Img2Img|Inpaint|Pix2Pix|Control|Fill|Variation|Upscale|Adapter|"
    r"Layered|SuperResolution|AudioToAudio"
)
_STEPPING = ("transformer", "unet", "prior", "dit", "transformer_2")
"""Parts that are what a pipeline steps with; the last one beside the first."""
_EXTRA = re.compile(r"last_image|_2$|reference")
_NO_INPUT = re.compile(r"embed|ip_adapter|latents|attention_mask")
"""Of what encoders give, or of adapters of images as prompts, which are not parts of a folder."""


class Pipeline(Family):
    """A folder of any class of diffusers that is known to work so, or of any other by trust."""

    slug, cfg_rule, conditioning = "pipeline", "inside", ()

    def __init__(self, folder: Folder, trust: bool = False, cls: Any = None):
        """cls is the class of the pipeline; None: the folder names it. Fault of class config: no class of diffusers, or
        one that is not known to work."""
        self.folder, self.settings = folder, folder.read_optional("meander.json")
        self.scheduler_config = folder.read_optional(*accounts.SCHEDULER)
        self.config = folder.read_optional("transformer", "config.json") or folder.read_optional("unet", "config.json")
        self.vae_config = folder.read_optional("vae", "config.json") or folder.read_optional("vqvae", "config.json")
        self.cls = cls or _class_of(folder, trust)
        self.call = dict(list(inspect.signature(inspect.unwrap(self.cls.__call__)).parameters.items())[1:])
        self.pixels = self.scale = self._scale()
        """Pixels of an element of what the VAE encodes, and of what the card calls one."""
        self.steps = self._default("num_inference_steps", 50)
        self.prompts = max(1, sum(n in self.call for n in _TEXTS))
        self.patch, self.packed = (1, 1, 1), False
        """packed: whether states are grids, of which meander has the tokens as networks do, patch by patch."""
        self.temporal = self._temporal()
        self.channels = int(self.vae_config.get("latent_channels") or self.vae_config.get("z_dim") or 4)
        self.access, self.tracks, self.rows_alike, self.notes = "", list[dict[str, Any]](), False, list[str]()
        self.beside_negative = list[str]()
        """Scales of guidance that have no effect without a negative prompt; known once it is tested."""
        self.conditioning_bytes = self.token_bytes = 0
        """What is encoded of texts, in float32: bytes at most, and of a token; known once it is tested."""
        self.encodes = False
        """Whether it encodes media to start from; known once it is tested."""
        self.media = list[str]()
        """The kinds of what it makes, image and audio; empty: not known before it is tested."""
        self.grid_name, self.mu_name = "pipeline", "linear"
        self.sigmas, self.sigmas_tokens, self.admitted = list[list[float]](), 0, dict[str, int]()
        self.parts = dict(self._parts())
        self.conditions, self.arguments = self._inputs()
        self.scheduler = self._suited()
        """The configuration of what is computed in the place of the folder's scheduler, JSON; empty: that one."""

    # What files and the signature say.

    def _default(self, name: str, otherwise: Any) -> Any:
        value = self.call[name].default if name in self.call else None
        return otherwise if value is None or value is inspect.Parameter.empty else value

    def _suited(self) -> str:
        name, canonical = self.folder.named_class("scheduler"), importlib.import_module("meander.torch.canonical")
        try:  # what else is wrong with it is said elsewhere
            own: Any = getattr(importlib.import_module("diffusers"), name).from_config({**self.scheduler_config})
            made = canonical.suited(own)
        except ImportError as e:
            why = " ".join(str(e).split())
            raise Fault("config", f"model_index.json: scheduler: {why}, or take EulerDiscreteScheduler") from e
        except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, NotImplementedError):
            return ""
        return made.to_json_string().replace("-Infinity", "null") if made is not own else ""

    def _scale(self) -> int:
        c = self.vae_config
        if ratio := c.get("spatial_compression_ratio") or c.get("scale_factor_spatial"):
            return int(ratio)
        if steps := c.get("temperal_downsample"):
            return int(2 ** len(steps))
        return int(2 ** (len(c.get("block_out_channels") or c.get("down_block_types") or [0] * 4) - 1)) if c else 1

    def _temporal(self) -> int:
        c = self.vae_config
        if not self.makes_video():
            return 1
        steps = c.get("temperal_downsample")
        guess = 2 ** sum(map(bool, steps)) if steps else 1
        return int(c.get("temporal_compression_ratio") or c.get("scale_factor_temporal") or guess)

    def makes_video(self) -> bool:
        """Whether samples have frames: it takes their number, or a video of as many."""
        return any(n in self.call for n in (*_FRAMES, "video", "conditioning_frames"))

    def max_frames(self) -> int:
        return MAX_FRAMES if self.makes_video() else 1

    def default_size(self) -> tuple[int, int]:
        told = [
            (self.cls.__init__, r"default_sample_size = (\d+)\n()", self.pixels),
            (self.cls.__call__, r"height or (\d+)()", 1),
            (self.cls.__init__, r"default_height = (\d+)\n\s+self.default_width = (\d+)", 1),
        ]  # fmt: skip
        found = ((m, by) for of, has, by in told if (m := re.search(has, inspect.getsource(inspect.unwrap(of)))))
        edges = next(([int(m[1]) * by, int(m[2] or m[1]) * by] for m, by in found), [512, 512])
        c = self.config
        sample = c.get("sample_size") or (c.get("sample_height") and [c["sample_height"], c["sample_width"]])
        if sample:
            edges = [n * self.pixels for n in (sample if isinstance(sample, list) else [sample])]
        return int(self._default("height", edges[-2:][0])), int(self._default("width", edges[-1]))

    def default_frames(self) -> int:
        name = next((n for n in _FRAMES if n in self.call), "")
        source = inspect.getsource(inspect.unwrap(self.cls.__call__)) if name else ""
        told = re.search(r"num_frames = (\d+)\n|config\.(\w+_frames)( \* self\.vae_scale_factor_temporal)?\n", source)
        number, key, latent = told.groups() if told else ("1", "", "")
        frames = int(self._default(name, number or int(self.config.get(key) or 1) * (self.temporal if latent else 1)))
        unless = re.search(r"num_frames = (\d+) if not (\w+) else num_frames\n", source)
        frames = int(unless[1]) if unless and not self._default(unless[2], False) else frames
        return frames - (frames - 1) % self.temporal

    def default_fps(self) -> float:
        return float(self._default("frame_rate", self._default("fps", 16.0)) if self.makes_video() else 0.0)

    def _guidance(self) -> str:
        """The argument that scales classifier-free guidance: not guidance_scale where it is an input of the network."""
        network = getattr(importlib.import_module("diffusers"), self.folder.named_class("transformer") or "-", object)
        known = inspect.signature(network.__init__).parameters.get("guidance_embeds")
        embeds = self.config.get("guidance_embeds", known and known.default)
        names = ("true_cfg_scale",) if embeds else ("true_cfg_scale", "guidance_scale")
        return next((n for n in names if n in self.call), "")

    def default_arguments(self) -> dict[str, Any]:
        """The arguments that meander.json has, of every call that does not say them."""
        if not isinstance(given := self.settings.get("arguments", {}), dict):
            raise Fault("config", f"meander.json: arguments: {given!r:.80}; must be values by their names")
        return given

    def default_scale(self) -> float:
        """The default of that; 1 without."""
        return float(self._default(self._guidance(), 1.0))

    def takes_guidance(self) -> bool:
        """Whether a row may have another scale than its recipe."""
        return bool(self._guidance())

    def _inputs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Conditions and arguments by the signature."""
        conditions, arguments, before, given = [], [], True, self.default_arguments()
        for name, p in self.call.items():
            before = before and name != "prompt"
            annotation = "" if p.annotation is p.empty else str(p.annotation)
            default = None if p.default is p.empty else p.default
            needed = p.default is p.empty and p.kind is not p.VAR_KEYWORD
            if needed and _NO_INPUT.search(name):
                raise Fault("config", f"{self.cls.__name__}: {name}: needed, and nothing that a recipe can have")
            if name in _OF_THE_HOST or _NO_INPUT.search(name):
                continue
            media = _MEDIA.search(name)
            scalar = next((t for n, t in _TYPES if type(default).__name__ == n), "")
            if not scalar and default is None:
                scalar = next((t for n, t in reversed(_TYPES) if re.match(rf"(<class ')?{n}\b", annotation)), "")
            if media and not scalar:
                kind = next((k for k in ("mask", "video", "audio") if k in name.replace("frames", "video")), "image")
                if kind == "image" and (
                    self.cls.__name__ in _SEVERAL or name == "images" or annotation.startswith("list")
                ):
                    kind = "images"
                if kind == "mask" and "audio" in self.call:
                    raise Fault("config", f"{self.cls.__name__}: {name}: a mask of sound, which no recipe can have")
                needs = p.default is p.empty or (
                    not _EXTRA.search(name) and bool(_NEEDS_ITS_IMAGES.search(self.cls.__name__))
                )
                conditions.append({"name": name, "type": kind, "required": needs})
            elif not scalar and needed:
                raise Fault("config", f"{self.cls.__name__}: {name}: needed, and nothing that a recipe can have")
            elif scalar:
                if name == "strength":
                    default = 1.0  # the host begins with noise alone
                if isinstance(default, float) and not math.isfinite(default):
                    default = None
                needs = p.default is p.empty or name == "control_mode" and "Union" in self.cls.__name__
                default, needs = given.get(name, default), needs and name not in given
                arguments.append({"name": name, "type": scalar, "default": default, "required": needs})
        return conditions, arguments

    def _parts(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """The networks: library and class. Fault of class config: code that is neither diffusers' nor transformers'."""
        pipelines = importlib.import_module("diffusers.pipelines")
        for name, entry in self.folder.index.items():
            if name.startswith("_") or not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
                continue
            library, cls = str(entry[0]), entry[1]
            if library not in ("diffusers", "transformers", self.cls.__module__):
                if (
                    not library.isidentifier()
                    or not hasattr(pipelines, library)
                    or (self.folder.path / name / f"{library}.py").exists()
                ):
                    raise Fault(
                        "config",
                        f"model_index.json: {name}: {library:.80}; must be diffusers or transformers: a folder's "
                        "code is not run",
                    )
                library = f"diffusers.pipelines.{library}"
            if name != "safety_checker" and (self.folder.path / name / "config.json").is_file():
                yield name, (library, cls)

    def card(self) -> dict[str, Any]:
        s, guidance, scale = self.settings, self._guidance(), self.default_scale()
        return super().card() | {
            "true_cfg_scale": float(s.get("true_cfg_scale", s.get("guidance_scale", scale))), "guidance": 0.0,
            "conditioning_bytes": self.conditioning_bytes, "conditioning_token_bytes": self.token_bytes,
            "grid": self.grid_name if self.prediction() == "flow" else "diffusion",
            "mu": self.mu_name if self.scheduler_config.get("use_dynamic_shifting") else "none",
            "scheduler": self.scheduler,
            "pipeline": {
                "class": self.cls.__name__, "prediction": self.prediction(), "random_access": self.access,
                "conditions": self.conditions, "arguments": self.arguments, "guidance": guidance,
                "beside_negative": self.beside_negative, "tracks": self.tracks, "media": self.media,
                "admitted": self.admitted, "sigmas": self.sigmas, "sigmas_tokens": self.sigmas_tokens,
                "encodes": self.encodes, "notes": self.notes,
            },
        }  # fmt: skip

    def prediction(self) -> str:
        """What the network gives, by the configuration of the scheduler."""
        c = self.scheduler_config
        flow = "FlowMatch" in str(c.get("_class_name")) or c.get("use_flow_sigmas")
        return "flow" if flow else str(c.get("prediction_type") or "epsilon").replace("flow_prediction", "flow")

    def check(self) -> dict[str, int]:
        accounts.check_pipeline(self)
        for part in self.folder.index:
            if self.folder.named_class(part) in TOKENIZERS:
                self.folder.check_tokenizer(part)
        return {part: self.check_part(part) for part in self.parts}

    def check_part(self, part: str) -> int:
        if (name := self.parts[part][1]) == "MultiAdapter" or "MultiControlNet" in name:
            raise Fault("config", f"model_index.json: {part}: {name}; must be one of one image, not of several")
        return super().check_part(part)

    # What the loaded pipeline computes.

    def load(self, dtype: Any, device: Any, say: Any, encoders: Any = None, networks: str = "") -> Any:
        canonical = importlib.import_module("meander.torch.canonical")
        parts = self.load_parts(dtype, say, lambda part: "cpu")
        # Of a processor, which takes images, too, the tokenizer is enough; diffusers would want its class.
        processors = [part for part in self.folder.index if self.folder.named_class(part) == "PixtralProcessor"]
        of_llama = (part for part in self.folder.index if self.folder.splits_bytes_for_llama(part))
        parts |= {part: self.load_tokenizer(part) for part in of_llama} | dict.fromkeys(processors)
        without = {"safety_checker": None, "requires_safety_checker": False}
        takes = inspect.signature(self.cls.__init__).parameters
        try:
            pipe = self.cls.from_pretrained(
                str(self.folder.path), local_files_only=True, use_safetensors=True, dtype=dtype,
                **parts, **{k: v for k, v in without.items() if k in takes},
            )  # fmt: skip
        except Exception as e:  # of any kind, by what is wrong with which file
            raise Fault("config", f"model: {self.folder.path}: {type(e).__name__}: {first_sentence(e)}") from e
        pipe.register_modules(**{part: self.load_tokenizer(part) for part in processors})
        importlib.import_module("meander.torch.encoding").place(
            pipe, device, dict.fromkeys(_STEPPING, networks or device) | {"text_encoder": encoders or device}
        )
        for name, part in pipe.components.items():
            if hasattr(part, "set_timesteps") and hasattr(part, "step"):
                try:
                    setattr(pipe, name, canonical.suited(part))
                except (NotImplementedError, TypeError, ValueError) as e:  # another scheduler has no such setting
                    raise Fault("config", f"scheduler: {type(part).__name__}: {first_sentence(e)}") from e
                self.notes += [n for n in canonical.notes_of(part, getattr(pipe, name)) if n not in self.notes]
        if scheduler := getattr(pipe, "scheduler", None):
            self.scheduler_config = json.loads(scheduler.to_json_string())
        return pipe

    def attach(self, pipe: Any, encoders: Any) -> None:
        self.pipe, self.encoders = pipe, encoders
        for name in ("vae_spatial_compression_ratio", "vae_scale_factor_spatial", "vae_spatial_scale_factor"):
            self.pixels = self.scale = int(getattr(pipe, name, 0) or 0) or self.scale
        self.pixels = int(getattr(pipe, "vae_scale_factor", 0) or 0) or self.pixels
        for name in ("vae_temporal_compression_ratio", "vae_scale_factor_temporal", "vae_temporal_scale_factor"):
            if self.makes_video():
                self.temporal = int(getattr(pipe, name, 0) or 0) or self.temporal
        names = [n for n in _STEPPING[:-1] if getattr(pipe, n, None) is not None]
        if not names:
            raise Fault("config", f"{self.cls.__name__}: no transformer and no unet; nothing computes its steps")
        second = ["transformer_2"] if getattr(pipe, "transformer_2", None) is not None else []
        self.networks = {"": getattr(pipe, names[0])} | {f"{n}.": getattr(pipe, n) for n in second}
        network = self.networks[""]
        self.device, self.dtype = next(network.parameters()).device, network.dtype

    def latent_shape(self, size: Size) -> tuple[int, int]:
        f, h, w = self.latent_grid(size)
        y = self.patch[1]
        return f * (h // y) * (w // y), self.channels * y * y

    def label(self, states: list[Any], size: Size) -> None:
        """Chooses tokens and channels such that they are the elements of states at a size, and at others, too, where
        the pipeline's states grow as sizes do."""
        elements = sum(s.numel() for s in states)
        patch = self.config.get("patch_size") or self.config.get("all_patch_size") or 1
        side = int(patch[-1] if isinstance(patch, list) else patch)
        edge = self.scale * side
        deep = (size.frames - 1) // self.temporal + 1
        if side > 1 and len(states) == 1 and (shape := states[0].shape)[2:] in (
            grid := (deep, size.height // self.scale, size.width // self.scale), grid[1:] if deep == 1 else ()
        ) and size.height % edge == size.width % edge == 0:  # fmt: skip
            self.patch, self.channels, self.packed = (1, side, side), shape[1], True
            return
        if len(states) == 1 and states[0].ndim == 3:
            exact = (size.height * size.width * deep / states[0].shape[1]) ** 0.5
            edge = int(exact) if exact == int(exact) else edge
        frames = size.frames
        others = [t for t in range(min(frames - 1, _MOST_TEMPORAL), 0, -1) if (frames - 1) % t == 0]
        for most, temporal in itertools.product((_MOST_CHANNELS, _MOST_OF_TRACKS), (self.temporal, *others)):
            deep = (frames - 1) // temporal + 1
            for e in range(edge, max(size.height, size.width) + 1):
                if size.height % e or size.width % e or elements % (deep * (size.height // e) * (size.width // e)):
                    continue
                channels = elements // (deep * (size.height // e) * (size.width // e))
                for p in range(1, 65):
                    if e % p == 0 and channels % (p * p) == 0 and channels // (p * p) <= most:
                        self.scale, self.patch, self.channels = e // p, (1, p, p), channels // (p * p)
                        self.temporal = temporal
                        return
        raise Fault("config", f"{self.cls.__name__}: a state of {elements} elements at {size}; no tokens of equal size")


def argument(of: dict[str, Any], value: Any) -> Any:
    """The value that an argument of the card gets. ValueError: it is of another type, or no finite number."""
    kind = of["type"]
    right = isinstance(value, _SCALARS[kind]) and (kind == "boolean") == isinstance(value, bool)
    if not right or kind == "number" and value - value != 0:
        raise ValueError(f"{of['name']}: {value!r:.80}; must be of type {kind}")
    return float(value) if kind == "number" else value


def _class_of(folder: Folder, trust: bool) -> Any:
    """The class of a folder."""
    diffusers, name = importlib.import_module("diffusers"), folder.class_name
    cls = getattr(diffusers, name, None) if name.isidentifier() else None
    if (
        not isinstance(cls, type)
        or not issubclass(cls, diffusers.DiffusionPipeline)
        or cls is diffusers.DiffusionPipeline
    ):
        raise Fault(
            "config",
            f"model_index.json: _class_name: {name!r:.80}; must be a pipeline of diffusers {diffusers.__version__}",
        )
    known = json.loads(_CLASSES.read_text("utf-8")) if _CLASSES.is_file() else {}
    if name not in known and not trust:
        raise Fault(
            "config", f"model_index.json: _class_name: {name}; not among the {len(known)} classes that are tested: "
            "--trust-class tries it, with the same checks at the start"
        )  # fmt: skip
    return cls


class Conditions:
    """Media of recipes by their digests; what was used longest ago goes first."""

    def __init__(self, size: int = 1 << 30):
        self._size, self._held, self._kept = size, 0, OrderedDict[str, tuple[str, Any, int]]()

    def put(self, digest: str, kind: str, a: np.ndarray, rate: int = 0) -> None:
        """Keeps a condition: u8 [frames, height, width, channels], f32 [samples, channels] of sound. Fault of class
        protocol: what its type cannot be, or another digest."""
        from PIL import Image

        shape = (*a.shape, 0, 0, 0)[:3] if kind != "audio" else (a.shape[0], 0, 0)
        if kind not in ("image", "mask", "video", "audio"):
            raise Fault("protocol", f"type: {kind:.40}; must be image, mask, video or audio")
        if (
            a.dtype != (np.float32 if kind == "audio" else np.uint8)
            or a.ndim != (2 if kind == "audio" else 4)
            or 0 in a.shape
            or kind in ("image", "mask")
            and a.shape[0] != 1
        ):
            raise Fault("protocol", f"condition: {a.dtype} {list(a.shape)}; must be an {kind}")
        if a.ndim == 4 and a.shape[3] != (1 if kind == "mask" else 3):
            raise Fault(
                "protocol", f"condition: {a.shape[3]} channels; must be {1 if kind == 'mask' else 3}, of a {kind}"
            )
        if digest != digest_of(kind, shape, a, rate):
            raise Fault("protocol", f"digest: {digest:.16}; must be that of the condition")
        frames = [Image.fromarray(f[..., 0] if kind == "mask" else f) for f in a] if kind != "audio" else []
        value = a.copy() if kind == "audio" else frames if kind == "video" else frames[0]
        if digest not in self._kept:
            self._held += a.nbytes
        self._kept[digest] = (kind, value, a.nbytes)
        while len(self._kept) > 1 and self._held > self._size:
            self._held -= self._kept.popitem(last=False)[1][2]

    def get(self, digest: str) -> tuple[str, Any] | None:
        """The type and the value of a condition, None: it is not kept."""
        if digest not in self._kept:
            return None
        self._kept.move_to_end(digest)
        return self._kept[digest][:2]


def digest_of(kind: str, shape: tuple[int, ...], a: np.ndarray, rate: int = 0) -> str:
    """The name of a condition: the SHA-256 in hex over its type and size, and its data."""
    head = f"{kind} {shape[0]} {shape[1]} {shape[2]} {rate}\n"
    return hashlib.sha256(head.encode() + np.ascontiguousarray(a).tobytes()).hexdigest()
