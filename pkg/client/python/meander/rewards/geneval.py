"""GenEval's check (Ghosh et al. 2023, arXiv 2310.11513): objects, their number, colours and positions, by a
detector."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ..data.events import Maybe, fault
from .network import TorchReward, pretrained
from .reward import Input, Score, Scored

Box = Sequence[float]
"""Left, top, right and bottom in pixels."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""The colours that are told apart."""
_PLACES = ("left of", "right of", "above", "below")
_TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
_COCO = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}  # GenEval's names, COCO's
_MOST = 16  # objects of a class
_ASKED = {"class": str, "count": int}
_FORM: dict[str, Any] = {
    "tag": Maybe(str), "exclude": Maybe([_ASKED]),
    "include": [{**_ASKED, "color": Maybe(str), "position": Maybe([(str, int)])}],
}  # fmt: skip


class GenEval(TorchReward):
    """GenEval: does the image have the objects that the prompt asks for, in number, colour and place?

    The score is 1 if all is there and 0 otherwise; with --reward-param nats:geneval.of=share the share of what was
    asked for. Prompts are the records of GenEval's evaluation_metadata.jsonl, as Flow-GRPO has them too:

        {"prompt": "two dogs", "tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": [{"class":
        "dog", "count": 3}]} {"include": [{"class": "cup", "count": 1, "color": "red"},
                     {"class": "dog", "count": 1, "position": ["left of", 0]}]}

    The detector is a network of transformers that knows fixed classes (DETR, YOLOS, RT-DETR ...), or OWL-ViT and OWLv2,
    which look for any words. Boxes stand for GenEval's masks: around an object its background counts for the colour.
    """

    name = "geneval"
    flags = {
        "--weights": {
            "default": "facebook/detr-resnet-50",
            "help": "folder or name of the detector (%(default)s); any words: google/owlv2-base-patch16-ensemble",
        },
        "--clip": {
            "default": "",
            "help": "folder or name of the CLIPModel that tells colours, such as openai/clip-vit-large-patch14; "
            "without it a prompt that asks for a colour has no score",
        },
        "--threshold": {
            "type": float,
            "default": 0.3,
            "help": "an object counts above this (%(default)s, GenEval's; OWLv2 is less sure: 0.2)",
        },
        "--count-threshold": {
            "type": float,
            "default": 0.9,
            "help": "the same where the tag of the ground truth is counting (%(default)s, GenEval's; OWLv2: 0.2)",
        },
        "--max-overlap": {
            "type": float,
            "default": 1.0,
            "help": "intersection over union above which the less sure box goes (%(default)s: none; OWLv2: 0.5)",
        },
        **TorchReward.flags,
    }

    def __init__(
        self, weights: str = "facebook/detr-resnet-50", clip: str = "", threshold: float = 0.3,
        count_threshold: float = 0.9,
        max_overlap: float = 1.0, device: str = "", dtype: str = "f32",
    ):  # fmt: skip
        super().__init__(device, dtype)
        import transformers as t

        self.thresholds, self.max_overlap = (threshold, count_threshold), max_overlap
        self.any_words = pretrained(t.AutoConfig, weights).model_type in ("owlvit", "owlv2")
        cls = t.AutoModelForZeroShotObjectDetection if self.any_words else t.AutoModelForObjectDetection
        self.model = self.place(pretrained(cls, weights, dtype=self.dtype))
        self.processor = pretrained(t.AutoProcessor if self.any_words else t.AutoImageProcessor, weights)
        if clip:
            self.clip = self.place(pretrained(t.CLIPModel, clip, "--clip", dtype=self.dtype), "clip.")
            self.clip_processor = pretrained(t.CLIPProcessor, clip, "--clip")
        self.has_clip, self._texts = bool(clip), dict[str, Any]()

    @property
    def version(self) -> str:
        """That of the weights, and the settings."""
        return f"{super().version}-{'-'.join(f'{x:g}' for x in (*self.thresholds, self.max_overlap))}"

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Detects in all samples in one pass, and checks each."""
        out: list[Scored] = []
        wants: list[dict[str, Any]] = []
        for s in samples:
            try:
                wants.append(self._wants(s))
                out.append(Score(0))
            except ValueError as e:
                out.append(e)
        good = [i for i, x in enumerate(out) if not isinstance(x, Exception)]
        if good:
            for i, want, found in zip(good, wants, self.detect([samples[i].image for i in good], wants)):
                out[i] = self._judge(samples[i], want, found)
        return out

    def _wants(self, sample: Input) -> dict[str, Any]:
        """What a sample is to have. ValueError: that is not said, or cannot be checked."""
        try:
            want = sample.ground_truth
            if isinstance(want, str):
                want = json.loads(want) if want else dict(sample.metadata)
            if wrong := fault(want, _FORM) or ("" if want["include"] else "include: empty; must name what to look for"):
                raise ValueError(wrong)
        except ValueError as e:
            raise ValueError(f"no record of GenEval ({e}); the record of the prompt, or its ground truth as JSON, must "
                             'have such as "include": [{"class": "dog", "count": 2}]') from None  # fmt: skip
        if (of := sample.params.get("of", "all")) not in ("all", "share"):
            raise ValueError(f"of: {of!r}; must be all or share")
        for i, x in enumerate(want["include"]):
            if (colour := x.get("color")) is not None and colour not in COLOURS:
                raise ValueError(f"color: {colour!r}; must be one of {', '.join(COLOURS)}")
            if colour and not self.has_clip:
                raise ValueError(f"color: {colour} is asked for, and this worker has no --clip to tell colours")
            if (at := x.get("position")) and not (len(at) == 2 and at[0] in _PLACES and at[1] in range(i)):
                raise ValueError(
                    f"position: {at}; must be [one of {', '.join(_PLACES)}, the index of an earlier object]"
                )
        if not self.any_words:
            known = self.model.config.label2id
            for x in [*want["include"], *(want.get("exclude") or [])]:
                if x["class"] not in known and _COCO.get(x["class"]) not in known:
                    raise ValueError(f"class: the detector knows no {x['class']!r}; use one that does, or OWLv2")
        return want

    def detect(self, images: Sequence[Any], wants: Sequence[dict[str, Any]]) -> list[dict[str, list[Box]]]:
        """The boxes of each class that is asked for, the surest first."""
        import torch
        from torchvision.ops import nms

        names = [sorted({x["class"] for x in [*w["include"], *(w.get("exclude") or [])]}) for w in wants]
        # As many words for each image: the library's own padding is a word that is found, too.
        most = max(map(len, names))
        texts = [
            [f"a photo of a {n}" for n in of + of[-1:] * (most - len(of))] for of in names
        ] if self.any_words else []
        inputs = self.processor(**({"text": texts} if texts else {}), images=list(images), return_tensors="pt")
        inputs = {k: v.to(self.device, self.dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}
        sizes = [(i.height, i.width) for i in images]
        with torch.inference_mode():
            result = self.model(**inputs)
        if self.any_words:
            found = self.processor.post_process_grounded_object_detection(result, threshold=0.0, target_sizes=sizes)
        else:
            found = self.processor.post_process_object_detection(result, threshold=0.0, target_sizes=sizes)
        out = []
        for want, of, f in zip(wants, names, found):
            boxes: dict[str, list[Box]] = {}
            least = self.thresholds[want.get("tag") == "counting"]
            labels = f["labels"].clamp(max=len(of) - 1) if self.any_words else f["labels"]
            known = {n: i for i, n in enumerate(of)} if self.any_words else self.model.config.label2id
            for name in of:
                keep = (labels == known.get(name, known.get(_COCO.get(name, "")))) & (f["scores"] > least)
                own, scores = f["boxes"][keep].float(), f["scores"][keep].float()
                order = nms(own, scores, self.max_overlap)[:_MOST]
                boxes[name] = own[order].tolist()
            out.append(boxes)
        return out

    def colours(self, image: Any, boxes: Sequence[Box], name: str) -> list[str]:
        """The colour of the object in each box, by CLIP."""
        import torch
        from torch.nn import functional

        with torch.inference_mode():
            if name not in self._texts:
                texts = [t.format(colour=c, name=name) for c in COLOURS for t in _TEMPLATES]
                words = self.clip_processor(text=texts, return_tensors="pt", padding=True).to(self.device)
                own = functional.normalize(self.clip.get_text_features(**words).pooler_output.float(), dim=-1)
                means = own.unflatten(0, (len(COLOURS), len(_TEMPLATES))).mean(1)
                self._texts[name] = functional.normalize(means, dim=-1)
            crops = [image.crop((math.floor(b[0]), math.floor(b[1]), math.ceil(b[2]), math.ceil(b[3]))) for b in boxes]
            pixels = self.clip_processor(images=crops, return_tensors="pt")["pixel_values"].to(self.device, self.dtype)
            seen = functional.normalize(self.clip.get_image_features(pixels).pooler_output.float(), dim=-1)
            return [COLOURS[i] for i in (seen @ self._texts[name].T).argmax(-1).tolist()]

    def _judge(self, sample: Input, want: dict[str, Any], found: dict[str, list[Box]]) -> Scored:
        colours = {
            (x["class"], x["count"]): self.colours(sample.image, found[x["class"]][: x["count"]], x["class"])
            for x in want["include"]
            if x.get("color") and found[x["class"]]
        }
        wrong, of = check(want, found, colours), len(want["include"]) + len(want.get("exclude") or [])
        value = float(not wrong) if sample.params.get("of", "all") == "all" else 1 - len(wrong) / max(of, 1)
        return Score(value, "; ".join(wrong) or "all is there")


def check(want: dict[str, Any], found: dict[str, list[Box]], colours: dict[tuple[str, int], list[str]]) -> list[str]:
    """What is wrong, a line for each thing that was asked for and is not so. colours has those of the surest `count`
    boxes of (class, count)."""
    wrong: list[str] = []
    groups: list[list[Box]] = []  # the boxes of each object that was asked for; none if it is not as asked
    for x in want["include"]:
        name, count, why = x["class"], x["count"], ""
        boxes = found.get(name, [])[:count]
        if len(boxes) < count:
            why = f"{len(boxes)} {name}; want {count}"
        elif (colour := x.get("color")) and (seen := colours[name, count]).count(colour) < count:
            why = f"{name}: {', '.join(seen)}; want {count} {colour}"
        elif at := x.get("position"):
            place, other = at[0], groups[at[1]]
            if not other or not all(place in relations(a, b) for a in boxes for b in other):
                why = f"{name}: not {place} the {want['include'][at[1]]['class']}"
        wrong += [why] if why else []
        groups.append([] if why else boxes)
    for x in want.get("exclude") or []:
        if (have := len(found.get(x["class"], []))) >= x["count"]:
            wrong.append(f"{have} {x['class']}; want less than {x['count']}")
    return wrong


def relations(a: Box, b: Box) -> set[str]:
    """Where box a lies, seen from b. A tenth of their sizes is taken off the distance of the centres in each direction;
    what is left must be more than half of the distance."""
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    sizes = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    beyond = [math.copysign(max(abs(o) - 0.1 * s, 0.0), o) for o, s in zip(offset, sizes)]
    if max(map(abs, beyond)) < 1e-3:
        return set()
    x, y = (v / math.hypot(*offset) for v in beyond)
    return {name for name, holds in zip(_PLACES, (x < -0.5, x > 0.5, y < -0.5, y > 0.5)) if holds}
