"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718): how well an image fits its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .network import Clip
from .reward import Input, Score, Scored


class ClipScore(Clip):
    """CLIPScore: how well the image fits the prompt.

    The score is 2.5 * max(cos(image, "A photo depicts " + prompt), 0), as in the paper: 0 to 2.5, about 0.6 to 0.9
    where they fit.
    """

    name = "clipscore"
    flags = {
        "--weights": {
            "default": "openai/clip-vit-base-patch32",
            "help": "folder or name of a CLIPModel (%(default)s, the paper's)",
        },
        **Clip.flags,
    }

    def __init__(self, weights: str = "openai/clip-vit-base-patch32", device: str = "", dtype: str = "f32"):
        super().__init__(weights, "", device, dtype)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        cosines = self.cosines([s.image for s in samples], ["A photo depicts " + s.prompt for s in samples])
        return [Score(2.5 * max(x, 0.0)) for x in cosines.tolist()]
