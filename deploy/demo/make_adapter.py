#!/usr/bin/env python3
"""Makes deploy/demo/adapter, a LoRA of the model signs to try `meander policy push` with. Standard library only.

Nothing was learned: its matrices are drawn, of rank 4 on the projections of the image's attention, and so small that
signs look a little different and can still be read. `make learn` makes an adapter that has learned something.
"""

import json
import random
import struct
from pathlib import Path

BLOCKS, WIDTH, RANK = 4, 128, 4
MODULES = ("to_q", "to_k", "to_v", "to_out.0")
OUT = Path(__file__).parent / "adapter"


def main() -> None:
    rng = random.Random(1)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for block in range(BLOCKS):
        for module in MODULES:
            for name, shape, std in (("lora_A", [RANK, WIDTH], WIDTH**-0.5), ("lora_B", [WIDTH, RANK], 0.02)):
                values = [rng.gauss(0, std) for _ in range(RANK * WIDTH)]
                header[f"base_model.model.transformer_blocks.{block}.attn.{module}.{name}.weight"] = {
                    "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)],
                }  # fmt: skip
                data += struct.pack(f"<{len(values)}f", *values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    OUT.mkdir(exist_ok=True)
    (OUT / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {"peft_type": "LORA", "base_model_name_or_path": "deploy/models/signs"}
    config |= {"r": RANK, "lora_alpha": RANK, "target_modules": sorted(MODULES)}
    (OUT / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
