"""A model folder in the layout of diffusers: its configuration, and whether its parts may be loaded.

Nothing here imports torch: a card is known before the weights are read.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from .faults import Fault

_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "transformer_2", "vae")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZER = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
_WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


class Folder:
    """A folder with a model_index.json. Every fault is of class config and names the file."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        if not (self.path / "model_index.json").is_file():
            raise Fault(
                "config",
                f"model: no model_index.json in {self.path}; download the model where there is a network "
                "(`hf download ORG/NAME --local-dir DIR`) and copy it",
            )
        self.index = self.read("model_index.json")

    @property
    def class_name(self) -> str:
        """The pipeline class that the folder names."""
        return str(self.index.get("_class_name", ""))

    def read(self, *names: str) -> dict[str, Any]:
        """Returns a JSON file of the folder."""
        file = self.path.joinpath(*names)
        try:
            out = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise Fault("config", f"model: no {file}; the folder is not whole: copy it again") from None
        except (OSError, ValueError) as e:
            raise Fault("config", f"model: {file}: {e}") from e
        if not isinstance(out, dict):
            raise Fault("config", f"model: {file}: a {type(out).__name__}; must be an object")
        return out

    def read_optional(self, *names: str) -> dict[str, Any]:
        """Returns a JSON file of the folder, {} if it is not there."""
        return self.read(*names) if self.path.joinpath(*names).is_file() else {}

    def named_class(self, part: str) -> str:
        """The class of a part by model_index.json; "" where the pipeline goes without."""
        entry = self.index.get(part)
        name = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        return name if isinstance(name, str) else ""

    def check_weights(self, part: str, library: str) -> int:
        """Returns the bytes of the weights of a part, which must be safetensors files that are all there."""
        folder, stem = self.path / part, _WEIGHTS[library]
        self.read(part, "config.json")
        whole, index = (folder / f"{stem}.safetensors{end}" for end in ("", ".index.json"))
        if whole.is_file() and not (library == "diffusers" and index.is_file()):  # as each library looks for them
            shards = [f"{stem}.safetensors"]
        elif index.is_file():
            table = self.read(part, f"{stem}.safetensors.index.json").get("weight_map")
            shards = sorted(set(table.values())) if isinstance(table, dict) else []
        else:
            there = sorted(p.name for p in folder.iterdir() if p.suffix in (*_PICKLES, ".safetensors"))
            why = (
                "pickles are never loaded: save the model again with safe_serialization=True"
                if all(n.endswith(_PICKLES) for n in there) and there
                else f"must be named so; there is {', '.join(there) or 'nothing'}"
            )
            raise Fault("config", f"model: no {stem}.safetensors in {folder}; {why}")
        if shards != self._checkpoint(part):
            raise Fault("config", f"model: several checkpoints in {folder}; must be one: remove those that are not used")
        size = 0
        for shard in shards:
            file = folder / shard
            if "/" in shard or not file.is_file():
                raise Fault("config", f"model: no {file}; the folder is not whole: copy it again")
            size += file.stat().st_size
        return size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells whether host and worker have the same weights, without reading all of them: the SHA-256 in hex of names
        and sizes of the files of all parts that are used, and of bytes at 256 places of each."""
        h = hashlib.sha256()
        for part in _PARTS:
            if not (self.path / part / "config.json").is_file() or self.index.get(part) == [None, None]:
                continue
            for name in self._checkpoint(part):
                file = self.path / part / name
                size = file.stat().st_size
                h.update(f"{part}/{name} {size}\n".encode())
                with file.open("rb") as f:
                    for i in range(256):
                        f.seek(size * i // 256)
                        h.update(f.read(1024))
        return h.hexdigest()

    def _checkpoint(self, part: str) -> list[str]:
        """The files of the weights of a part, as the host chooses them; [] where it is not clear which they are."""
        names = sorted(p.name for p in (self.path / part).iterdir() if p.is_file())
        wholes, indexes = ([n for n in names if n.endswith(e)] for e in (".safetensors", ".safetensors.index.json"))
        diffusers = [f"{_WEIGHTS['diffusers']}{end}" for end in (".safetensors.index.json", ".safetensors")]
        usual = ["model.safetensors", "model.safetensors.index.json", *diffusers]
        first = next((n for n in usual if n in names), None) or next(
            (only[0] for only in (indexes, wholes) if len(only) == 1), None
        )
        if first is None or first.endswith(".safetensors"):
            return [first] if first else []
        table = self.read(part, first).get("weight_map")
        return sorted(set(table.values())) if isinstance(table, dict) else []

    def splits_bytes(self, part: str) -> bool:
        """Whether a tokenizer splits bytes, as its tokenizer.json says."""
        text = json.dumps(self.read_optional(part, "tokenizer.json").get("pre_tokenizer"))
        return '"ByteLevel"' in text

    def check_tokenizer(self, part: str) -> None:
        """Checks that a tokenizer has a file that it can be read from."""
        folder = self.path / part
        if not any((folder / name).is_file() for name in _TOKENIZER):
            raise Fault(
                "config",
                f"model: none of {', '.join(_TOKENIZER)} in {folder}; the folder is not whole: copy it again",
            )
