"""Weights of public image-text models: the logits of transformers, read and written; what files
say of the model wins, or contradicting flags are refused."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    CLIPConfig,
    CLIPModel,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
)

from features.image_text.feature import ImageText
from tests.fakes.filled import filled
from tests.support.two_towers import (
    as_run,
    configured,
    drawn,
    loaded,
    logits,
    of_flags,
    randomize,
)
from tools import convert
from training.errors import UsageError
from training.weights.adapt import adapt, with_parts

NARROW = 8
"""Towers are as much narrower than the published ones."""


def siglip(width, depth, heads, hidden, patch, size, length=64, text=None, **more):
    """The configuration of a public model, with two blocks and few tokens."""
    del depth

    def tower(width, heads, hidden):
        return {
            "hidden_size": width // NARROW,
            "intermediate_size": hidden // NARROW,
            "num_hidden_layers": 2,
            "num_attention_heads": heads // 2,
        }

    image = tower(width, heads, hidden) | {"patch_size": patch, "image_size": size} | more
    texts = tower(*(text or (width, heads, hidden)))
    texts |= {"vocab_size": 90, "max_position_embeddings": length}
    texts["projection_size"] = width // NARROW
    return SiglipConfig(vision_config=image, text_config=texts)


def clip(width, heads, patch, size, text_width, text_heads, act="quick_gelu"):
    image = {"hidden_size": width // NARROW, "intermediate_size": width // 2, "hidden_act": act}
    image |= {"num_hidden_layers": 2, "num_attention_heads": heads // 4}
    image |= {"patch_size": patch, "image_size": size}
    text = {"hidden_size": text_width // NARROW, "intermediate_size": text_width // 2}
    text |= {"num_hidden_layers": 2, "num_attention_heads": text_heads // 4, "hidden_act": act}
    text |= {"vocab_size": 90, "eos_token_id": 2}
    return CLIPConfig(vision_config=image, text_config=text, projection_dim=text_width // NARROW)


ARCHITECTURES = {
    "siglip B/16": siglip(768, 12, 12, 3072, 16, 64),
    "siglip L/16": siglip(1024, 24, 16, 4096, 16, 64),
    "siglip So400m/14": siglip(1152, 27, 16, 4304, 14, 64, length=16),  # a rest of 8 pixels
    "siglip2 So400m/16": siglip(1152, 27, 16, 4304, 16, 64),
    "siglip2 giant/16": siglip(1536, 40, 16, 6144, 16, 64, text=(1152, 16, 4304)),
    "clip B/32": clip(768, 12, 32, 64, 512, 8),
    "clip B/16": clip(768, 12, 16, 64, 512, 8),
    "clip L/14": clip(1024, 16, 14, 56, 768, 12),
    "openclip H/14": clip(1280, 16, 14, 56, 1024, 16, act="gelu"),
}


def of_transformers(config):
    kind = CLIPModel if isinstance(config, CLIPConfig) else SiglipModel
    config._attn_implementation = "eager"
    return randomize(kind(config))


def objective(config):
    return ["--objective", "clip" if isinstance(config, CLIPConfig) else "siglip"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_transformers(name, tmp_path):
    config = ARCHITECTURES[name]
    theirs = of_transformers(config)
    theirs.save_pretrained(tmp_path)
    spec, model, adapter = loaded(tmp_path, *objective(config))
    images, tokens = drawn(spec)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, pixel_values=padded(images, config)).logits_per_image
    torch.testing.assert_close(logits(model, images, tokens), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.05
    assert "new" not in adapter.note
    assert "dropped" not in adapter.note


def padded(images, config):
    """Images with the pixels at their ends that are no whole patch."""
    more = config.vision_config.image_size - images.shape[-1]
    return torch.nn.functional.pad(images, (0, more, 0, more), value=7.0)


def test_native_resolution_siglip2_at_its_own_grid(tmp_path):
    """Its patches are a matrix; images of another shape are not compared."""
    sizes = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6}
    image = sizes | {"num_patches": 16, "patch_size": 8}
    text = sizes | {"vocab_size": 90, "max_position_embeddings": 12}
    config = Siglip2Config(vision_config=image, text_config=text)
    config._attn_implementation = "eager"
    theirs = randomize(Siglip2Model(config))
    theirs.save_pretrained(tmp_path)
    spec, model, _ = loaded(tmp_path, "--objective", "siglip")
    assert spec.sizes.grid == (4, 4)
    images, tokens = drawn(spec)
    patches = images.unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1)
    given = {
        "pixel_values": patches.reshape(4, 16, -1),
        "pixel_attention_mask": torch.ones(4, 16, dtype=torch.int64),
        "spatial_shapes": torch.full((4, 2), 4),
    }
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **given).logits_per_image
    torch.testing.assert_close(logits(model, images, tokens), expected, rtol=1e-5, atol=1e-5)


# -- native resolution -----------------------------------------------------------------------------

GRIDS = [(4, 4), (2, 7), (9, 3), (1, 1), (5, 6), (13, 1)]
"""Rows and columns of images; the table of positions has 4 x 4."""


def siglip2(patch=8, patches=16, **sizes):
    sizes = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2} | sizes
    sizes = {"num_attention_heads": 6} | sizes
    text = sizes | {"vocab_size": 90, "max_position_embeddings": 12}
    image = sizes | {"num_patches": patches, "patch_size": patch}
    config = Siglip2Config(vision_config=image, text_config=text)
    config._attn_implementation = "eager"
    return config


def drawn_sizes(grids, values):
    """The patches of an image of each grid."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows * columns, values, generator=generator) for rows, columns in grids]


