"""How an edited image differs from the one that was edited: in the direction of CLIP's texts, and in pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .clipscore import ClipScore
from .reward import Input, Reward, Score, Scored


class ClipDirection(ClipScore):
    """CLIP direction (Gal et al. 2021, arXiv 2108.00946): is an image changed as its caption is.

    The score is the cosine of two differences of normalized embeddings: of the sample and the condition image that it
    was made from, and of the captions after and before. It is -1 to 1, about 0.1 to 0.3 where they agree, 0 where the
    image is unchanged. The captions are the params before and after of the prompt or, in its record, original_prompt
    and edited_prompt, as InstructPix2Pix has them. A sample without a condition image or a caption is an error.

        meander-scorer clip-direction &
        meander run --prompts edits.jsonl --reward nats:clip-direction
    """

    name = "clip-direction"

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        import torch

        out: list[Scored] = [ValueError("not scored")] * len(samples)
        images, texts, places = [], [], []
        for i, s in enumerate(samples):
            try:
                captions = self._captions(s)
                images += [s.before(self.name)[0], s.image]
                texts += captions
                places.append(i)
            except ValueError as e:
                out[i] = e
        if places:
            x, y = (e.reshape(len(places), 2, -1) for e in self.embeddings(images, texts))
            cosines = torch.nn.functional.cosine_similarity(x[:, 1] - x[:, 0], y[:, 1] - y[:, 0])
            for i, value in zip(places, cosines.tolist()):
                out[i] = Score(value)
        return out

    def _captions(self, sample: Input) -> list[str]:
        """The captions before and after. ValueError: one is missing, or they are the same."""
        found = []
        for param, column in (("before", "original_prompt"), ("after", "edited_prompt")):
            text = sample.params.get(param) or sample.metadata.get(column)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"no caption {param}; {self.name} needs the param {param}, or {column} in the record")
            found.append(text)
        if found[0] == found[1]:
            raise ValueError(f"the captions before and after are the same, {found[0][:100]!r}; they have no direction")
        return found


class EditL2(Reward):
    """How near an edited image is to the one before it, in pixels. The score is 1 - sqrt(mean((x - y)^2)), of channels
    from 0 to 1.

    It is 1 where nothing has changed, and needs no weights: beside a reward of the edit it keeps the rest as it was.
    `unchanged` of the reward service is alike, and leaves out what a mask names. A sample without a condition image of
    its size is an error.
    """

    name = "edit-l2"
    extra = "images"
    version = "edit-l2-1"

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Compares each sample with its condition image."""

        def one(s: Input) -> Scored:
            try:
                before = s.before(self.name)[0]
                if before.size != s.image.size:
                    raise ValueError(f"the condition image has {before.width}x{before.height} pixels; must have those "
                        f"of the sample, {s.image.width}x{s.image.height}")
            except ValueError as e:
                return e
            x, y = (np.asarray(i, np.float64) / 255 for i in (s.image, before))
            return Score(1 - float(np.sqrt(np.mean((x - y) ** 2))))

        return [one(s) for s in samples]
