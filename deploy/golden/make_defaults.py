#!/usr/bin/env python3
"""Record what the classes of transformers and diffusers take for what their configuration leaves out.

    python deploy/golden/make_defaults.py pkg/models/lm/qwen2/testdata/defaults.json pkg/models/model/qwenimage/testdata/defaults.json \\
        pkg/flow/testdata/defaults.json

Part of `make golden`.
"""

import inspect
import json
import sys

import diffusers
import transformers


def of(cls):
    parameters = inspect.signature(cls.__init__).parameters
    return {name: p.default for name, p in parameters.items() if name not in ("self", "kwargs", "lambda_min_clipped")}


def plain(config):
    return {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "id2label", "label2id")}


def main():
    generation = transformers.GenerationConfig()
    drawn = {k: v for k, v in generation._get_default_generation_params().items()
             if k in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    files = [
        dict(Qwen2Config=plain(transformers.Qwen2Config()), GenerationConfig=drawn),
        dict(Qwen2_5_VLTextConfig=plain(transformers.Qwen2_5_VLConfig().text_config),
             QwenImageTransformer2DModel=of(diffusers.QwenImageTransformer2DModel),
             AutoencoderKLQwenImage=of(diffusers.AutoencoderKLQwenImage)),
        {name: of(getattr(diffusers, name)) for name in (
            "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler")},
    ]
    about = "deploy/golden/make_defaults.py, transformers %s, diffusers %s" % (
        transformers.__version__, diffusers.__version__
    )
    for path, classes in zip(sys.argv[1:], files, strict=True):
        with open(path, "w") as f:
            json.dump(dict(about=about, classes=classes), f, indent=1, sort_keys=True)
            f.write("\n")


if __name__ == "__main__":
    main()
