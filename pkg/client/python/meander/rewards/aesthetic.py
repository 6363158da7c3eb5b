"""The improved aesthetic predictor of LAION (Schuhmann 2022): how much people like an image, whatever its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .network import TorchReward, files, pretrained, state
from .reward import Fault, Input, Score, Scored


class Aesthetic(TorchReward):
    """LAION's aesthetic predictor: how much people like the image. It does not see the prompt.

    The score is a linear network over the normalised image embedding of CLIP ViT-L/14, trained on ratings of 1 to 10;
    most images have 4 to 7.
    """

    name = "aesthetic"
    flags = {
        "--weights": {
            "required": True,
            "metavar": "DIR",
            "help": "folder with the file of the predictor, which the repository of its authors has: "
            "github.com/christophschuhmann/improved-aesthetic-predictor",
        },
        "--file": {"default": "sac+logos+ava1-l14-linearMSE.pth", "help": "the file in it (%(default)s)"},
        "--clip": {
            "default": "openai/clip-vit-large-patch14",
            "help": "folder or name of the CLIPModel (%(default)s)",
        },
        **TorchReward.flags,
    }

    def __init__(
        self, weights: str, file: str = "sac+logos+ava1-l14-linearMSE.pth", clip: str = "openai/clip-vit-large-patch14",
        device: str = "", dtype: str = "f32",
    ):  # fmt: skip
        super().__init__(device, dtype)
        from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

        if "relu" in file.lower():
            raise Fault(f"--file {file}: of a network with ReLU; the linear ones are supported, such as linearMSE.pth")
        (path,) = files(weights, file)
        tensors = state(path)
        places = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layers.")})
        try:
            layers = [(tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"]) for i in places]
            widths = [layers[0][0].shape[1], *(w.shape[0] for w, _ in layers)]
        except (KeyError, IndexError) as e:
            raise Fault(f"{path}: no aesthetic predictor: it lacks {e}; must have layers.N.weight and .bias") from None
        self.processor = pretrained(CLIPImageProcessor, clip, "--clip")
        self.model = self.place(pretrained(CLIPVisionModelWithProjection, clip, "--clip", dtype=self.dtype))
        if widths[0] != self.model.config.projection_dim or widths[-1] != 1:
            raise Fault(f"{path}: takes {widths[0]} numbers and gives {widths[-1]}; --clip {clip} gives "
                        f"{self.model.config.projection_dim}, and a score is 1")  # fmt: skip
        self.layers = [(w.to(self.device).float(), b.to(self.device).float()) for w, b in layers]
        self.tensors |= {name: t.float() for name, t in tensors.items()}

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        import torch
        from torch.nn import functional

        pixels = self.processor(images=[s.image for s in samples], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            x = self.model(pixel_values=pixels.to(self.device, self.dtype)).image_embeds.float()
            x = functional.normalize(x, dim=-1)
            for weight, bias in self.layers:
                x = functional.linear(x, weight, bias)
        return [Score(value) for value in x[:, 0].tolist()]
