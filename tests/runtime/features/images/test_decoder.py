"""Images become the same tiles and texts as with transformers' processor, or one clear error."""

import io
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.errors import InvalidRequest
from runtime.features.images import decoding
from runtime.features.images.decoder import MOST_PIXELS, Decoded, DecodeOrder, decode
from runtime.features.images.families.gemma3 import WholeRules
from runtime.features.images.families.idefics3 import SquareRules
from runtime.features.images.families.llava_onevision import CropRules
from runtime.features.images.families.mistral3 import LineRules
from runtime.features.images.families.qwen_vl import GridRules
from runtime.features.images.rules import Rules, tokens_of
from runtime.features.images.tower import patches_of, values_of
from tests.runtime.features.images.seeing import ROWS, file_of, picture

_HALVES = {"rescale": 1 / 255, "mean": (0.5,) * 3, "std": (0.5,) * 3}
RULES = SquareRules(longest=64, tile=32, splits=True, row=8, resample=1, image="<image>", **_HALVES)
LINES = LineRules(longest=48, row=8, resample=3, image="[IMG]", **_HALVES)


_GRIDS = tuple((16 * i, 16 * j) for i in (1, 2, 3) for j in (1, 2))
CROPS = CropRules(longest=16, row=4, resample=3, image="<image>", most=2, grids=_GRIDS, **_HALVES)
WHOLE = WholeRules(longest=32, row=8, resample=2, image="<image_soft_token>", **_HALVES)
GRID = GridRules(longest=0, row=8, resample=3, image="<|image_pad|>", least=256, most=56 * 48, **_HALVES)


def values(found: Decoded, rules: Rules) -> np.ndarray:
    """The values of the tiles, which have one size."""
    return np.concatenate([values_of(tile, size, rules) for tile, size in zip(found.tiles, found.sizes, strict=True)])


def processor(**more) -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, **more)


