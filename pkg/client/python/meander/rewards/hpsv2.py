"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): what people prefer, by a CLIP-H of open_clip trained on HPD v2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .network import TorchReward, files, fill, folder, state
from .reward import Fault, Input, Score, Scored


_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def preprocess(image: Any, size: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Any:
    """The pixels [3, size, size] of an image as the authors' package hpsv2 makes them: the whole image, resized to its
    longest side as a tensor of floats, which may leave 0 to 1 (PIL would round and clip), and padded with black.

    mean and std are of the channels; None: CLIP's own.
    """
    import numpy as np
    import torch

    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous().float() / 255
    height, width = pixels.shape[1:]
    scale = size / max(height, width)
    h, w = round(height * scale), round(width * scale)
    if scale != 1:
        pixels = torch.nn.functional.interpolate(pixels[None], (h, w), mode="bicubic", antialias=True)[0]
    top, left = (size - h) // 2, (size - w) // 2
    pixels = torch.nn.functional.pad(pixels, (left, size - w - left, top, size - h - top))
    shift, spread = (torch.tensor(v).view(3, 1, 1) for v in (mean or _MEAN, std or _STD))
    return (pixels - shift) / spread


class HPSv2(TorchReward):
    """HPSv2 and HPSv2.1: which image people would prefer for a prompt.

    The score is cos(image, prompt), -1 to 1, about 0.2 to 0.35 for images of today's models.
    """

    name = "hpsv2"
    flags = {
        "--weights": {"default": "xswu/HPSv2", "help": "folder or name of the hub that has the file (%(default)s)"},
        "--file": {
            "default": "HPS_v2.1_compressed.pt",
            "help": "the weights: %(default)s, HPS_v2_compressed.pt, or a safetensors file",
        },
        "--arch": {
            "default": "ViT-H-14",
            "help": "name of the network in open_clip, or a folder with an open_clip_config.json (%(default)s)",
        },
        **TorchReward.flags,
    }

    def __init__(
        self, weights: str = "xswu/HPSv2", file: str = "HPS_v2.1_compressed.pt", arch: str = "ViT-H-14",
        device: str = "", dtype: str = "f32",
    ):  # fmt: skip
        super().__init__(device, dtype)
        import open_clip

        if "/" in arch:
            arch = f"local-dir:{folder(arch, flag='--arch')}"
        (path,) = files(weights, file)
        try:
            model = open_clip.create_model(arch, load_weights=False, pretrained_text=False)
            self.tokenizer = open_clip.get_tokenizer(arch)
        except (RuntimeError, ValueError, OSError) as e:
            raise Fault(f"--arch {arch}: {e}") from None
        fill(model, state(path), path)
        size, cfg = model.visual.image_size, open_clip.get_model_preprocess_cfg(model)
        self.size = size if isinstance(size, int) else int(size[0])
        self.mean, self.std = cfg.get("mean"), cfg.get("std")
        self.model = self.place(model)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        import torch

        pixels = torch.stack([preprocess(s.image, self.size, self.mean, self.std) for s in samples])
        words = self.tokenizer([s.prompt for s in samples])
        with torch.inference_mode():
            images = self.model.encode_image(pixels.to(self.device, self.dtype), normalize=True)
            texts = self.model.encode_text(words.to(self.device), normalize=True)
            return [Score(x) for x in (images.float() * texts.float()).sum(-1).tolist()]
