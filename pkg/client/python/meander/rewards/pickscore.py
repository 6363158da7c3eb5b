"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): what people prefer, by a CLIP-H trained on Pick-a-Pic."""

from __future__ import annotations

from collections.abc import Sequence

from .network import Clip, folder
from .reward import Input, Score, Scored


_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_OWN = ("preprocessor_config.json", "processor_config.json")


class PickScore(Clip):
    """PickScore: which image people would pick for a prompt.

    The score is exp(logit_scale) * cos(image, prompt), about 17 to 24 for images of today's models, at most 100.
    Divided by 26, as some trainers have it: a weight of 0.0385.
    """

    name = "pickscore"
    flags = {
        "--weights": {"default": "yuvalkirstain/PickScore_v1", "help": "folder or name of the CLIPModel (%(default)s)"},
        "--processor": {
            "default": "",
            "help": f"folder or name of its processor (that of the weights; {_PROCESSOR} if they have none)",
        },
        **Clip.flags,
    }

    def __init__(
        self, weights: str = "yuvalkirstain/PickScore_v1", processor: str = "", device: str = "", dtype: str = "f32"
    ):
        if not processor and not any((folder(weights, "*.json", "*.txt") / name).is_file() for name in _OWN):
            processor = _PROCESSOR
        super().__init__(weights, processor, device, dtype)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        cosines = self.cosines([s.image for s in samples], [s.prompt for s in samples])
        return [Score(x) for x in (self.model.logit_scale.float().exp() * cosines).tolist()]
