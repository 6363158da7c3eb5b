"""What the pipelines of diffusers have in common: what their files say, and how latents are packed into tokens.

A family is known from configuration files alone (card) until the engine gives it the loaded pipeline (attach).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import accounts
from .faults import Fault, first_sentence
from .folder import Folder

if TYPE_CHECKING:
    import torch

TOKENIZERS = frozenset(
    {
        "CLIPTokenizer",
        "CLIPTokenizerFast",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "T5Tokenizer",
        "T5TokenizerFast",
        "PixtralProcessor",  # of which the tokenizer alone is loaded
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    }
)
"""Tokenizers of transformers that a folder may name."""

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Linear layers of blocks in which image and text attend to each other."""

# What the libraries fail with where a value of a config.json cannot be.
_OF_CONFIG = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)
MAX_FRAMES = 1024
"""Frames of a sample at most, as the host has it."""
_OTHER_HALVES = {
    *("vision_model", "vision_tower", "visual", "visual_projection", "multi_modal_projector", "logit_scale"),  # see
    *("decoder", "lm_head", "text_projection"),  # what comes after the states that a pipeline takes
    *("position_ids", "inv_freq"),  # older files have what each class computes
}
"""Parts of the names of tensors that a checkpoint of a text encoder may have beside it, and that no prompt needs."""


@dataclass(frozen=True)
class Size:
    """The size of a sample: frames (1 for images), and pixels."""

    frames: int
    """1 for images."""
    height: int
    """Pixels."""
    width: int
    """Pixels."""


@dataclass(frozen=True)
class Settings:
    """How a model is loaded: device of torch, dtype (f32, bf16, f16), and whether rows are computed one at a time.

    auto is an accelerator where torch has one, else the CPU; of a dtype bf16 on an accelerator, else f32.
    """

    device: str = "auto"
    """cpu, cuda, cuda:N, mps, xpu or auto."""
    dtype: str = "auto"
    encoders: str = ""
    """The device of the text encoders; empty: the same."""
    deterministic: bool = False
    """Whether rows are computed one at a time: their bits do not depend on each other."""
    threads: int = 0
    """Threads of torch on the CPU; 0: torch decides."""
    max_rows: int = 64
    """Rows of a call at most."""
    compile: bool = False
    """Whether torch.compile compiles the networks."""
    vae_tiling: bool = False
    """Whether the VAE decodes and encodes in tiles."""


@dataclass(frozen=True)
class Prompt:
    """The texts of one prompt, one for each place that the family has for them; those not given are the first."""

    texts: tuple[str, ...]

    def text(self, place: int) -> str:
        """The text for a place, from 0."""
        return self.texts[place] if place < len(self.texts) else self.texts[0]


