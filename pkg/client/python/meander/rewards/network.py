"""What reward functions that compute with torch share: weights, their digest, the device, CLIP."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .reward import Fault, Reward

_SMALL = ("*.json", "*.txt", "*.model")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class TorchReward(Reward):
    """A reward function of torch. device: empty for a GPU if there is one. dtype: f32, bf16 or f16."""

    extra = "rewards"
    flags = {
        "--device": {"default": "", "metavar": "DEVICE", "help": "cpu, cuda:0 and so on (cuda if there is one)"},
        "--dtype": {"default": "f32", "choices": [*_DTYPES], "help": "of weights and activations (%(default)s)"},
    }

    def __init__(self, device: str = "", dtype: str = "f32"):
        import torch

        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as e:
            raise Fault(f"--device {device}: {_line(e)}") from None
        self.dtype = getattr(torch, _DTYPES[dtype])
        self.tensors: dict[str, Any] = {}

    def place(self, module: Any, name: str = "") -> Any:
        """Returns a module on the device, to be computed with alone; its weights count for version."""
        module = module.to(self.device, self.dtype).eval().requires_grad_(False)
        self.tensors |= {name + key: t for key, t in module.state_dict().items()}
        return module

    @property
    def version(self) -> str:
        """The name, and the SHA-256 of the weights as they are computed with, 16 digits of it."""
        import torch

        digest = hashlib.sha256()
        for name, t in sorted(self.tensors.items()):
            digest.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return f"{self.name}-{digest.hexdigest()[:16]}"


def folder(weights: str, *patterns: str, flag: str = "--weights") -> Path:
    """A folder as it is, or of the name of a model of the hub the folder with the files of these patterns, which are
    fetched once. Fault: there is neither."""
    path = Path(weights).expanduser()
    if path.is_dir():
        return path
    if weights.count("/") != 1 or weights[0] in "./~":
        raise Fault(f"{flag} {weights}: no such folder; name one with the weights, or a model of the hub, OWNER/NAME")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(weights, allow_patterns=list(patterns)))
    except Exception as e:
        raise Fault(f"{flag} {weights}: {_line(e)}; {_fix(weights, flag)}") from None


def files(weights: str, *names: str, flag: str = "--weights") -> list[Path]:
    """Files of a folder or of a model of the hub. Fault: one is not there."""
    place = folder(weights, *names, flag=flag)
    if lacks := [name for name in names if not (place / name).is_file()]:
        raise Fault(f"{flag} {weights}: there is no {' and no '.join(lacks)}; {_fix(weights, flag)}")
    return [place / name for name in names]


def pretrained(cls: Any, weights: str, flag: str = "--weights", **settings: Any) -> Any:
    """A model of transformers with its weights, or a processor. Fault: they are not there, or are not all."""
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    place, info = folder(weights, *_SMALL, flag=flag), {}
    try:
        if issubclass(cls, (PreTrainedModel, _BaseAutoModelClass)):
            place = folder(weights, *_SMALL, "model*.safetensors", flag=flag)
            if not any(place.glob("*.safetensors")):
                place = folder(weights, *_SMALL, "pytorch_model*.bin", flag=flag)
            out, info = cls.from_pretrained(place, output_loading_info=True, local_files_only=True, **settings)
        else:
            out = cls.from_pretrained(place, local_files_only=True, **settings)
    except (OSError, ValueError, RuntimeError, TypeError) as e:
        raise Fault(f"{flag} {weights}: no {cls.__name__}: {_line(e)}; {_fix(weights, flag)}") from None
    if lacks := sorted(info.get("missing_keys", ())):
        raise Fault(f"{flag} {weights}: not weights of {cls.__name__}: {len(lacks)} are missing, such as {lacks[0]}")
    return out


def state(file: Path) -> dict[str, Any]:
    """The tensors of a file: safetensors, or a checkpoint of torch without code. Fault: it is neither."""
    import torch
    from safetensors.torch import load_file

    try:
        out = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as e:
        raise Fault(f"{file}: {_line(e)}") from None
    return out.get("state_dict", out)


def fill(module: Any, tensors: dict[str, Any], file: Path) -> None:
    """Puts tensors into a module. Fault: they are not exactly its own."""
    try:
        module.load_state_dict({name.removeprefix("module."): t for name, t in tensors.items()})
    except RuntimeError as e:
        raise Fault(f"{file}: not weights of {type(module).__name__}: {' '.join(str(e).split())[:300]}") from None


class Clip(TorchReward):
    """A reward function of a CLIPModel. weights: its folder or name of the hub; processor: that of its processor,
    if it is elsewhere."""

    def __init__(self, weights: str, processor: str = "", device: str = "", dtype: str = "f32"):
        super().__init__(device, dtype)
        from transformers import CLIPModel, CLIPProcessor

        flag = "--processor" if processor else "--weights"
        self.processor = pretrained(CLIPProcessor, processor or weights, flag)
        self.model = self.place(pretrained(CLIPModel, weights, dtype=self.dtype))

    def cosines(self, images: Sequence[Any], texts: Sequence[str]) -> Any:
        """The cosine of each image and its text, [n] float32."""
        x, y = self.embeddings(images, texts)
        return (x * y).sum(-1)

    def embeddings(self, images: Sequence[Any], texts: Sequence[str]) -> tuple[Any, Any]:
        """The normalized embeddings of images and of texts, [n, C] float32. A text is cut at the longest that CLIP
        takes, 77."""
        import torch

        longest = self.model.config.text_config.max_position_embeddings
        words = self.processor(text=list(texts), return_tensors="pt", padding=True, truncation=True, max_length=longest)
        pixels = self.processor(images=list(images), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            out = self.model(
                input_ids=words["input_ids"].to(self.device), attention_mask=words["attention_mask"].to(self.device),
                pixel_values=pixels.to(self.device, self.dtype))  # fmt: skip
            return out.image_embeds.float(), out.text_embeds.float()


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())[:300] or type(e).__name__


def _fix(weights: str, flag: str) -> str:
    if Path(weights).expanduser().is_dir():
        return "name the folder that has it"
    return f"`hf download {weights} --local-dir DIR` fetches it on a machine that reaches the hub, {flag} DIR names it"
