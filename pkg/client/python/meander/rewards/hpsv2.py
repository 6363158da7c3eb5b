"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): what people prefer, by a CLIP-H of open_clip trained on HPD v2."""

from __future__ import annotations

from collections.abc import Sequence

from .network import TorchReward, files, fill, folder, state
from .reward import Fault, Input, Score, Scored


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
            made = open_clip.create_model_and_transforms(
                arch, load_weights=False, pretrained_text=False, image_resize_mode="longest"
            )  # the authors' own: the whole image, padded with black to a square
            self.tokenizer = open_clip.get_tokenizer(arch)
        except (RuntimeError, ValueError, OSError) as e:
            raise Fault(f"--arch {arch}: {e}") from None
        model, _, self.preprocess = made
        fill(model, state(path), path)
        self.model = self.place(model)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        import torch

        pixels = torch.stack([self.preprocess(s.image) for s in samples])
        words = self.tokenizer([s.prompt for s in samples])
        with torch.inference_mode():
            images = self.model.encode_image(pixels.to(self.device, self.dtype), normalize=True)
            texts = self.model.encode_text(words.to(self.device), normalize=True)
            return [Score(x) for x in (images.float() * texts.float()).sum(-1).tolist()]