@pytest.mark.parametrize("size", [(100, 80), (40, 90), (30, 30), (33, 32), (64, 64), (500, 3), (2, 300), (1, 1)])
@pytest.mark.parametrize("splits", [True, False])
def test_pixels_of_tiles_are_those_of_the_processor(size, splits):
    image = picture(5, *size)
    given = processor(do_image_splitting=splits)(image, return_tensors="np", return_row_col_info=True)
    rules = msgspec.structs.replace(RULES, splits=splits)
    found = decode(DecodeOrder(rules, file_of(image), pixels=True))
    assert (found.width, found.height) == size
    assert np.array_equal(values(found, rules), given["pixel_values"][0])
    assert len(found.tiles) == given["rows"][0][0] * given["cols"][0][0] + 1
    assert rules.text(*size).count("<image>") == ROWS * len(found.tiles)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_those_of_the_processor(mode):
    image, file = picture(5, 32, 32).convert(mode), io.BytesIO()
    if mode != "P":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(file, "PNG", transparency=image.getpixel((0, 0)) if mode == "P" else None)
    given = processor()(Image.open(file), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(values(decode(DecodeOrder(RULES, file.getvalue(), pixels=True)), RULES), given)


def test_an_image_that_exif_turns_is_upright():
    exif, file, image = Image.Exif(), io.BytesIO(), picture(5, 100, 80)
    exif[0x0112] = 6  # turn by 270 degrees
    image.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    assert decode(DecodeOrder(RULES, file.getvalue())) == decode(DecodeOrder(RULES, file_of(image)))


def test_grey_of_16_bits_keeps_its_upper_8():
    grey = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64
    files = [file_of(Image.fromarray(pixels)) for pixels in (grey, (grey >> 8).astype(np.uint8))]
    assert decode(DecodeOrder(RULES, files[0])) == decode(DecodeOrder(RULES, files[1]))


@pytest.mark.parametrize("size", [(100, 80), (40, 90), (30, 30), (16, 17), (48, 48), (500, 3), (2, 300), (1, 1)])
def test_pixels_of_crops_are_those_of_the_processor(size):
    image, grids = picture(5, *size), [[height, width] for width, height in CROPS.grids]
    own = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    given = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=grids, **own)(image, return_tensors="np")
    found = decode(DecodeOrder(CROPS, file_of(image), pixels=True))
    whole, (grid,) = (values_of(tile, one, CROPS) for tile, one in zip(found.tiles, found.sizes, strict=True))
    crops = grid.reshape(3, -1, 16, grid.shape[2] // 16, 16).transpose(1, 3, 0, 2, 4).reshape(-1, 3, 16, 16)
    assert np.array_equal(np.concatenate((whole, crops)), given["pixel_values"][0])
    like = SimpleNamespace(num_image_tokens=16, vision_aspect_ratio="anyres_max_2")
    grid_shape = grid.shape[1] // 16, grid.shape[2] // 16
    shown, ends = LlavaOnevisionProcessor._get_unpadded_features(like, *size[::-1], 4, 4, *grid_shape)
    assert CROPS.text(*size).count("<image>") == 16 + shown + ends


@pytest.mark.parametrize("size", [(100, 80), (40, 90), (30, 30), (33, 32), (48, 48), (20, 300), (1, 1)])
def test_pixels_of_images_in_lines_are_those_of_the_processor(size):
    image = picture(5, *size)
    own = {"patch_size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    given = PixtralImageProcessorPil(size={"longest_edge": 48}, **own)(image, return_tensors="np")
    found = decode(DecodeOrder(LINES, file_of(image), pixels=True))
    assert np.array_equal(values(found, LINES), given["pixel_values"])
    height, width = (int(one) // 8 for one in given["image_sizes"][0])
    assert LINES.text(*size) == "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


@pytest.mark.parametrize("size", [(100, 80), (40, 90), (32, 32), (1, 1)])
def test_pixels_of_whole_images_are_those_of_the_processor(size):
    image = picture(5, *size)
    given = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})(image, return_tensors="np")
    found = decode(DecodeOrder(WHOLE, file_of(image), pixels=True))
    assert np.array_equal(values(found, WHOLE), given["pixel_values"])
    assert WHOLE.text(*size) == f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"


@pytest.mark.parametrize(
    "size", [(100, 80), (40, 90), (30, 30), (33, 32), (12, 12), (20, 300), (1, 1), (56, 48), (3, 90)]
)
def test_patches_of_images_in_a_grid_are_those_of_the_processor(size):
    image = picture(5, *size)
    own = {"patch_size": 4, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    given = Qwen2VLImageProcessorPil(min_pixels=256, max_pixels=56 * 48, **own)(image, return_tensors="np")
    found = decode(DecodeOrder(GRID, file_of(image), pixels=True))
    patches = patches_of(torch.from_numpy(values(found, GRID))[0], 4, 2, 2)
    assert np.array_equal(patches.numpy(), given["pixel_values"])
    _, height, width = (int(one) for one in given["image_grid_thw"][0])
    assert found.sizes == [(width * 4, height * 4)]
    assert GRID.text(*size) == "<|image_pad|>" * (height * width // 4)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK", "1", "LA"])
def test_other_modes_of_pixels(mode):
    image = picture(6, 60, 50).convert(mode)
    data = file_of(image, "JPEG" if mode == "CMYK" else "PNG")
    wanted = processor()(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(values(decode(DecodeOrder(RULES, data, pixels=True)), RULES), wanted)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_formats(kind):
    assert len(decode(DecodeOrder(RULES, file_of(picture(7, 60, 50), kind))).digests) == 5


def test_a_tile_is_named_by_its_pixels_alone():
    image = picture(8, 64, 64)
    first = decode(DecodeOrder(RULES, file_of(image))).digests
    image.putpixel((63, 63), (1, 2, 3))
    second = decode(DecodeOrder(RULES, file_of(image))).digests
    assert first[:3] == second[:3], "tiles that are the same are the same in a prompt, up to the first that is not"
    assert first[3] != second[3]
    assert first[4] != second[4]
    tokens = tokens_of(first[0], 1000)
    assert -(1 << 31) <= min(tokens) <= max(tokens) < -1
    assert len(set(tokens)) > 990
    assert tokens != tokens_of(first[1], 1000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of the served formats"),
        (file_of(Image.new("1", (8000, 5000))), f"at most {MOST_PIXELS}"),
        (file_of(Image.new("1", (1000, 1))), "may differ"),
        (file_of(picture(9, 90, 90))[:300], "cannot be decoded"),
        (file_of(picture(9, 90, 90), "JPEG")[:1200], "cannot be decoded"),
        (b"%PDF-1.4", "none of the served formats"),
        (file_of(picture(9, 90, 90), "WEBP")[:-40], "cannot be decoded"),
    ],
)
def test_what_cannot_be_decoded(data, reason):
    with pytest.raises(InvalidRequest, match=reason):
        decode(DecodeOrder(RULES, data))


def test_too_little_time_is_an_error(monkeypatch):
    processes = decoding.DecodingProcesses()
    monkeypatch.setattr(decoding, "DECODE_S", 0.0)
    with pytest.raises(InvalidRequest, match="longer than"):
        processes.decode(DecodeOrder(RULES, file_of(picture(1, 2000, 2000))))
    processes.close()


def test_a_process_that_computes_too_long_is_ended():
    """By its CPU seconds, however long it waits for them."""
    program = "from runtime.features.images import decoder; decoder.DECODE_S = 0.05; decoder.main()"
    processes = decoding.DecodingProcesses()
    processes._command[2:] = ["-c", program]
    with pytest.raises(InvalidRequest, match="longer than"):
        processes.decode(DecodeOrder(RULES, file_of(picture(1, 5000, 5000))))
    processes.close()
