#!/usr/bin/env python3
"""Writes two small networks in the shape of real reward models, to try onnx scorers with.

  aesthetic.onnx   patches -> features -> one linear layer, as the LAION aesthetic predictor
                   stands on CLIP: pixel_values [N, 3, 32, 32] -> score [N, 1]
  clip_score.onnx  an image embedding, normalised, times the embedding of one fixed text, times
                   100, as CLIPScore: pixel_values [N, 3, 32, 32] -> logits_per_image [N, 1]

Their weights are sines, not trained: the numbers mean nothing, the interface is the real one.
To use a trained model, export its image side the same way (torch.onnx.export with dynamic N).

--testdata also writes the variants and the golden numbers of the Go tests: the networks
evaluated by numpy in float64, and resizing by Pillow.
"""

import argparse
import json
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, PATCH = 32, 8
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])  # openai/clip-vit-large-patch14
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def weights(phase, *shape):
    n = int(np.prod(shape))
    return (np.sin(phase + 1.7 * np.arange(n)) / np.sqrt(n / shape[0])).reshape(shape).astype(np.float32)


AESTHETIC = {"patch": weights(1, 8, 3, PATCH, PATCH), "head": weights(2, 1, 8) * 4, "bias": np.array([5], np.float32)}
CLIP = {"patch": weights(3, 16, 3, PATCH, PATCH), "project": weights(4, 12, 16).T.copy(), "text": weights(5, 12, 1)}
CLIP["text"] /= np.linalg.norm(CLIP["text"])


