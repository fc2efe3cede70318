"""Every file of recipes/: the program takes it, and it is of the model that it names."""

import pytest

from tests.support.cli import ROOT
from tests.support.resolved import on_gpus, on_xla

pytestmark = pytest.mark.fast

RECIPES = sorted((ROOT / "recipes").glob("*.args"))


def of_dino(width, hidden, bottleneck, *prototypes):
    """The parameters of the mask token, and of the two heads."""
    in_head = (width + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * bottleneck
    return width + sum(in_head + bottleneck * count for count in prototypes)


# The parameters of each model, as it was published.
PARAMETERS = {
    "deit3_at_224": 22_059_496,
    "deit3_base": 86_585_320 - 52 * 768,  # of 12 x 12 patches, not 14 x 14
    "deit3_huge": 632_126_440 - 135 * 1280,  # of 11 x 11, not 16 x 16
    "deit3_large": 304_374_760 - 52 * 1024,
    "deit3_small": 22_059_496,
    # As published without a head; layer scale twice a block.
    "dinov2_vit_l16": 303_301_632 + 24 * 2 * 1024 + of_dino(1024, 2048, 256, 65536, 65536),
    # As published, without the mask token, and biases of queries and values in timm's.
    "dinov3_vit_l16": 303_129_600 - 1024 - 24 * 2 * 1024 + of_dino(1024, 2048, 256, 65536, 65536),
    "dinov3_7b": 6_716_035_072 - 4096 + of_dino(4096, 8192, 512, 262_144, 98_304),
    "dinov3_7b_probe": 6_716_035_072 - 4096 + 4096 * 1000 + 1000,  # no mask token
    # As published, less the fixed positions of the decoder.
    "mae_vit_b16": 111_907_840 - 197 * 512,
    "mae_vit_l16": 329_541_888 - 197 * 512,
    "mae_vit_h14": 657_074_508 - 257 * 512,
    "mae_vit_l16_finetune": 304_326_632,
    # As published: open_clip's docs/openclip_results.csv, in millions; transformers' models.
    "clip_b16": 149_620_737,
    "siglip_b16": 203_155_970,
    "siglip_so400m": 877_360_306 + 48 * 1152,  # 64 tokens, not 16
    "vit_10b": 10_077_917_160,
    "vit_l16_finetune": 304_763_880,
    "vit_s16_imagenet_90ep": 22_050_664 - 2 * 384,  # no class token, and no position of it
}
NAMED_BY_HAND = {"deit3_at_224": ["--model", "timm/deit3_small_patch16_224"]}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path):
    given = [f"@{path}", *NAMED_BY_HAND.get(path.stem, [])]
    for resolve in (on_xla, on_gpus):
        run = resolve(given).on(8)
        if path.stem in PARAMETERS:
            assert run.model.parameter_count == PARAMETERS[path.stem]
    documented = (ROOT / "docs" / "recipes.md").read_text()
    assert f"recipes/{path.name}" in documented
