#!/usr/bin/env python3
"""The other engine of `make bench-tokens`: transformers on the CPU, by generate and by a bare loop over forward with a
cache.

It reads one JSON object per line and answers each with one. The first, {"model", "dtype", "prompt", "tokens"}, is
answered by {"engine"}; every other, {"way": "generate" or "loop", "batch", "threads", "seconds"}, by the mean time in
seconds of a call, repeated for at least "seconds": {"seconds", "cpu"}, cpu being the time of all threads. A call takes
the prompt, batch times, and draws "tokens" tokens for each at temperature 1, whatever they are.

Python packages: torch and transformers.
"""

import sys
import time

from peer import serve

try:
    import torch
    import transformers
except ImportError as e:
    sys.exit(f"transformers_peer.py: {e}; python3 -m pip install torch transformers")


class Peer:
    @torch.inference_mode()
    def __init__(self, config):
        transformers.utils.logging.set_verbosity_error()
        self.tokens = config["tokens"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            config["model"], dtype=getattr(torch, config["dtype"])
        ).eval()
        self.prompt = torch.tensor([config["prompt"]])

    def generate(self, ids):
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=self.tokens, max_new_tokens=self.tokens,
        )
        return out.shape[1] - ids.shape[1]

    def loop(self, ids):
        past, made = None, 0
        while made < self.tokens:
            out = self.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            ids = torch.multinomial(torch.softmax(out.logits[:, -1].float(), -1), 1)
            made += 1
        return made

    @torch.inference_mode()
    def measure(self, call):
        torch.set_num_threads(call["threads"])
        ids, way = self.prompt.repeat(call["batch"], 1), getattr(self, call["way"])
        calls, cpu, began = 0, time.process_time(), time.perf_counter()
        while calls == 0 or time.perf_counter() - began < call["seconds"]:
            assert way(ids) == self.tokens
            calls += 1
        return {"seconds": (time.perf_counter() - began) / calls, "cpu": (time.process_time() - cpu) / calls}


if __name__ == "__main__":
    serve(Peer, f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
