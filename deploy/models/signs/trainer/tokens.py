"""The tokenizer: a real byte-level Qwen2 BPE whose merges know only the words of the template and of the prompts.

Every word that the pipeline's template or a prompt uses is one token; digits are split by the pre-tokenizer, and no
merge joins two capitals, so that each character of a sign is a token of its own.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path

from . import render

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DROPPED = 34  # tokens before the user's text, whose hidden states the pipeline throws away
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = (
    "system|Describe| the| image| by| detailing| color| shape| size| texture| quantity| text| spatial| relationships| "
    "of"
    '| objects| and| background|user|assistant| sign| that| says| "'
).split("|")


def byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, by byte value (the GPT-2 table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, spare = {b: chr(b) for b in kept}, 256
    for b in range(256):
        if b not in table:
            table[b] = chr(spare)
            spare += 1
    return [table[b] for b in range(256)]


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent first (ties: the smaller pair), until every word is a single symbol."""
    symbols = byte_symbols()
    parts = [[symbols[b] for b in w.encode()] for w in words]
    merges: list[tuple[str, str]] = []
    while any(len(p) > 1 for p in parts):
        counts = collections.Counter(pair for p in parts for pair in zip(p, p[1:]))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for p in parts:
            i = 0
            while i + 1 < len(p):
                if (p[i], p[i + 1]) == best:
                    p[i : i + 2] = [p[i] + p[i + 1]]
                i += 1
    return merges


def write(folder: Path) -> None:
    """Writes vocab.json, merges.txt, tokenizer.json and tokenizer_config.json, and checks them with `check`."""
    from transformers import AddedToken, Qwen2Tokenizer

    words = [*WORDS, *(f" {c}" for c in render.COLOURS)]
    merges = learn_merges(words)
    order = sorted(byte_symbols(), key=lambda s: (ord(s) > 255, s)) + ["".join(m) for m in merges]
    vocab = {s: i for i, s in enumerate(dict.fromkeys(order))}
    if len(vocab) != 256 + len(merges):
        raise ValueError("two merges give the same symbol")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t, special=True) for t in SPECIALS[1:]]})
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    write_legacy(folder, vocab)
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIALS}
    if list(ids.values()) != list(range(len(vocab), len(vocab) + len(SPECIALS))):
        raise ValueError(f"special tokens are not at the end of the vocabulary: {ids}")
    check(Qwen2Tokenizer.from_pretrained(folder))


def write_legacy(folder: Path, vocab: dict[str, int]) -> None:
    """Names the special tokens the way that older readers of vocab.json and merges.txt look for them."""
    added = {t: len(vocab) + i for i, t in enumerate(SPECIALS)}
    (folder / "added_tokens.json").write_text(json.dumps(added, indent=2) + "\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config["add_prefix_space"] = False
    config["added_tokens_decoder"] = {str(i): {"content": t, **flags} for t, i in added.items()}
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


def check(tokenizer) -> None:
    """Raises ValueError unless the template splits into 34 tokens before the prompt and texts into single
    characters."""
    start = TEMPLATE.split("{}")[0]
    if (n := len(tokenizer(start).input_ids)) != DROPPED:
        raise ValueError(f"the template gives {n} tokens before the prompt, want {DROPPED}")
    prefix = tokenizer(start).input_ids
    texts = ("OPEN", "4071", "7", "WWWWWW", "EXIT")
    for user in (" ", *(render.prompt_of(c, t) for c in render.COLOURS for t in texts)):
        ids = tokenizer(TEMPLATE.format(user)).input_ids
        if ids[:DROPPED] != prefix:
            raise ValueError(f"prompt {user!r} changes the tokens before it")
        text = user.split('"')[1] if '"' in user else ""
        want = 5 + (len(text) + 7 if text else 1)
        if len(ids) - DROPPED != want:
            raise ValueError(
                f"prompt {user!r} gives {len(ids) - DROPPED} tokens, want {want}: {tokenizer.tokenize(user)}"
            )
