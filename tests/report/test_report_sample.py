"""Tokens as signs and images as PNG."""

import pytest
import torch

from acmoe.data.text.vocabulary import ByteVocabulary, WordVocabulary
from acmoe.report.sample import Sample, png_uri, visible
from png_levels import decoded

BYTES = ByteVocabulary(bytes(range(256)))


@pytest.mark.parametrize(
    ("value", "sign"),
    [
        (65, "A"),
        (32, " "),
        (10, "\u23ce"),
        (9, "\u21e5"),
        (0, "\u2400"),
        (127, "\u2421"),
        (0xE9, "E9"),
    ],
)
def test_every_byte_is_a_sign_that_can_be_seen(value: int, sign: str) -> None:
    assert visible(value, BYTES) == sign


def test_no_byte_is_shown_as_a_control_character() -> None:
    signs = [visible(value, BYTES) for value in range(256)]
    assert all(sign.isprintable() for sign in signs)
    assert len(set(signs)) == 256


def test_words_are_shown_as_they_are_and_line_ends_as_a_sign() -> None:
    words = WordVocabulary(("<eos>", "<unk>", "<script>"))
    assert [visible(token, words) for token in range(3)] == ["\u23ce", "<unk>", "<script>"]


def test_pixels_come_back_from_the_png(generator: torch.Generator) -> None:
    levels_CYX = torch.randint(0, 256, (3, 5, 7), generator=generator)
    assert (decoded(png_uri(levels_CYX / 255)) == levels_CYX.permute(1, 2, 0).numpy()).all()


def test_values_outside_the_range_of_colours_are_clamped() -> None:
    assert decoded(png_uri(torch.tensor([-1.0, 0.5, 2.0]).view(3, 1, 1))).tolist() == [
        [[0, 128, 255]]
    ]


def test_large_images_are_averaged_down() -> None:
    # 224 pixels become 112: squares of 0, 0, 1, 1 average to one half.
    checks = (torch.arange(224)[:, None] + torch.arange(224)) % 2
    shown = decoded(png_uri(checks.float().expand(3, -1, -1)))
    assert shown.shape == (112, 112, 3)
    assert (shown == 128).all()


def test_a_grid_of_patches_belongs_to_each_image() -> None:
    assert Sample(mark="", count=3, content={}).items((4, 5)) == 60
    assert Sample(mark="", count=3, content={}).items(None) == 3
