"""Models of the Hugging Face Hub by name, in the cache that meander's Go programs and diffusers share."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from .faults import Fault, first_sentence

_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?")
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")
_VARIANTS = ["*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*", "*.non_ema.*"]


def folder(name: str | Path) -> Path:
    """A folder as it is, or the one in the cache of ORG/NAME or ORG/NAME@REVISION: what is missing is downloaded, with
    a word on it. Fault: the Hub does not give it, with what mends that."""
    found = _NAME.fullmatch(str(name))
    if Path(name).exists() or found is None:
        return Path(name)
    from huggingface_hub import snapshot_download

    repo, revision = found.groups()
    try:
        cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        if _is_whole(cached):
            return cached
    except OSError:
        pass  # it is not there, or not all of it
    return _download(repo, revision)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    try:
        index = Path(hf_hub_download(repo, "model_index.json", revision=revision))
        patterns = ["model_index.json", "meander.json"]
        patterns += [f"{part}/{files}" for part in _parts(index) for files in _FILES]
        wanted = {"revision": index.parent.name, "allow_patterns": patterns, "ignore_patterns": _VARIANTS}
        plan = [f for f in snapshot_download(repo, dry_run=True, **wanted) if f.will_download]
        size = sum(f.file_size or 0 for f in plan)
        print(f"downloading {repo}@{index.parent.name}: {len(plan)} files, {size / 2**20:.1f} MiB, to "
              f"{index.parents[2]}", file=sys.stderr, flush=True)  # fmt: skip
        return Path(snapshot_download(repo, **wanted))
    except errors.GatedRepoError:
        why = "gated: accept its terms on its page, then log in with 'hf auth login', or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}: leave it out for main"
    except errors.RepositoryNotFoundError:
        why = "there is no such model, or it is private: check the spelling; for a private one set HF_TOKEN"
    except errors.EntryNotFoundError as e:
        why = f"no model_index.json: {first_sentence(e)}; must be a pipeline of diffusers, in the cache or on the Hub"
    except (OSError, errors.HfHubHTTPError) as e:
        why = f"{first_sentence(e)}; the same command goes on from what is there"
    raise Fault("config", f"model: {repo}: {why}")


def _parts(index: Path) -> list[str]:
    """The folders that a model_index.json names."""
    fields = json.loads(index.read_text("utf-8"))
    return sorted(k for k, v in fields.items() if isinstance(v, list) and len(v) == 2 and None not in v)


def _is_whole(place: Path) -> bool:
    """Whether the parts of a pipeline are there. What is missing in one of them, its loader says."""
    index = place / "model_index.json"
    if not index.is_file() or not all(any((place / part).glob("*")) for part in _parts(index)):
        return False
    for file in place.glob("*/*.safetensors.index.json"):
        shards = set(json.loads(file.read_text("utf-8")).get("weight_map", {}).values())
        if not all((file.parent / shard).is_file() for shard in shards):
            return False
    return True