def in_one_sequence(images, grids, places):
    """As the model here takes them: one after the other, then padding."""
    coordinates, numbers = [], []
    for number, (rows, columns) in enumerate(grids, 1):
        at = torch.arange(rows * columns)
        sides = torch.tensor([rows, columns]).expand(len(at), 2)
        coordinates.append(torch.cat([(at // columns)[:, None], (at % columns)[:, None], sides], 1))
        numbers.append(torch.full((len(at),), number))
    patches, coordinates, numbers = map(torch.cat, (images, coordinates, numbers))
    more = places - len(patches)
    pad = torch.nn.functional.pad
    return {
        "patches": pad(patches, (0, 0, 0, more), value=7.0)[None],
        "patch_coord": pad(coordinates, (0, 0, 0, more))[None],
        "segment_ids": pad(numbers, (0, more)).int()[None],
    }


def in_a_batch(images, grids):
    """As transformers takes them: each padded to the longest."""
    most = max(map(len, images))
    pad = torch.nn.functional.pad
    return {
        "pixel_values": torch.stack([pad(x, (0, 0, 0, most - len(x)), value=3.0) for x in images]),
        "pixel_attention_mask": torch.stack(
            [pad(torch.ones(len(x), dtype=torch.int64), (0, most - len(x))) for x in images]
        ),
        "spatial_shapes": torch.tensor(grids),
    }


def assert_same_logits(model, theirs, spec, grids=GRIDS):
    """Of images of all grids, together here."""
    generator = torch.Generator().manual_seed(3)
    text = spec.config.text
    tokens = torch.randint(text.vocab_size, (spec.segments, text.length), generator=generator)
    images = drawn_sizes(grids, spec.shape.values_of_patch(3))
    with torch.no_grad():
        found = model((in_one_sequence(images, grids, spec.shape.tokens), tokens.int()))
        expected = theirs(input_ids=tokens, **in_a_batch(images, grids)).logits_per_image
    products = found.images[: len(grids)] @ found.texts.T
    ours = found.scale[0] * products + found.bias[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
    assert expected.std() > 0.05


NATIVE = "--objective siglip --native_resolution --token_budget 120 --max_images_per_sequence 8"


def test_images_of_any_size_have_transformers_logits(tmp_path):
    theirs = randomize(Siglip2Model(siglip2()))
    theirs.save_pretrained(tmp_path)
    spec, model, adapter = loaded(tmp_path, *NATIVE.split())
    assert_same_logits(model, theirs, spec)
    assert "new" not in adapter.note
    assert spec.settings["pos_embed_interp_mode"] == "bilinear"
    with pytest.raises(UsageError, match="drop --pos_embed_interp_mode bicubic"):
        loaded(tmp_path, *NATIVE.split(), "--pos_embed_interp_mode", "bicubic")
    # The images of the table's size do not show how it is resampled.
    _, other, _ = loaded(
        tmp_path,
        *NATIVE.split(),
        "--model",
        "timm/vit_base_patch32_siglip_256",
        *"--patch_size 8 --image_size 32 --embed_dim 96 --num_blocks 2 --num_heads 6".split(),
    )
    assert_same_logits(other, theirs, spec)


def test_transformers_loads_native_resolution(tmp_path):
    randomize(Siglip2Model(siglip2())).save_pretrained(tmp_path / "first")
    ours, spec, _ = configured(tmp_path / "first", *NATIVE.split())
    model = randomize(filled(spec), seed=5)
    run = as_run(ours, model, tmp_path / "run.safetensors")
    folder = converted(run, tmp_path / "there", "transformers")
    theirs, how = AutoModel.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert isinstance(theirs, Siglip2Model)
    assert not how["missing_keys"]
    assert not how["unexpected_keys"]
    assert_same_logits(model.eval(), theirs.eval(), spec)
    _, again, _ = loaded(folder, *NATIVE.split())
    states = again.state_dict(), model.state_dict()
    assert all(states[0][name].equal(values) for name, values in states[1].items())


@pytest.mark.parametrize(
    ("flags", "names", "text"),
    [
        ("--global_pool avg", "transformers", "its fc_norm is True, there False"),
        ("--pos_embed_interp_mode bicubic", "transformers", "bicubic', there 'bilinear'"),
        ("--image_size 32 64", "transformers", "positions are 4 x 8, there a square"),
        ("", "open_clip", "images may have any size (--native_resolution)"),
    ],
)
def test_what_native_resolution_cannot_be_written(flags, names, text, tmp_path, capsys):
    small = f"{NATIVE} --text_width 24 --text_heads 2 --text_depth 1 --text_vocab_size 90"
    small += " --model timm/vit_base_patch32_siglip_256 --embed_dim 36 --num_heads 2"
    small += " --num_blocks 1 --image_size 32 --patch_size 8"
    if "interp" not in flags:
        small += " --pos_embed_interp_mode bilinear"
    config, _, model = of_flags(*small.split(), *flags.split())
    run = as_run(config, model, tmp_path / "run.safetensors")
    words = [run, tmp_path / "there", "--to", "safetensors", "--names", names]
    assert convert.main([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


# -- open_clip -------------------------------------------------------------------------------------


def of_open_clip(theirs, trunk=None):
    """The weights of a model of transformers by open_clip's names; ``trunk``: those of its image
    tower by timm's names. Written from open_clip's modules."""
    values, found = dict(theirs.state_dict()), {}

    def block(here, there):
        for kind in ("weight", "bias"):
            parts = [values[f"{there}.self_attn.{which}_proj.{kind}"] for which in "qkv"]
            found[f"{here}.attn.in_proj_{kind}"] = torch.cat(parts)
            found[f"{here}.attn.out_proj.{kind}"] = values[f"{there}.self_attn.out_proj.{kind}"]
            for ours, own in (("ln_1", "layer_norm1"), ("ln_2", "layer_norm2")):
                found[f"{here}.{ours}.{kind}"] = values[f"{there}.{own}.{kind}"]
            for ours, own in (("c_fc", "fc1"), ("c_proj", "fc2")):
                found[f"{here}.mlp.{ours}.{kind}"] = values[f"{there}.mlp.{own}.{kind}"]

    start = "text." if trunk else ""
    text = "text_model"
    found[f"{start}token_embedding.weight"] = values[f"{text}.embeddings.token_embedding.weight"]
    positions = "embeddings.position_embedding.weight"
    found[f"{start}positional_embedding"] = values[f"{text}.{positions}"]
    for index in range(2):
        block(f"{start}transformer.resblocks.{index}", f"{text}.encoder.layers.{index}")
    for kind in ("weight", "bias"):
        found[f"{start}ln_final.{kind}"] = values[f"{text}.final_layer_norm.{kind}"]
    found["logit_scale"] = values["logit_scale"].reshape(())
    if trunk:
        found |= {f"visual.trunk.{name}": value for name, value in trunk.items()}
        found |= {f"text.text_projection.{k}": values[f"text_model.head.{k}"] for k in BOTH}
        found["logit_bias"] = values["logit_bias"].reshape(())
        return found
    image = "vision_model"
    found["visual.conv1.weight"] = values[f"{image}.embeddings.patch_embedding.weight"]
    found["visual.class_embedding"] = values[f"{image}.embeddings.class_embedding"]
    found["visual.positional_embedding"] = values[f"{image}.{positions}"]
    for index in range(2):
        block(f"visual.transformer.resblocks.{index}", f"{image}.encoder.layers.{index}")
    for kind in ("weight", "bias"):
        found[f"visual.ln_pre.{kind}"] = values[f"{image}.pre_layrnorm.{kind}"]
        found[f"visual.ln_post.{kind}"] = values[f"{image}.post_layernorm.{kind}"]
    found["visual.proj"] = values["visual_projection.weight"].T
    found["text_projection"] = values["text_projection.weight"].T
    return found


BOTH = ("weight", "bias")


def written(folder, tensors, model, **preprocessing):
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    about = {"model_cfg": model, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    return folder


def clip_of_open_clip(config):
    image, text = config.vision_config, config.text_config
    vision = {"image_size": image.image_size, "patch_size": image.patch_size, "layers": 2}
    vision |= {"width": image.hidden_size, "mlp_ratio": 4.0}
    vision |= {"head_width": image.hidden_size // image.num_attention_heads}
    texts = {"width": text.hidden_size, "heads": text.num_attention_heads, "layers": 2}
    texts |= {"vocab_size": text.vocab_size}
    quick = {"quick_gelu": True} if image.hidden_act == "quick_gelu" else {}
    return {"embed_dim": config.projection_dim, **quick, "vision_cfg": vision, "text_cfg": texts}


@pytest.mark.parametrize("name", ["clip B/16", "openclip H/14"])
def test_open_clips_clip(name, tmp_path):
    config = ARCHITECTURES[name]
    theirs = of_transformers(config)
    how = {"mean": [0.4] * 3, "std": [0.3] * 3, "resize_mode": "shortest"}
    written(tmp_path, of_open_clip(theirs), clip_of_open_clip(config), **how)
    spec, model, adapter = loaded(tmp_path, "--objective", "clip")
    images, tokens = drawn(spec)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, pixel_values=images).logits_per_image
    torch.testing.assert_close(logits(model, images, tokens), expected, rtol=1e-5, atol=1e-5)
    assert "mean 0.4 0.4 0.4, std 0.3 0.3 0.3, crop 1, bicubic" in adapter.note
    # The file itself, without its folder.
    spec, again, _ = loaded(tmp_path / "open_clip_model.safetensors", "--objective", "clip")
    assert torch.equal(logits(again, images, tokens), logits(model, images, tokens))


SIGLIP_OPEN_CLIP = {
    "embed_dim": 192,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        **{"image_size": 224, "timm_model_name": "vit_tiny_patch16_224"},
        **{"timm_pool": "token", "timm_proj": "none"},
    },
    "text_cfg": {
        **{"context_length": 12, "vocab_size": 90, "width": 48, "heads": 4, "layers": 2},
        **{"no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
        **{"norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"}},
    },
}


def test_there_and_back_in_open_clips_form(tmp_path, capsys):
    """timm's image tower, which open_clip names; written again: the same tensors and settings."""
    flags = "--model timm/vit_tiny_patch16_224 --objective siglip".split()
    flags += "--text_width 48 --text_heads 4 --text_depth 2 --text_vocab_size 90".split()
    config, spec, model = of_flags(*flags, "--text_length", "12")
    run = as_run(config, model, tmp_path / "run.safetensors")
    words = [str(run), str(tmp_path / "there"), "--to", "safetensors", "--names", "open_clip"]
    assert convert.main([*words, "--max_shard_size", "1GB"]) == 2
    assert "--names open_clip writes one file: drop --max_shard_size" in capsys.readouterr().err
    folder = converted(run, tmp_path / "there", "open_clip")
    about = json.loads((folder / "open_clip_config.json").read_text())
    expected = SIGLIP_OPEN_CLIP["text_cfg"] | {"mlp_ratio": 4.0}
    assert about["model_cfg"]["text_cfg"] == expected
    there = SIGLIP_OPEN_CLIP["vision_cfg"] | {"timm_model_pretrained": False}
    assert about["model_cfg"]["vision_cfg"] == there
    stored = load_file(folder / "open_clip_model.safetensors")
    assert stored["visual.trunk.blocks.11.attn.qkv.weight"].shape == (3 * 192, 192)
    assert stored["logit_bias"].shape == ()
    _, again, adapter = loaded(folder, "--objective", "siglip")
    images, tokens = drawn(spec)
    assert torch.equal(logits(again, images, tokens), logits(model, images, tokens))
    assert "new" not in adapter.note
    # The image tower alone, by timm's names.
    image = loaded_image(folder)
    torch.testing.assert_close(image(images), model(images))


def converted(source, target, names, *flags):
    words = [str(source), str(target), "--to", "safetensors", "--names", names, *flags]
    assert convert.main(words) == 0
    return target


def loaded_image(path):
    """timm's model of the image tower alone, for classification; its features."""
    _, spec, source = configured(path)
    adapter = adapt(source, spec)
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
    model.eval().reset_classifier(0)
    return model


# -- written for transformers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags"), [("siglip So400m/14", ()), ("clip L/14", ("--max_shard_size", "200KB"))]
)
def test_transformers_loads_what_is_written(name, flags, tmp_path):
    """The same logits from the program's own weights, by ``AutoModel``."""
    config = ARCHITECTURES[name]
    of_transformers(config).save_pretrained(tmp_path / "first")
    ours, spec, _ = configured(tmp_path / "first", *objective(config))
    model = randomize(filled(spec), seed=5)
    run = as_run(ours, model, tmp_path / "run.safetensors")
    folder = converted(run, tmp_path / "there", "transformers", *flags)
    assert (folder / "model.safetensors").exists() != bool(flags)
    theirs, how = AutoModel.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not how["missing_keys"]
    assert not how["unexpected_keys"]
    images, tokens = drawn(spec)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens, pixel_values=images).logits_per_image
    torch.testing.assert_close(logits(model, images, tokens), expected, rtol=1e-5, atol=1e-5)
    processor = AutoImageProcessor.from_pretrained(folder)
    size = spec.sizes.input_shape[1:]
    pixels = processor(Image.new("RGB", (90, 60), "red"), return_tensors="pt")["pixel_values"]
    assert pixels.shape[2:] == size


@pytest.mark.parametrize(
    ("flags", "names", "text"),
    [
        ("--model vit_tiny_patch16_224", "transformers", "its pre_norm is False, there True"),
        ("--text_pool mean", "transformers", "its --text_pool is 'mean', there 'last'"),
        ("--text_causal", "transformers", "its --text_causal is True, there False"),
        ("--projection_dim 24", "transformers", "its image_projection.weight has no place there"),
        ("--text_pool mean", "open_clip", "text_cfg.pool_type 'mean', which is not supported"),
        ("--image_size 32", "open_clip", "timm has no model of the settings of its image tower"),
    ],
)
def test_what_cannot_be_written(flags, names, text, tmp_path, capsys):
    small = "--objective siglip --text_width 24 --text_heads 2".split()
    small += "--text_depth 1 --text_vocab_size 90".split()
    if names == "open_clip":
        small += ["--model", "timm/vit_tiny_patch16_224"]
    else:
        small += "--model timm/vit_base_patch32_siglip_256 --embed_dim 36 --num_heads 2".split()
        small += "--num_blocks 1 --image_size 32".split()
    config, _, model = of_flags(*small, *flags.split())
    run = as_run(config, model, tmp_path / "run.safetensors")
    words = [run, tmp_path / "there", "--to", "safetensors", "--names", names]
    assert convert.main([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "there").exists()


def test_only_pairs_are_written(tmp_path, capsys):
    config, _, model = of_flags(*"--model vit_tiny_patch16_224 --num_blocks 1".split())
    run = as_run(config, model, tmp_path / "run.safetensors")
    for target, more, text in (
        ("there", ["--to", "safetensors"], "requires a checkpoint of --objective siglip or clip"),
        ("there.pt", [], "--names transformers requires a folder"),
    ):
        words = [str(run), str(tmp_path / target), "--names", "transformers", *more]
        assert convert.main(words) == 2
        assert text in capsys.readouterr().err
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "bare.safetensors")
    words = [tmp_path / "bare.safetensors", tmp_path / "there", "--to", "safetensors"]
    assert convert.main([*map(str, words), "--names", "open_clip"]) == 2
    assert "--names open_clip requires a checkpoint of a run" in capsys.readouterr().err


# -- what files say --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def siglip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    of_transformers(ARCHITECTURES["siglip B/16"]).save_pretrained(folder)
    return folder


def changed(folder, tmp_path, part=None, **values):
    """The folder with other values in its ``config.json``."""
    content = json.loads((folder / "config.json").read_text())
    (content[part] if part else content).update(values)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--text_norm_eps 1e-5",
            "has text_config.layer_norm_eps 1e-06: drop --text_norm_eps 1e-05",
        ),
        ("--text_act gelu", "has text_config.hidden_act 'gelu_tanh': drop --text_act gelu"),
        ("--text_pool argmax", "has model_type 'last': drop --text_pool argmax"),
        ("--text_causal", "has model_type False: drop --text_causal"),
        ("--text_depth 3", "has text_config.num_hidden_layers 2: drop --text_depth 3"),
        ("--text_model siglip_base", "drop --text_model siglip_base"),
        ("--objective clip", "has SigLIP's projection, of texts alone and with a bias"),
        ("--logit_scale_init 5", "has a learned logit_scale: drop --logit_scale_init"),
        (
            "--model timm/vit_base_patch16_siglip_224 --embed_dim 96 --num_heads 6",
            "has hidden_act 'gelu_tanh', but timm/vit_base_patch16_siglip_224 is built with",
        ),
    ],
)
def test_flags_that_say_otherwise(flags, text, siglip_folder):
    words = [] if "--objective" in flags else ["--objective", "siglip"]
    with pytest.raises(UsageError, match=re.escape(text)) as error:
        configured(siglip_folder, *words, *flags.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "values", "text"),
    [
        (None, {"model_type": "clipseg"}, "model_type 'clipseg', but of two towers only"),
        ("vision_config", {"hidden_act": "relu"}, "hidden_act 'relu', but only gelu_tanh, gelu"),
        ("vision_config", {"vision_use_head": False}, "vision_use_head False, which is not"),
        ("text_config", {"hidden_act": "relu"}, "text_config.hidden_act 'relu', which --text_act"),
        ("text_config", {"vocab_size": "many"}, "which --text_vocab_size does not accept"),
        ("text_config", {"hidden_size": 0}, "hidden_size 0, which is not a width"),
        ("text_config", {"num_hidden_layers": 10**9}, "which --text_depth does not accept"),
        (None, {"text_config": 3}, "text_config 3, which is not a JSON object"),
        (None, {"vision_config": [1]}, "vision_config [1], which is not a JSON object"),
        (None, {"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
    ],
)
def test_files_that_say_what_is_not_supported(part, values, text, siglip_folder, tmp_path):
    folder = changed(siglip_folder, tmp_path, part, **values)
    with pytest.raises(UsageError, match=re.escape(text)) as error:
        configured(folder, "--objective", "siglip")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "values", "text"),
    [
        ("text_cfg", {"hf_model_name": "roberta-base"}, "text_cfg.hf_model_name 'roberta-base'"),
        ("text_cfg", {"embed_cls": True}, "text_cfg.embed_cls True, which is not supported"),
        ("text_cfg", {"pool_type": "eos"}, "text_cfg.pool_type 'eos', which is not supported"),
        ("text_cfg", {"norm_kwargs": {"affine": 0}}, "text_cfg.norm_kwargs"),
        ("vision_cfg", {"layers": [3, 4, 6, 3]}, "vision_cfg.layers [3, 4, 6, 3]"),
        ("vision_cfg", {"attentional_pool": True}, "vision_cfg.attentional_pool True"),
        ("vision_cfg", {"timm_model_name": "resnet9"}, "'resnet9', which timm does not have"),
    ],
)
def test_what_open_clip_has_besides(part, values, text, tmp_path):
    config = ARCHITECTURES["clip B/32"]
    model = clip_of_open_clip(config)
    model[part] |= values
    tensors = {"visual.conv1.weight": torch.zeros(1), "token_embedding.weight": torch.zeros(1)}
    written(tmp_path, tensors, model)
    with pytest.raises(UsageError, match=re.escape(text)) as error:
        configured(tmp_path, "--objective", "clip")
    assert "\n" not in str(error.value)


def test_image_tower_alone(siglip_folder):
    """For classification the text tower is left out; features are transformers'."""
    model = loaded_image(siglip_folder)
    theirs = AutoModel.from_pretrained(siglip_folder, attn_implementation="eager").eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs.vision_model(images).pooler_output
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


def test_preprocessing_is_the_files(siglip_folder, tmp_path):
    folder = changed(siglip_folder, tmp_path)
    processor = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.1, 0.2, 0.3]}
    processor |= {"size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config, _, _ = configured(folder, "--objective", "siglip")
    data = config.data
    assert (data.mean, data.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    assert (data.crop_mode, data.interpolation) == ("squash", "bicubic")


def test_what_a_run_says(tmp_path):
    """Its text tower is taken over by --init_from, too."""
    flags = ["--objective", "siglip", *IMAGE, *"--text_depth 1 --text_width 24".split()]
    flags += "--text_heads 2 --text_vocab_size 90 --text_norm_eps 1e-3 --text_pool mean".split()
    config, spec, model = of_flags(*flags)
    run = as_run(config, model, tmp_path / "run.safetensors")
    found, again, _ = loaded(run, "--objective", "siglip")
    assert found.config.text == spec.config.text
    images, tokens = drawn(spec)
    assert torch.equal(logits(again, images, tokens), logits(model, images, tokens))
    with pytest.raises(UsageError, match="has --text_pool 'mean': drop --text_pool last"):
        configured(run, "--objective", "siglip", "--text_pool", "last")
    with pytest.raises(UsageError, match="use --objective siglip"):
        configured(run, "--objective", "clip")


def test_clips_weights_with_siglips_loss(tmp_path):
    """They get a bias of the loss, and one of the texts' projection, of zeros."""
    of_transformers(ARCHITECTURES["clip B/16"]).save_pretrained(tmp_path)
    spec, model, adapter = loaded(tmp_path, "--objective", "siglip", "--logit_bias_init", "-3")
    _, plain, _ = loaded(tmp_path, "--objective", "clip")
    images, tokens = drawn(spec)
    torch.testing.assert_close(
        logits(model, images, tokens), logits(plain, images, tokens) - 3, rtol=1e-5, atol=1e-5
    )
    assert "new: logit_bias, text_projection.bias" in adapter.note


# -- the text tower from elsewhere -----------------------------------------------------------------

IMAGE = "--model vit_tiny_patch16_224 --image_size 32 --num_blocks 2".split()


def initialized(config, spec):
    """The model as before a training from scratch."""
    parts = [part for each in config.active_features for part in each.part_weights(run_of(config))]
    adapter = with_parts(None, spec, parts, seed=config.seed)
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
    return model.eval(), adapter


def run_of(config):
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("flags", "has_projection"),
    [("--embed_dim 96 --num_heads 2", True), ("--lock_text", False)],
)
def test_text_tower_alone(flags, has_projection, siglip_folder):
    """Beside an image tower with random weights; its projection is new if it does not fit."""
    words = ["--objective", "siglip", "--init_text_from", str(siglip_folder), *IMAGE]
    config, spec, _ = of_flags(*words, *flags.split())
    model, adapter = initialized(config, spec)
    theirs = AutoModel.from_pretrained(siglip_folder, attn_implementation="eager").eval()
    _, tokens = drawn(spec)
    with torch.no_grad():
        expected = theirs.text_model(input_ids=tokens)
        pooled = model.pooled_text(tokens.int())
        projected = model.text_projection(pooled)
    last = expected.last_hidden_state[:, -1]
    torch.testing.assert_close(pooled, last, rtol=1e-5, atol=1e-5)
    if has_projection:
        torch.testing.assert_close(projected, expected.pooler_output, rtol=1e-5, atol=1e-5)
    assert ("new: text_projection.bias" in adapter.note) != has_projection
    fresh = filled(spec, seed=config.seed).state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith("text_"):
            assert torch.equal(value, fresh[name]), name


def test_both_towers_from_different_weights(siglip_folder, tmp_path):
    """Also where the first has a text tower of other sizes."""
    of_transformers(ARCHITECTURES["clip B/16"]).save_pretrained(tmp_path)
    words = ["--objective", "siglip", "--init_text_from", siglip_folder]
    config, spec, source = configured(tmp_path, *words)
    (part,) = ImageText().part_weights(run_of(config))
    without = part.prefixes + part.where_fitting
    adapter = with_parts(adapt(source, spec, without=without), spec, [part])
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
    siglip = AutoModel.from_pretrained(siglip_folder, attn_implementation="eager").eval()
    clip = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    images, tokens = drawn(spec)
    with torch.no_grad():
        last = siglip.text_model(input_ids=tokens).last_hidden_state[:, -1]
        found = model.eval().pooled_text(tokens.int())
        torch.testing.assert_close(found, last, rtol=1e-5, atol=1e-5)
        pooled = clip.vision_model(pixel_values=images).pooler_output
        torch.testing.assert_close(model(images), pooled, rtol=1e-5, atol=1e-5)


def test_text_tower_of_a_run(tmp_path):
    flags = ["--objective", "clip", *IMAGE, *"--text_depth 1 --text_width 24".split()]
    flags += "--text_heads 2 --text_vocab_size 90".split()
    config, _, model = of_flags(*flags)
    run = as_run(config, model, tmp_path / "run.safetensors")
    config, spec, _ = of_flags("--objective", "clip", "--init_text_from", str(run), *IMAGE)
    again, _ = initialized(config, spec)
    assert torch.equal(again.text_blocks[0].mlp.fc1.weight, model.text_blocks[0].mlp.fc1.weight)
    assert torch.equal(again.text_projection.weight, model.text_projection.weight)


def test_text_towers_that_are_refused(siglip_folder, tmp_path):
    save_file({"blocks.0.norm1.weight": torch.ones(2)}, tmp_path / "image.safetensors")
    of_images = as_run(*of_flags(*IMAGE)[::2], tmp_path / "classifier.safetensors")
    words = ["--objective", "siglip", *IMAGE, "--init_text_from"]
    with pytest.raises(UsageError, match="it was trained without texts"):
        of_flags(*words, str(of_images))
    with pytest.raises(UsageError, match="num_hidden_layers 2: drop --text_depth 3"):
        of_flags(*words, str(siglip_folder), "--text_depth", "3")
    with pytest.raises(UsageError, match=r"--init_text_from .*no such checkpoint"):
        of_flags(*words, str(tmp_path / "nothing"))
    config, spec, _ = of_flags(*words, str(tmp_path / "image.safetensors"))
    with pytest.raises(UsageError, match="has no text_pos_embed, which the model has"):
        initialized(config, spec)
