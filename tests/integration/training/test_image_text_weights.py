"""Training from public image-text weights, by the real program, and back: the same logits."""

import pytest
import torch
from transformers import AutoModel, SiglipConfig, SiglipModel

from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.pairs import LENGTH, VOCABULARY
from tests.support.two_towers import randomize
from tools import convert
from training.weights.find import find

WITHOUT_UPDATES = "--lr 1e-12 --weight_decay 0 --max_steps 2 --ckpt_step_interval 2".split()


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A folder of transformers with the sizes of the tests' models."""
    image = {"hidden_size": 32, "intermediate_size": 128, "image_size": 16, "patch_size": 4}
    text = {"hidden_size": 16, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    text |= {"vocab_size": VOCABULARY, "projection_size": 32}
    shared = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(vision_config=image | shared, text_config=text | shared)
    folder = tmp_path_factory.mktemp("public")
    randomize(SiglipModel(config)).save_pretrained(folder)
    return folder


def logits(folder):
    """transformers' logits of the same images and texts."""
    model, how = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not how["missing_keys"]
    assert not how["unexpected_keys"]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, 16, 16, generator=generator)
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    with torch.no_grad():
        return model.eval()(input_ids=tokens, pixel_values=images).logits_per_image


@pytest.mark.parametrize("backend", ["gpu", pytest.param("xla", marks=pytest.mark.long)])
def test_there_and_back(backend, public, tmp_path):
    """Both towers are sharded, trained and saved in between; the rates are too small to show."""
    flags = ["--fake_data", "--objective", "siglip", "--init_from", str(public), *WITHOUT_UPDATES]
    if backend == "gpu":
        result = train_tiny_gpu(tmp_path / "run", *flags, processes=2)
    else:
        result = train_tiny(tmp_path / "run", *flags, devices=2)
    assert "names of transformers replaced" in result.stdout
    assert "text tower with 2 blocks 16 wide, 6 tokens" in result.stdout
    assert result.records[0]["logit_scale"] == pytest.approx(torch.tensor(2.0).exp().item())
    target = tmp_path / "there"
    words = [result.ckpt_dir, target, "--to", "safetensors", "--names", "transformers"]
    assert convert.main([*map(str, words)]) == 0
    torch.testing.assert_close(logits(target), logits(public), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_locked_text_tower_from_elsewhere(public, tmp_path):
    """Resumed, it needs the weights no more; it has not changed."""
    flags = [
        "--fake_data",
        "--objective",
        "siglip",
        "--lock_text",
        "--model",
        "vit_tiny_patch16_224",
    ]
    folder = tmp_path / "text"
    folder.mkdir()
    for path in public.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    first = [*flags, "--init_text_from", str(folder), "--ckpt_step_interval", "3"]
    whole = train_tiny_gpu(tmp_path / "run", *first, processes=2)
    assert "text tower locked" in whole.stdout
    for path in folder.iterdir():
        path.unlink()
    again = [*first, "--resume", str(whole.ckpt_dir / "step_3")]
    resumed = train_tiny_gpu(tmp_path / "resumed", *again, processes=2)
    assert resumed.column("loss") == whole.column("loss")[3:]
    source = find(whole.ckpt_dir, "SRC")
    name = "text_blocks.1.mlp.fc1.weight"
    published = AutoModel.from_pretrained(public).text_model.encoder.layers[1].mlp.fc1.weight
    assert torch.equal(source.read([name])[name], published)
