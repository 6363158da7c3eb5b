"""A model folder in the layout of diffusers: its configuration, and whether its parts may be loaded.

Nothing here imports torch: a card is known before the weights are read.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from ..data import tensorfile
from . import hub
from .faults import Fault

_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "transformer_2", "vae")
_NO_WEIGHTS = ("scheduler", "safety_checker")  # of the pipeline's other parts: or none that are loaded
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZER = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
_MOST_HEADER = 100_000_000  # bytes, of the format
_POINTER = b"version https://git-lfs"
_WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


class Folder:
    """A folder with a model_index.json. Every fault is of class config and names the file."""

    def __init__(self, path: str | Path):
        self.path = hub.folder(path).resolve()
        if not (self.path / "model_index.json").is_file():
            raise Fault(
                "config",
                f"model: no model_index.json in {self.path}; must be a folder in the layout of diffusers, "
                "or ORG/NAME of the Hugging Face Hub",
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
            raise _incomplete(f"no {file}") from None
        except (OSError, ValueError, RecursionError) as e:
            _check_fetched(file)
            raise Fault("config", f"model: {file}: {e}; copy it again") from e
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
        self._check_links(part)
        self.read(part, "config.json")
        chosen, shards = self._checkpoint(part)
        own = [name for name in tensorfile.usual(self.variant(part)) if name.startswith(f"{stem}.")]
        if chosen not in own and any((folder / name).is_file() for name in own):
            raise Fault("config", f"model: several checkpoints in {folder}; must be one: remove what is not used")
        if chosen not in own:
            there = sorted(p.name for p in folder.iterdir() if p.suffix in (*_PICKLES, ".safetensors"))
            why = (
                "pickles are never loaded: save the model again with safe_serialization=True"
                if all(n.endswith(_PICKLES) for n in there) and there
                else f"must be named so; there is {', '.join(there) or 'nothing'}"
            )
            raise Fault("config", f"model: no {stem}.safetensors in {folder}; {why}")
        if not shards:
            raise Fault("config", f"model: {folder / chosen}: weight_map: no files; copy the folder again")
        size, table = 0, dict[str, str]()
        for shard in shards:
            file = folder / shard
            if "/" in shard:
                raise Fault("config", f"model: {folder / chosen}: {shard:.100}; must be a file beside it")
            if not file.is_file():
                raise _incomplete(f"no {file}")
            names, length = _checked(file)
            table |= dict.fromkeys(names, shard) if chosen.endswith(".json") else {}
            size += length
        if chosen.endswith(".json"):
            index = self.read(part, chosen)
            said = index.pop("weight_map")
            if wrong := [name for name in {**table, **said} if table.get(name) != said.get(name)]:
                raise Fault(
                    "config",
                    f"model: {folder / chosen}: shards do not match their index: {len(wrong)} tensors, such as "
                    f"{min(wrong):.100}; copy the folder again",
                )
            if strange := set(index) - {"metadata"}:
                raise Fault("config", f"model: {folder / chosen}: {min(strange):.80}; must be weight_map or metadata")
        return size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells whether host and worker have the same weights, without reading all of them: the SHA-256 in hex of names
        and sizes of the files of all parts that are used, and of bytes at 256 places of each."""
        h = hashlib.sha256()
        others = [n for n in sorted(self.index) if n not in _PARTS and self.named_class(n) and n not in _NO_WEIGHTS]
        for part in (*_PARTS, *(n for n in others if not n.startswith("tokenizer"))):
            if not (self.path / part / "config.json").is_file() or self.index.get(part) == [None, None]:
                continue
            for name in self._checkpoint(part)[1]:
                file = self.path / part / name
                size = file.stat().st_size
                h.update(f"{part}/{name} {size}\n".encode())
                with file.open("rb") as f:
                    for i in range(256):
                        f.seek(size * i // 256)
                        h.update(f.read(1024))
        return h.hexdigest()

    def _checkpoint(self, part: str) -> tuple[str, list[str]]:
        """The file or index of the weights of a part, chosen as the libraries and the host do, and the files of it.

        Empty where none has a usual name and it is not clear which they are.
        """
        try:
            chosen = tensorfile.choose_checkpoint(p.name for p in (self.path / part).iterdir() if p.is_file())
        except ValueError as e:
            raise Fault("config", f"model: {self.path / part}: {e}") from None
        if not chosen.endswith(".json"):
            return chosen, [chosen] if chosen else []
        table = self.read(part, chosen).get("weight_map")
        files = list(table.values()) if isinstance(table, dict) else []
        if not all(isinstance(name, str) and len(name) < 256 for name in files):
            raise Fault("config", f"model: {self.path / part / chosen}: weight_map: must have names of files")
        return chosen, sorted(set(files))

    def tensors(self, part: str) -> set[str]:
        """The names of the tensors of a part."""
        return {name for file in self._checkpoint(part)[1] for name in _checked(self.path / part / file)[0]}

    def variant(self, part: str) -> str:
        """The variant of the weights of a part, such as fp16; "" where their names have none."""
        return tensorfile.variant_of(self._checkpoint(part)[0]) or ""

    def _check_links(self, part: str) -> None:
        """A fault if a link of a part leads to nothing, as where the blobs of a cache were not copied."""
        folder = self.path / part
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            if file.is_symlink() and not file.exists():
                raise Fault("config", f"model: {file} is a link to {file.readlink()}, which is not there: copy it")

    def splits_bytes_for_llama(self, part: str) -> bool:
        """Whether a tokenizer of Llama's class splits bytes, as its tokenizer.json says. transformers' class splits at
        spaces as SentencePiece does, whatever the file says: prompts of Llama 3 would lose theirs."""
        if not self.named_class(part).startswith("Llama"):
            return False
        return '"ByteLevel"' in json.dumps(self.read_optional(part, "tokenizer.json").get("pre_tokenizer"))

    def check_tokenizer(self, part: str) -> None:
        """Checks that the files of a tokenizer are there, and that those that are JSON can be read."""
        folder = self.path / part
        self._check_links(part)
        there = [name for name in _TOKENIZER if (folder / name).is_file()]
        if not there:
            raise _incomplete(f"none of {', '.join(_TOKENIZER)} in {folder}")
        if there == ["vocab.json"] and not (folder / "merges.txt").is_file():
            raise _incomplete(f"no {folder / 'merges.txt'}")
        for file in sorted(f for f in folder.iterdir() if f.is_file()):
            _check_fetched(file)
            if file.name in (*_TOKENIZER, "merges.txt") and not file.stat().st_size:
                raise _incomplete(f"{file} is empty")
            if file.name in ("tokenizer.json", "vocab.json", "tokenizer_config.json"):
                self.read(part, file.name)


def _incomplete(what: str) -> Fault:
    """The fault of a folder that was not copied whole."""
    return Fault("config", f"model: {what}; the folder is not whole: copy it again")


def _check_fetched(file: Path) -> None:
    """A fault if a file cannot be read, or if Git has cloned only a pointer to it."""
    try:
        with file.open("rb") as f:
            start = f.read(len(_POINTER))
    except OSError as e:
        raise Fault("config", f"model: {file}: {e.strerror}") from e
    if start == _POINTER:
        raise Fault("config", f"model: {file} is a pointer of Git LFS; fetch the file: `git lfs pull`")


def _checked(file: Path) -> tuple[list[str], int]:
    """The tensors and the bytes of a safetensors file, which must be as many as its header says, for downloads and
    copies break off, and of tensors that are not quantized."""
    _check_fetched(file)
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        try:
            header = json.loads(f.read(length)) if length <= size - 8 else {}
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            dtypes = {entry["dtype"]: name for name, entry in header.items()}
            whole = 8 + length + max(ends, default=0)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as e:
            raise Fault("config", f"model: {file}: its header cannot be read: {e}") from e
    if length > _MOST_HEADER:
        raise Fault("config", f"model: {file} is no safetensors file; copy it again")
    if size != whole:
        raise _incomplete(f"{file} has {size} bytes of {whole}")
    if quantized := [d for d in dtypes if d != "F64" and d.startswith(("F8", "F6", "F4", "I8", "U8"))]:
        raise Fault(
            "config",
            f"model: {file}: {dtypes[quantized[0]]}: {quantized[0]}; must be F16, BF16, F32 or F64: quantized weights "
            "are not computed, take the folder in bf16",
        )
    return list(header), size
