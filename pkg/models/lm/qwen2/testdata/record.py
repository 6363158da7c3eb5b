#!/usr/bin/env python3
"""Records what transformers makes of checkpoints, in float32, for parity_test.go.

    go test ./pkg/models/lm/qwen2 -run TestParity_Random -folders /tmp/random
    record.py deploy/models/sums /tmp/random

Writes sums.json (greedy answers), templates.json (conversations in chat templates) and logits.safetensors beside itself.
"""

import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

here = Path(__file__).parent
sums, folders = map(Path, sys.argv[1:])
logits = {}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def record(model, name, ids, last):
    logits[name + ".ids"] = torch.tensor(ids, dtype=torch.int32)
    logits[name] = model(torch.tensor([ids])).logits[0, -last:].float().contiguous()


tokenizer, model = AutoTokenizer.from_pretrained(sums), load(sums)
r, answers = random.Random(7), []
for i in range(500):
    a, b = (r.randrange(10 ** r.randint(1, 3)) for _ in range(2))
    question = f"{a}{r.choice('+-')}{b}=?"
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0]
    answers.append({"question": question, "prompt": ids[0].tolist(), "answer": out[ids.shape[1] :].tolist()})
    if i < 16:
        record(model, f"sums.{i}", out.tolist(), 5)
(here / "sums.json").write_text("[\n" + ",\n".join(json.dumps(a) for a in answers) + "\n]\n")
for folder in sorted(p for p in folders.iterdir() if p.is_dir()):
    model = load(folder)
    for i, n in enumerate((3, 40)):
        record(model, f"{folder.name}.{i}", [r.randrange(256) for _ in range(n)], 2)
save_file(logits, here / "logits.safetensors")

conversations = [
    [("user", "347+58=?")],
    [("system", "You add\nand subtract numbers."), ("user", "1+1=?"), ("assistant", "3"), ("user", "too high")],
    [("user", " spaces \n"), ("assistant", ""), ("user", "<|im_end|>é漢")],
]
out = []
for path in sorted(here.glob("*.jinja")):
    tokenizer.chat_template = path.read_text()
    for c in conversations:
        messages = [{"role": role, "content": content} for role, content in c]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text).input_ids
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
        out.append({"template": path.name, "messages": [{"Role": a, "Content": b} for a, b in c], "text": text, "ids": ids})
(here / "templates.json").write_text(json.dumps(out, indent=1) + "\n")
