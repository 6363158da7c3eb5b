"""The tokenizer: byte-level BPE whose merges spell the words of a conversation about sums, each one token."""

from __future__ import annotations

import json
from pathlib import Path

# Words in the order of their merges, each spelled from left to right; those with a common beginning share it.
WORDS = ("system", "user", "assistant", "too", " low", " high", "=?", "You", " add", " and", " subtract", " numbers")
SYSTEM = "You add and subtract numbers."

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = 320  # of the embedding; the tokenizer has fewer entries, as with the large models


def alphabet() -> list[str]:
    """The printable characters that stand for the 256 bytes, by byte, as GPT-2 has them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in printable)
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [chars[b] for b in range(256)]


def write(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    chars = alphabet()
    vocab = {c: i for i, c in enumerate(sorted(chars))}
    merges = []
    for word in WORDS:
        parts = [chars[b] for b in word.encode()]
        for i in range(1, len(parts)):
            left, right = "".join(parts[:i]), parts[i]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append([left, right])
    added = [
        {
            "id": len(vocab) + i, "content": c, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True
        }
        for i, c in enumerate((PAD, START, END))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges},
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",  # what transformers 5 writes itself, 4.57 refuses
        "add_prefix_space": False, "add_bos_token": False, "bos_token": None, "eos_token": END, "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [START, END], "clean_up_tokenization_spaces": False, "errors": "replace",
        "model_max_length": 512, "split_special_tokens": False, "chat_template": TEMPLATE,
        "added_tokens_decoder": {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in added},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Tokens:
    """Conversations as ids."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.pad, self.start, self.end = (self.tokenizer.token_to_id(c) for c in (PAD, START, END))
        self.head = {role: self.ids(f"{START}{role}\n") for role in ("system", "user", "assistant")}
        self.tail = self.ids(f"{END}\n")
        for word in WORDS:  # each one token, in place
            role = word if word in self.head else "user"
            text = f"{START}{role}\n" + ("" if word == role else "1" + word) + END
            assert self.tokenizer.token_to_id("".join(alphabet()[b] for b in word.encode())) in self.ids(text), word

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def message(self, role: str, content: str) -> list[int]:
        return [*self.head[role], *self.ids(content), *self.tail]

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        return [i for m in messages for i in self.message(*m)] + self.head["assistant"]

    def answer(self, text: str) -> list[int]:
        return [*self.ids(text), self.end]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)