def save(path, nodes, inputs, outputs, consts=None):
    graph = helper.make_graph(
        nodes, path.stem, inputs, outputs, [numpy_helper.from_array(v, k) for k, v in (consts or {}).items()]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="meander", ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    print(path, path.stat().st_size, "bytes")


def tensor(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


def features():
    return [
        helper.make_node(
            "Conv", ["pixel_values", "patch"], ["patches"], kernel_shape=[PATCH, PATCH], strides=[PATCH, PATCH]
        ),
        helper.make_node("Relu", ["patches"], ["active"]),
        helper.make_node("GlobalAveragePool", ["active"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["features"]),
    ]


def aesthetic(path):
    nodes = features() + [helper.make_node("Gemm", ["features", "head", "bias"], ["score"], transB=1)]
    save(
        path, nodes, [tensor("pixel_values", TensorProto.FLOAT, "N", 3, SIDE, SIDE)],
        [tensor("score", TensorProto.FLOAT, "N", 1)], AESTHETIC
    )


def clip_score(path):
    nodes = features() + [
        helper.make_node("MatMul", ["features", "project"], ["embeds"]),
        helper.make_node("ReduceL2", ["embeds"], ["norm"], axes=[1], keepdims=1),
        helper.make_node("Div", ["embeds", "norm"], ["image_embeds"]),
        helper.make_node("MatMul", ["image_embeds", "text"], ["cosine"]),
        helper.make_node("Mul", ["cosine", "logit_scale"], ["logits_per_image"]),
    ]
    consts = dict(CLIP, logit_scale=np.array(100, np.float32))
    save(
        path, nodes, [tensor("pixel_values", TensorProto.FLOAT, "N", 3, SIDE, SIDE)],
        [tensor("logits_per_image", TensorProto.FLOAT, "N", 1)], consts
    )


def image(width, height):
    """The image of the Go tests, [H, W, 3] uint8."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(7 * x + 3 * y) % 256, (x * y) % 256, 255 - (5 * x + 11 * y) % 256], axis=2).astype(np.uint8)


def pooled(weights, img):
    """The features of one image, in float64."""
    x = ((img / 255 - MEAN) / STD).transpose(2, 0, 1)
    n = SIDE // PATCH
    patches = x.reshape(3, n, PATCH, n, PATCH).transpose(1, 3, 0, 2, 4).reshape(n * n, -1)
    conv = patches @ weights["patch"].astype(np.float64).reshape(len(weights["patch"]), -1).T
    return np.maximum(conv, 0).mean(axis=0)


def testdata(folder):
    from PIL import Image

    # [1, 4, 6, 3] uint8, a fixed batch: the sums of the channels as two outputs of [1, 2].
    save(
        folder / "bytes.onnx",
        [
            helper.make_node("Cast", ["image"], ["x"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["x"], ["means"], axes=[1, 2], keepdims=0),
            helper.make_node("MatMul", ["means", "w"], ["out"]),
        ],
        [tensor("image", TensorProto.UINT8, 1, 4, 6, 3)],
        [tensor("out", TensorProto.FLOAT, 1, 2)],
        {"w": np.array([[1, 0], [0, 0.01], [0, 0]], np.float32)},
    )
    # float16 in and out: refused.
    save(
        folder / "half.onnx",
        [helper.make_node("GlobalAveragePool", ["x"], ["mean"])],
        [tensor("x", TensorProto.FLOAT16, "N", 3, "H", "W")],
        [tensor("mean", TensorProto.FLOAT16, "N", 3, 1, 1)],
    )
    # NaN for dark images: the root of the mean less a half. Two outputs.
    save(
        folder / "nan.onnx",
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=0),
            helper.make_node("Sub", ["mean", "half"], ["less"]),
            helper.make_node("Sqrt", ["less"], ["root"]),
        ],
        [tensor("x", TensorProto.FLOAT, "N", 3, "H", "W")],
        [tensor("root", TensorProto.FLOAT, "N"), tensor("mean", TensorProto.FLOAT, "N")],
        {"half": np.array(0.5, np.float32)},
    )
    # Two inputs: refused.
    save(
        folder / "two.onnx",
        [helper.make_node("Add", ["a", "b"], ["c"])],
        [tensor("a", TensorProto.FLOAT, "N", 3, 8, 8), tensor("b", TensorProto.FLOAT, "N", 3, 8, 8)],
        [tensor("c", TensorProto.FLOAT, "N", 3, 8, 8)],
    )

    imgs = [image(SIDE, SIDE), 255 - image(SIDE, SIDE), np.roll(image(SIDE, SIDE), 5, axis=0)]
    scores = {"aesthetic": [], "clip_score": []}
    for img in imgs:
        scores["aesthetic"].append(
            float((AESTHETIC["head"].astype(np.float64) @ pooled(AESTHETIC, img))[0] + AESTHETIC["bias"][0])
        )
        e = pooled(CLIP, img) @ CLIP["project"].astype(np.float64)
        scores["clip_score"].append(float(100 * e @ CLIP["text"][:, 0].astype(np.float64) / np.linalg.norm(e)))

    def frame(width, height, resize, how):
        img, (w, h) = Image.fromarray(image(width, height)), (8, 6)
        filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
        size = (w, h)
        if resize != "exact":
            pick = max if resize == "short" else min
            factor = pick(w / width, h / height)
            size = (w, int(height * w / width)) if factor == w / width else (int(width * h / height), h)
        img = img.resize(size, filters[how])
        out = Image.new("RGB", (w, h))
        out.paste(img, (round((w - size[0]) / 2), round((h - size[1]) / 2)))
        return {"width": width, "height": height, "resize": resize, "filter": how, "pixels": list(out.tobytes())}

    frames = [
        frame(w, h, r, f) for w, h in ((24, 16), (5, 11), (8, 6)) for r in ("short", "exact", "pad")
        for f in ("bicubic", "bilinear")
    ]
    golden = {"made_by": f"make_onnx.py --testdata; numpy {np.__version__}", "scores": scores, "frames": frames}
    path = folder / "golden.json"
    path.write_text(json.dumps(golden) + "\n")
    print(path, path.stat().st_size, "bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent,
        help="folder to write to (default: beside this file)"
    )
    parser.add_argument("--testdata", action="store_true", help="also write what the Go tests need")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    aesthetic(args.out / "aesthetic.onnx")
    clip_score(args.out / "clip_score.onnx")
    if args.testdata:
        testdata(args.out)


if __name__ == "__main__":
    main()
