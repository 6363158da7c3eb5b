"""Files that a pipeline is given: what becomes of them, and that they travel."""

import io

import meander
import numpy as np
import pytest
from meander.client import conditions
from nats.js.errors import NoStreamResponseError
from PIL import Image


def pixels(file):
    """The frames of a PNG file, [frames, height, width, 3]."""
    with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
        out = []
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            out.append(np.asarray(image.convert("RGB")))
    return np.stack(out)


def saved(image, kind, **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def test_what_is_given_becomes_a_png(tmp_path):
    x = np.random.default_rng(1).integers(0, 256, (3, 5, 7, 3), np.uint8)
    assert (pixels(conditions.png_of(x)) == x).all()
    assert (pixels(conditions.png_of(x[0])) == x[:1]).all()
    assert (pixels(conditions.png_of(x[0] / 255.0)) == x[:1]).all()
    assert (pixels(conditions.png_of(Image.fromarray(x[0]))) == x[:1]).all()
    mask = x[0, :, :, 0] > 128
    assert (pixels(conditions.png_of(mask))[0, :, :, 1] == mask * 255).all()
    alpha = Image.fromarray(np.concatenate([x[0], x[1, :, :, :1]], axis=2), "RGBA")
    assert (pixels(conditions.png_of(alpha)) == x[:1]).all()
    file = saved(Image.fromarray(x[0]), "PNG")
    (tmp_path / "x.png").write_bytes(file)
    assert conditions.png_of(file) == conditions.png_of(tmp_path / "x.png") == conditions.png_of(str(
        tmp_path / "x.png")) == file
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = pixels(conditions.png_of(saved(Image.fromarray(x[0]), "JPEG", exif=exif)))
    assert turned.shape == (1, 7, 5, 3)


def test_files_are_read_as_diffusers_reads_them():
    """Turned files, alpha, palettes and grey ones have the pixels of load_image; several frames are named."""
    load = pytest.importorskip("diffusers.utils", reason="no diffusers: its load_image is not compared").load_image
    x = np.random.default_rng(2).integers(0, 256, (6, 9, 4), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb, rgba = Image.fromarray(x[..., :3]), Image.fromarray(x)
    files = [
        saved(rgb, "JPEG", exif=exif), saved(rgb, "PNG", exif=exif), saved(rgb, "WEBP", lossless=True), saved(rgba, "PNG"),
        saved(rgba.convert("LA"), "PNG"), saved(rgb.convert("P"), "PNG"), saved(rgb.convert("L"), "PNG"),
        saved(rgb.convert("1"), "PNG"), saved(rgb.convert("CMYK"), "JPEG"), saved(rgb.convert("L"), "JPEG", exif=exif),
    ]
    for file in files:
        want = np.asarray(load(Image.open(io.BytesIO(file))))
        assert (pixels(conditions.png_of(file)) == want[None]).all()
    moving = saved(rgb, "GIF", save_all=True, append_images=[rgba.convert("RGB").rotate(180)])
    with pytest.raises(ValueError, match="an animated GIF; must be an animated PNG"):
        conditions.png_of(moving)


@pytest.mark.parametrize("value, fault", [
    (np.zeros((4, 4, 4), np.uint8), "an array of uint8"), (np.full((4, 4), 1.5), "must be 0 to 1"),
    (np.zeros((4, 4), np.uint16), "an array of uint16"), (Image.new("I;16", (2, 2)), "mode I;16"),
])
def test_what_has_no_eight_bits_is_refused(value, fault):
    with pytest.raises(ValueError, match=fault):
        conditions.png_of(value)


def test_arguments_are_texts():
    assert conditions.texts({"a": 4, "b": 0.5, "c": True, "d": "x", "e": np.float64(2)}) == {
        "a": "4", "b": "0.5", "c": "true", "d": "x", "e": "2.0",
    }
    with pytest.raises(ValueError, match="arguments: f"):
        conditions.texts({"f": [1]})


def test_conditions_are_stored_and_refused_by_a_model_of_texts(run):
    async def test(client, name):
        image = np.zeros((8, 8, 3), np.uint8)
        (item,) = await conditions.stored(client, {"image": image}, 10)
        assert item["name"] == "image" and (pixels(await client.blob(item["ref"])) == image).all()
        with pytest.raises(meander.Refused, match="conditions: image; must be absent"):
            await client.publish(name, "make it red", conditions={"image": [image, item["ref"]]})
        with pytest.raises(meander.Refused, match="arguments: strength; must be absent"):
            await client.publish(name, "make it red", arguments={"strength": 0.5})
        with pytest.raises(ValueError, match="conditions: image: an array"):
            await client.publish(name, "make it red", conditions={"image": image[0, 0]})

    run(test)


def test_conditions_wait_for_a_store_that_is_set_up(run, monkeypatch):
    """While a pipeline starts, the server has no stream yet."""
    left = [2]

    async def test(client, name):
        store = client.js.publish

        async def publish(subject, *args, **named):
            if left[0] > 0:
                left[0] -= 1
                raise NoStreamResponseError
            return await store(subject, *args, **named)

        monkeypatch.setattr(client.js, "publish", publish)
        image = np.random.default_rng(7).integers(0, 256, (8, 8, 3), np.uint8)
        (item,) = await conditions.stored(client, {"image": image}, 30)
        assert left == [0] and (pixels(await client.blob(item["ref"])) == image).all()
        left[0] = 1000
        with pytest.raises(TimeoutError, match="conditions: image: not stored: .*; is a pipeline up"):
            await client.publish(name, "make it red", timeout=0.2, conditions={"image": image[:4]})

    run(test)