def pack(z: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Returns the tokens [n, S, c pt ph pw] of a latent grid [n, c, F, H, W], rows first, channels (c, pt, ph, pw)."""
    n, c, f, h, w = z.shape
    t, y, x = patch
    z = z.reshape(n, c, f // t, t, h // y, y, w // x, x).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return z.reshape(n, (f // t) * (h // y) * (w // x), c * t * y * x)


def unpack(s: torch.Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> torch.Tensor:
    """Returns the latent grid [n, c, F, H, W] of tokens: the inverse of pack, for a grid (F, H, W)."""
    n, _, width = s.shape
    (t, y, x), (f, h, w) = patch, grid
    c = width // (t * y * x)
    s = s.reshape(n, f // t, h // y, w // x, c, t, y, x).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return s.reshape(n, c, f, h, w)


class Family:
    """What the pipelines have in common. A subclass sets the facts and defines velocity."""

    slug = ""
    """Its name in cards and metrics."""
    parts: dict[str, tuple[str, str]] = {}
    """The networks: library and class, the only one that is loaded."""
    tokenizers: tuple[str, ...] = ("tokenizer",)
    """The parts that are tokenizers."""
    pipeline_settings: tuple[str, ...] = ()
    """Entries of model_index.json that the pipeline computes by, and that are no parts."""
    index_settings: tuple[str, ...] = ()
    """Entries of it that the family itself reads."""
    conditioning: tuple[str, ...] = ("prompt_embeds",)
    """The tensors of an encoded prompt, f32."""
    text_channels = ("joint_attention_dim", 4096)
    """The channels of prompt_embeds: an entry of transformer/config.json, and where it is absent."""
    unpadded = False
    """Whether prompt_embeds is as long as the prompt: readers that pad it need a mask."""
    patch = (1, 2, 2)
    """Frames, rows and columns of the latent grid in a token."""
    temporal = 1
    """Frames in a latent frame, after the first."""
    steps, true_cfg_scale, guidance = 50, 1.0, 0.0
    """Defaults of the pipeline's call: steps, true_cfg_scale, and guidance, an input of the network."""
    cfg_rule, negative_prompt, grid, mu = "plain", "", "linspace", "linear"
    """How guidance combines velocities, the default negative_prompt, the grid of sigmas, and mu, the rule of their
    shift."""
    mu_constant = 0.0
    """mu where the rule is constant."""
    max_tokens, prompts = 512, 1
    """Tokens of a prompt at most, and texts of one: prompts."""
    packed_by_network = 1
    """Tokens of the latent grid in a token of the network."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that a trainer adapts: ends of their names."""

    flags: tuple[str, ...] = ()
    """What backends say of how it was chosen: generic, trust-class."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.config = folder.read("transformer", "config.json")
        self.vae_config = folder.read("vae", "config.json")
        self.scheduler_config = folder.read("scheduler", "scheduler_config.json")
        self.settings = folder.read_optional("meander.json")
        self.channels = int(self.config.get("in_channels", 16 * self.packed_by_network)) // self.packed_by_network
        self.scale = self.pixels_per_latent()

    # What configuration files say.

    def pixels_per_latent(self) -> int:
        """Pixels of a side in a row of the latent grid."""
        if self.vae_config.get("block_out_channels") == []:
            raise ValueError("block_out_channels: []; must have numbers")
        steps = self.vae_config.get("temperal_downsample", [0] * 3)
        return int(2 ** len(self.vae_config.get("block_out_channels", [0, *steps])[1:]))

    def width(self) -> int:
        """Channels of a token of prompt_embeds."""
        return int(self.config.get(*self.text_channels))

    def conditioning_elements(self) -> int:
        """Elements of the tensors of one prompt at most."""
        return self.max_tokens * self.width()

    def default_size(self) -> tuple[int, int]:
        """Height and width of the pipeline's call."""
        return 128 * self.scale, 128 * self.scale

    def default_frames(self) -> int:
        """Frames of it; 1 of an image."""
        return 1

    def default_fps(self) -> float:
        """Frames of it in a second; 0 of an image."""
        return 0.0

    def size(self) -> Size:
        """The default size, of meander.json or the pipeline."""
        s, (height, width), frames = self.settings, self.default_size(), self.default_frames()
        return Size(int(s.get("frames", frames)), int(s.get("height", height)), int(s.get("width", width)))

    def card(self) -> dict[str, Any]:
        """What a host must know, from configuration files alone; the protocol names the keys.

        true_cfg_scale is meander's: a velocity is neg + g (pos - neg), without guidance for g of at most 1.
        """
        s = self.settings
        dynamic = bool(self.scheduler_config.get("use_dynamic_shifting"))
        return {
            "class": self.folder.class_name,
            "family": self.slug,
            "latent": {
                "channels": self.channels,
                "patch": list(self.patch),
                "scale": self.scale,
                "temporal": self.temporal,
            },
            "size": vars(self.size()).copy(),
            "fps": float(s.get("fps", self.default_fps())),
            "steps": int(s.get("num_inference_steps", self.steps)),
            "true_cfg_scale": float(s.get("true_cfg_scale", self.true_cfg_scale)),
            "guidance": float(s.get("guidance_scale", self.guidance)) if self.takes_guidance() else 0.0,
            "cfg_rule": self.cfg_rule,
            "boundary_ratio": 0.0,
            "negative_prompt": self.negative_prompt,
            "conditioning": [{"name": name, "mask": self.mask_of(name)} for name in self.conditioning],
            "max_prompt_tokens": self.max_tokens,
            "prompts": self.prompts,
            "max_pixels": self.max_pixels(),
            "conditioning_bytes": 4 * self.conditioning_elements(),
            # Where every prompt has one length it has one size, too.
            "conditioning_token_bytes": 4 * (self.width() if self.unpadded else self.conditioning_elements()),
            "grid": self.grid,
            "mu": self.mu if dynamic else "none",
            "mu_constant": self.mu_constant if dynamic else 0.0,
            "frames_rule": self.temporal,
            "max_frames": self.max_frames(),
        }

    def mask_of(self, name: str) -> str:
        """The name of the mask of a tensor, empty where every position counts."""
        return f"{name}_mask" if self.unpadded and name == "prompt_embeds" else ""

    def takes_guidance(self) -> bool:
        """Whether the guidance scale is an input of the network."""
        return bool(self.guidance)

    def max_pixels(self) -> int:
        """Pixels of an image or frame at most."""
        default = int(self.settings.get("height", 0)) * int(self.settings.get("width", 0))
        return max(2048 * 2048, default)

    def max_frames(self) -> int:
        """Frames of a sample at most; 1: the family makes images."""
        return 1 if self.temporal == 1 else MAX_FRAMES

    def check(self) -> dict[str, int]:
        """Returns the bytes of the weights of each part. Fault of class config: a part that may not be loaded."""
        accounts.check(self)
        sizes = {part: self.check_part(part) for part in self.parts}
        for part in self.tokenizers:
            if (named := self.folder.named_class(part)) not in TOKENIZERS:
                raise Fault(
                    "config",
                    f"model_index.json: {part}: {named or 'none'}; must be one of {', '.join(sorted(TOKENIZERS))}",
                )
            self.folder.check_tokenizer(part)
        return sizes

    def check_part(self, part: str) -> int:
        """Returns the bytes of the weights of a network. Fault of class config: it may not be loaded."""
        library, name = self.parts[part]
        if (named := self.folder.named_class(part)) != name:
            raise Fault(
                "config", f"model_index.json: {part}: {named or 'none'}; must be {name} for {self.folder.class_name}"
            )
        cls = getattr(importlib.import_module(library), name, None)
        if not isinstance(cls, type):
            raise Fault("config", f"model_index.json: {part}: {name}; no class of {library}: try the newest")
        if not hasattr(cls, "forward"):  # a processor
            return 0
        if quantized := self.folder.read(part, "config.json").get("quantization_config"):
            method = quantized.get("quant_method", "?") if isinstance(quantized, dict) else "?"
            raise Fault(
                "config",
                f"{part}/config.json: quantization_config: {method:.40}; must be none: quantized weights are not "
                "computed, take the folder in bf16",
            )
        of_diffusers = issubclass(cls, importlib.import_module("diffusers").ModelMixin)
        return self.folder.check_weights(part, "diffusers" if of_diffusers else "transformers")

    def load_part(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        """Returns a network of the folder in a dtype, on the CPU and without gradients, by the class of parts alone.

        Fault of class config: the weights are not those of its config.json. transformers would draw what is missing at
        random, and both libraries leave out what the network has no place for.
        """
        library, name = self.parts[part]
        if name == "AutoencoderKLWan":  # as its model cards want it, whatever the dtype
            dtype = importlib.import_module("torch").float32

        def refusal(why: str) -> Fault:
            return Fault(
                "config",
                f"{part}: {why}; must be the weights of the {name} of {part}/config.json: copy the folder again, or "
                f"try the newest {library}",
            )

        # What does not fit is in the report of transformers; diffusers has an error for it, whose first sentence tells.
        report_shapes = {"ignore_mismatched_sizes": True} if library == "transformers" else {}
        try:
            network, told = getattr(importlib.import_module(library), name).from_pretrained(
                str(self.folder.path / part),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                variant=self.folder.variant(part) or None,
                output_loading_info=True,
                **report_shapes,
            )
        except (OSError, ValueError) as e:
            raise refusal(first_sentence(e)) from e
        except _OF_CONFIG as e:
            raise Fault("config", f"{part}/config.json: no {name} of it: {type(e).__name__}: {e}") from e
        wrong = {
            "are missing": set(told["missing_keys"]) - {"lm_head.weight"},  # which no prompt is read with
            "have another shape": {key for key, *_ in told["mismatched_keys"]},
        }
        halves = _OTHER_HALVES if library == "transformers" else set()
        unexpected: list[str] = told["unexpected_keys"]
        wrong["have no place in the network"] = {key for key in unexpected if not halves & {*key.split(".")}}
        for what, names in wrong.items():
            if names:
                raise refusal(f"tensors {what}: {len(names)}, such as {min(names)}")
        return network.eval().requires_grad_(False)

    def load_tokenizer(self, part: str, cls: Any = None) -> Any:
        """Returns a tokenizer of the folder, by a class of transformers; None: by what its tokenizer.json says."""
        cls = cls or importlib.import_module("transformers").PreTrainedTokenizerFast
        try:
            return cls.from_pretrained(str(self.folder.path / part), local_files_only=True)
        except Exception as e:  # of any kind, by what is wrong with which file
            raise Fault("config", f"{part}: cannot be read: {first_sentence(e)}; copy the folder again") from e

    def load_parts(self, dtype: torch.dtype, say: Callable[[str], None], to: Callable[[str], Any]) -> dict[str, Any]:
        """Returns the networks of the folder, each on the device that to says. Fault of class config."""
        sizes, done, parts = self.check(), 0, dict[str, Any]()
        for part, size in sizes.items():
            if size:
                say(f"loading {part}: {done / 1e9:.1f} of {sum(sizes.values()) / 1e9:.1f} GB")
                parts[part] = self.load_part(part, dtype).to(to(part))
                done += size
        return parts

    def load(
        self, dtype: torch.dtype, device: Any, say: Callable[[str], None], encoders: Any = None, networks: str = ""
    ) -> Any:
        """Returns the pipeline on a device, its text encoders and networks on others where given, each part by the
        class of parts alone. Fault of class config: a part that cannot be read."""
        say("importing diffusers and transformers")
        diffusers, transformers = (importlib.import_module(name) for name in ("diffusers", "transformers"))
        parts = self.load_parts(dtype, say, lambda part: encoders if part.startswith("text_encoder") else device)
        for part in self.tokenizers:
            name = self.folder.named_class(part)
            # Of a processor, which takes images too, the tokenizer is enough.
            generic = name.endswith("Processor") or self.folder.splits_bytes_for_llama(part)
            cls = None if generic else getattr(transformers, name, None)
            parts[part] = self.load_tokenizer(part, cls) if name else None
        parts |= {name: self.folder.index.get(name) for name in self.pipeline_settings}
        # The host steps; the scheduler of the pipeline is never asked.
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        return getattr(diffusers, self.folder.class_name)(scheduler=scheduler, **parts)

    # What the loaded pipeline computes.

    def attach(self, pipe: Any, encoders: torch.device) -> None:
        """Takes the pipeline, whose text encoders are on the device encoders."""
        self.pipe, self.vae, self.encoders = pipe, pipe.vae, encoders
        self.attach_transformer(pipe.transformer)

    networks: dict[str, torch.nn.Module]
    """What velocity calls, by what begins the names of its layers and tensors for the host."""

    def attach_transformer(self, network: Any) -> None:
        """Takes the transformer where it is, which is all that velocity needs; before a trainer adapts it."""
        self.transformer, self.networks = network, {"": network}
        # Some parameters are float32 in every dtype, so one of them does not tell that of the network: diffusers does.
        self.device, self.dtype = next(self.transformer.parameters()).device, self.transformer.dtype

    def latent_grid(self, size: Size) -> tuple[int, int, int]:
        """Returns (F, H, W) of the latent of a size. Fault of class latents: no such size, with what is allowed."""
        rows, columns = self.scale * self.patch[1], self.scale * self.patch[2]
        f, h, w = size.frames, size.height, size.width
        if f < 1 or (f - 1) % self.temporal or f > self.max_frames():
            rule = f"1 more than a multiple of {self.temporal}, and at most {self.max_frames()}"
            raise Fault("latents", f"frames: {f}; must be {'1' if self.temporal == 1 else rule}")
        if h < 1 or w < 1 or h % rows or w % columns:
            raise Fault("latents", f"height x width: {h} x {w}; must be positive multiples of {rows} x {columns}")
        if h * w > self.max_pixels():
            raise Fault("latents", f"height x width: {h} x {w}; must be at most {self.max_pixels()} pixels")
        return (f - 1) // self.temporal + 1, h // self.scale, w // self.scale

    def latent_shape(self, size: Size) -> tuple[int, int]:
        """Returns (S, C) of the latents of a size."""
        f, h, w = self.latent_grid(size)
        t, y, x = self.patch
        return (f // t) * (h // y) * (w // x), self.channels * t * y * x

    def grid_of(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns tokens x [n, S, C] as the latent grid [n, c, F, H, W]."""
        return unpack(x, self.patch, self.latent_grid(size))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        """Returns the tokens of a prompt, with the template of the pipeline, and how many it may have."""
        return len(self.pipe.tokenizer(prompt.text(0)).input_ids), self.max_tokens

    def encode(self, prompt: Prompt, truncate: bool) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the tensors of one prompt, named as in conditioning and without batch axis, and the tokens cut off.

        Prompts are encoded one at a time: beside others an encoder pads, and bits would depend on them. Fault of class
        prompt: too many tokens, unless truncate.
        """
        n, limit = self.count(prompt)
        if n > limit and not truncate:
            raise Fault("prompt", f"prompt: {n} tokens; must be at most {limit}, or ask for truncation")
        return self.encode_one(prompt), max(0, n - limit)

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Returns the tensors of conditioning, f32 on the device, of one prompt that is cut to max_tokens."""
        texts = ([prompt.text(place)] for place in range(self.prompts))
        given = self.pipe.encode_prompt(*texts, device=self.encoders, max_sequence_length=self.max_tokens)
        return {"prompt_embeds": given[0][0]}

    def velocity(
        self, x: torch.Tensor, t: torch.Tensor, rows: list[dict[str, torch.Tensor]], size: Size, guidance: torch.Tensor
    ) -> torch.Tensor:
        """Returns eps - x0 [n, S, C] of states x f32 [n, S, C] at t = 1000 sigma f32 [n].

        rows are the conditionings; guidance, f32 [n], is the input of a network that takes it.
        """
        raise NotImplementedError

    def positions(self, size: Size) -> torch.Tensor:
        """Returns (0, row, column) of each token of an image, f32 [S, 3]."""
        import torch

        _, h, w = self.latent_grid(size)
        _, y, x = self.patch
        axes = (torch.arange(n, device=self.device, dtype=torch.float32) for n in (1, h // y, w // x))
        return torch.cartesian_prod(*axes)

    def padded(self, rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns prompt_embeds of rows of any lengths as the network takes them, [n, L, D] for the longest, and a mask
        [n, L] that keeps the padding out of attention; None where all are equally long."""
        import torch

        lengths = [len(row["prompt_embeds"]) for row in rows]
        embeds = torch.nn.utils.rnn.pad_sequence([row["prompt_embeds"] for row in rows], batch_first=True)
        mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        return embeds.to(self.device, self.dtype), None if mask.all() else mask.to(self.device)

    def decode(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns pixels [F, 3, H, W] in about -1..1 of latents x f32 [1, S, C].

        A VAE of videos computes frame after frame, with what it keeps of the frames before in itself: one call at a
        time.
        """
        z = self.grid_of(x, size).to(self.vae.dtype)
        shift, factor = self._statistics(z)
        z = z / factor + shift
        if self._of_videos():
            return self.vae.decode(z, return_dict=False)[0][0].transpose(0, 1)
        return self.vae.decode(z[:, :, 0], return_dict=False)[0]

    def encode_media(self, media: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns latents [1, S, C] of pixels f32 [F, 3, H, W] in -1..1: the mean of the VAE's distribution."""
        media = media.to(self.vae.dtype)
        z = self.vae.encode(media.transpose(0, 1)[None] if self._of_videos() else media).latent_dist.mode()
        z = z if self._of_videos() else z[:, :, None]
        shift, factor = self._statistics(z)
        return pack(((z - shift) * factor).float(), self.patch)

    def _of_videos(self) -> bool:
        """Whether the VAE takes videos, [n, c, F, H, W]: its latents have mean 0 and deviation 1 in each channel."""
        return hasattr(self.vae.config, "temperal_downsample")

    def _statistics(self, z: torch.Tensor) -> tuple[Any, Any]:
        """What is taken from latents of the VAE, and what they are then multiplied by, as the pipelines round them."""
        c = self.vae.config
        if not self._of_videos():
            return c.shift_factor or 0.0, c.scaling_factor
        return z.new_tensor(c.latents_mean).view(1, -1, 1, 1, 1), 1.0 / z.new_tensor(c.latents_std).view(1, -1, 1, 1, 1)
