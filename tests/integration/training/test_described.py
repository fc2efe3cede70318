"""What files next to public weights say of them, against timm's and transformers' own outputs."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import run_vit_training
from tests.support.cli import DIGITS, TINY_SIZES
from tests.support.usage_error import told_in_one_line
from tools.convert import main as convert
from training.config import RunConfig
from training.errors import UsageError
from training.evaluation.trained import find_trained
from training.flags import with_values
from training.resolve import model_of, resolve_model
from training.weights.adapt import adapt
from training.weights.config_json import described_model
from training.weights.describe import describe
from training.weights.find import find
from training.weights.processor import processing_of
from training.weights.sidecar import Sidecar

NAME = "vit_tiny_patch16_224"
HOW = {"mean": [0.4] * 3, "std": [0.3] * 3, "crop_pct": 1.0, "interpolation": "bilinear"}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A picture with edges and gradients, no square."""
    y, x = np.mgrid[:60, :80]
    colors = [np.sin(x / 5) * 90 + 120, (x * y / 9) % 255, (x // 9 + y // 7) % 2 * 200]
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    Image.fromarray(np.stack(colors, axis=-1).astype(np.uint8)).save(path)
    return path


def filled(model):
    """The model with weights that let settings matter."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean="norm" in name, std=0.03 if "head." in name else 0.3)
    return model.eval()


def write(folder, model, config, **files):
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def timms(folder, arguments=(), name=NAME, **more):
    """A model of timm's with these arguments, and its folder."""
    given = {**TINY_SIZES, **dict(arguments)}
    model = filled(timm.create_model(name, num_classes=5, **given))
    config = {"architecture": name, "num_classes": 5, "model_args": given, "pretrained_cfg": HOW}
    return model, write(folder, model, config | more)


def predicted(capsys, image, folder, *flags):
    """The probabilities of all five classes."""
    capsys.readouterr()
    words = ["--predict", image, "--resume", folder, "--json", *flags]
    assert run_vit_training.main(list(map(str, words))) == 0, capsys.readouterr().err
    (found,) = json.loads(capsys.readouterr().out)
    by_label = {top["index"]: top["probability"] for top in found["top5"]}
    return torch.tensor([by_label[label] for label in range(5)])


def refused(folder, *flags):
    """The line with which the weights are refused, before any image is read."""
    words = ["--predict", "none.png", "--resume", folder, *flags]
    config = run_vit_training.read_flags([*map(str, words)]).run
    with pytest.raises(UsageError) as error:
        _ = describe(find_trained(config)[1]).class_names
    return str(error.value)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A folder of timm's, whose ``config.json`` a test replaces."""
    return timms(tmp_path_factory.mktemp("timm"))[1]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A folder of transformers, whose files a test replaces."""
    folder = tmp_path_factory.mktemp("transformers")
    of_transformers(folder, PROCESSORS["as it is"])
    return folder


@pytest.fixture
def changed():
    """Write a file anew for a test."""
    before = {}

    def change(path, content):
        before.setdefault(path, path.read_bytes())
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    yield change
    for path, content in before.items():
        path.write_bytes(content)


# -- timm ------------------------------------------------------------------------------------------

APPLIED = [
    {"class_token": False, "global_pool": "avg"},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "avg", "pool_include_prefix": True},
    {"global_pool": "map"},
    {"reg_tokens": 2, "no_embed_class": True},
    {"qk_norm": True, "init_values": 0.1, "pre_norm": True},
    {"final_norm": False, "qkv_bias": False, "pos_embed": "none"},
    {"scale_attn_norm": True, "scale_mlp_norm": True, "proj_bias": False},
    {"img_size": [16, 24], "mlp_ratio": 2, "num_heads": 4},
    {"act_layer": "gelu", "norm_layer": "layernorm", "drop_path_rate": 0.1, "drop_rate": 0.2},
    {"dynamic_img_size": True, "weight_init": "jax", "qk_norm": None},
]


@pytest.mark.parametrize("arguments", APPLIED, ids=lambda each: next(iter(each)))
def test_model_args_are_applied_as_by_timm(arguments, tmp_path, capsys, image):
    model, folder = timms(tmp_path / "there", arguments)
    size = arguments.get("img_size", 16)
    size = (size, size) if isinstance(size, int) else tuple(size)
    transform = timm.data.create_transform((3, *size), **HOW)
    with torch.inference_mode():
        expected = model(transform(Image.open(image).convert("RGB"))[None]).softmax(-1)[0]
    assert expected.max() < 0.999  # classes whose probabilities tell models apart
    torch.testing.assert_close(predicted(capsys, image, folder), expected, atol=2e-5, rtol=1e-4)


def test_what_timm_itself_saves(tmp_path, capsys, image):
    """An Eva, by its own names of arguments, whose rotary positions have no shape."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    more = {"num_reg_tokens": 2, "rope_temperature": 50.0, "ref_feat_shape": (7, 7)}
    name = "vit_small_patch16_rope_224"
    model = filled(timm.create_model(name, num_classes=5, **sizes))
    timm.models.save_for_hf(model, tmp_path / "eva", safe_serialization=True, data_config=HOW)
    transform = timm.data.create_transform((3, 32, 32), **HOW)
    with torch.inference_mode():
        expected = model(transform(Image.open(image).convert("RGB"))[None]).softmax(-1)[0]
    torch.testing.assert_close(
        predicted(capsys, image, tmp_path / "eva"), expected, atol=2e-5, rtol=1e-4
    )

    path = tmp_path / "eva" / "config.json"
    config = json.loads(path.read_text())
    for key, value in more.items():
        changed = config | {"model_args": config["model_args"] | {key: value}}
        path.write_text(json.dumps(changed))
        told = refused(tmp_path / "eva")
        if key == "num_reg_tokens":  # it is built with them, and the weights have none
            assert "has no reg_token, which the model has" in told
        else:
            assert f"{path} has model_args.{key} " in told
            assert "is built with" in told


def test_the_input_size_is_the_models(tmp_path, capsys, image):
    """Without model_args, timm builds what ``pretrained_cfg`` says."""
    given = {key: value for key, value in TINY_SIZES.items() if key != "img_size"}
    model = filled(timm.create_model(NAME, num_classes=5, img_size=32, **given))
    trained = HOW | {"input_size": [3, 32, 32], "fixed_input_size": True, "num_classes": 5}
    config = {"architecture": NAME, "model_args": given, "pretrained_cfg": trained}
    folder = write(tmp_path / "there", model, config)
    transform = timm.data.create_transform((3, 32, 32), **HOW)
    with torch.inference_mode():
        expected = model(transform(Image.open(image).convert("RGB"))[None]).softmax(-1)[0]
    torch.testing.assert_close(predicted(capsys, image, folder), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"act_layer": "relu"}, "model_args.act_layer 'relu', but timm/vit_tiny_patch16_224 is"),
        ({"act_layer": "nonsense"}, "model_args.act_layer 'nonsense', but timm/vit_tiny_patch"),
        ({"act_layer": 5}, "model_args.act_layer 5, but"),
        ({"norm_layer": "rmsnorm"}, "model_args.norm_layer 'rmsnorm', but"),
        ({"mlp_layer": "swiglu"}, "model_args.mlp_layer 'swiglu', but"),
        ({"use_naflex": True}, "model_args.use_naflex True, which timm/vit_tiny_patch16_224 does"),
        ({"nonsense": 1}, "model_args.nonsense 1, which timm/vit_tiny_patch16_224 does not have"),
        (
            {"img_size": "big"},
            "model_args.img_size 'big', which --image_size does not accept (",
        ),
        (
            {"depth": True},
            "model_args.depth True, which --num_blocks does not accept (it",
        ),
        ({"depth": 10**6}, "model_args.depth 1000000, which --num_blocks does not accept ("),
        (
            {"num_heads": 2.5},
            "model_args.num_heads 2.5, which --num_heads does not accept (",
        ),
        (
            {"global_pool": "median"},
            "model_args.global_pool 'median', but timm/vit_tiny_patch",
        ),
        (
            {"qk_norm": "yes"},
            "model_args.qk_norm 'yes', which --qk_norm does not accept (it",
        ),
        (
            {"patch_size": [4, 2]},
            "model_args.patch_size [4, 2], which --patch_size does not accept (",
        ),
        ({"num_heads": 3}, "--embed_dim 32 is not a multiple of --num_heads 3"),
        ({"num_classes": "ten"}, "has model_args.num_classes 'ten', which is not a number of"),
    ],
    ids=lambda each: "_".join(map(str, each)) if isinstance(each, dict) else "",
)
def test_model_args_that_no_flag_sets(arguments, told, vit, changed):
    path = vit / "config.json"
    config = json.loads(path.read_text())
    changed(path, config | {"model_args": {**TINY_SIZES, **arguments}})
    line = refused(vit)
    assert line.startswith(str(path))
    assert told in line


def test_refused_by_the_command_line(vit, changed, capsys):
    path = vit / "config.json"
    config = json.loads(path.read_text())
    changed(path, config | {"model_args": {**TINY_SIZES, "act_layer": "relu"}})
    line = told_in_one_line(capsys, "--predict", "none.png", "--resume", vit)
    assert line == (
        f"{path} has model_args.act_layer 'relu', but timm/{NAME} is built with timm's default: "
        "use --model with a model that has it"
    )


def test_flags_override_the_file_and_a_named_model_is_compared(tmp_path, capsys, image):
    given = [f"--{key}={value}" for key, value in TINY_SIZES.items()]
    named = ["--model", NAME, *given, "--num_classes", "5"]
    _, plain = timms(tmp_path / "plain")
    expected = predicted(capsys, image, plain)
    assert torch.equal(predicted(capsys, image, plain, *named), expected)
    _, relu = timms(tmp_path / "relu", {"act_layer": "relu"})
    told = "has model_args.act_layer 'relu', but vit_tiny_patch16_224 is built with timm's default"
    assert told in refused(relu, *named)
    _, heads = timms(tmp_path / "heads", {"num_heads": 4})  # shapes do not show them
    assert torch.equal(predicted(capsys, image, heads, *named), expected)  # a flag says otherwise
    _, heads = timms(tmp_path / "default", {"embed_dim": 48, "num_heads": 4})
    without = [word for word in named if "num_heads" not in word]
    told = refused(heads, *without, "--embed_dim=48")
    assert f"model_args.num_heads 4, but {NAME} is built with 3: set --num_heads" in told
    other = "vit_base_patch16_clip_quickgelu_224"  # its norms follow from its name
    path = plain / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architecture": other}))
    assert "whose norm_layer is 'LayerNorm(eps=1e-05)', but vit_tiny" in refused(plain, *named)


def test_weights_of_a_named_model_that_fit_as_they_are():
    """Presets, timm's names and native resolution: a file that describes the same model, or one of
    other sizes, whose shapes are compared later, is no reason to refuse."""
    for name, named, more in (
        (NAME, NAME, {}),
        (NAME, f"timm/{NAME}", {"img_size": 112}),
        (NAME, NAME, {"native_resolution": True}),
        ("vit_base_patch16_clip_quickgelu_224", "vit_tiny_patch16_224", {}),
        ("eva02_tiny_patch14_224", "timm/eva02_tiny_patch14_224", {}),
        ("naflexvit_base_patch16_gap", "timm/naflexvit_base_patch16_gap", {}),
        ("resnet18", NAME, {}),
        ("not timm's", NAME, {}),
    ):
        about = Sidecar(Path("config.json"), {"architecture": name})
        if found := described_model(about, Sidecar(Path("none"), {}), is_named=True):
            config = with_values(RunConfig(), {"model": named, **more})
            found.check_named(model_of(config), more, keeps_head=True)


def test_weights_of_teachers_are_compared_too(tmp_path, capsys):
    config = {"architecture": NAME, "model_args": {"act_layer": "relu"}}
    folder = write(tmp_path / "there", timm.create_model(NAME, num_classes=5), config)
    words = f"--model {NAME} --teacher {NAME} --distillation_type soft --teacher_weights {folder}"
    told = told_in_one_line(capsys, *words.split(), "--data_source", "fake", "--num_classes", "5")
    assert "model_args.act_layer 'relu', but vit_tiny_patch16_224 is built" in told


# -- transformers ----------------------------------------------------------------------------------

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
VIT |= {"intermediate_size": 128, "patch_size": 4, "id2label": {n: f"digit {n}" for n in range(5)}}


def of_transformers(folder, processor=None, **more):
    """A ViT of transformers, saved by itself with its image processor."""
    config = transformers.ViTConfig(**VIT | more)
    model = filled(transformers.ViTForImageClassification(config))
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return model


SIZE = {"height": 16, "width": 16}
PROCESSORS = {
    "as it is": ViTImageProcessorPil(size=SIZE),
    "no normalization": ViTImageProcessorPil(size=SIZE, do_normalize=False),
    "neither": ViTImageProcessorPil(size=SIZE, do_normalize=False, do_rescale=False),
    "another factor": ViTImageProcessorPil(size=SIZE, rescale_factor=1 / 127.5),
    "of bytes": ViTImageProcessorPil(
        size=SIZE, do_rescale=False, image_mean=[90.0, 100.0, 110.0], image_std=[60.0] * 3
    ),
    "nearest": ViTImageProcessorPil(size=SIZE, resample=0),
    "crops a square": DeiTImageProcessorPil(
        size={"height": 20, "width": 20}, crop_size={"height": 16, "width": 16}
    ),
    "crops the shorter side": BitImageProcessorPil(
        size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}
    ),
}


CONFIGURATIONS = [{"qkv_bias": False}, {"hidden_act": "gelu_python"}, {"hidden_dropout_prob": 0.5}]


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in PROCESSORS), *(("as it is", more) for more in CONFIGURATIONS)],
    ids=str,
)
def test_models_and_image_processors(name, more, tmp_path, capsys, image):
    processor = PROCESSORS[name]
    model = of_transformers(tmp_path / "there", processor, **more)
    pixels = processor(Image.open(image).convert("RGB"), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        expected = model(pixels).logits.softmax(-1)[0]
    found = predicted(capsys, image, tmp_path / "there")
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config", {"hidden_act": "relu"}, "hidden_act 'relu', but vit_base_patch16_224 is built"),
        ("config", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_tanh', but"),
        ("config", {"hidden_act": ["gelu"]}, "hidden_act ['gelu'], but"),
        ("config", {"layer_norm_eps": 1e-3}, "layer_norm_eps 0.001, but"),
        ("config", {"layer_norm_eps": "small"}, "layer_norm_eps 'small', but"),
        ("config", {"head_dim": 8}, "head_dim 8, but"),
        ("config", {"problem_type": "multi_label_classification"}, "problem_type 'multi_label_"),
        ("config", {"quantization_config": {"bits": 8}}, "quantization_config {'bits': 8}, which"),
        ("config", {"intermediate_size": "wide"}, "intermediate_size 'wide', which is not a"),
        ("config", {"id2label": ["a", "b"]}, "id2label ['a', 'b'], which is not a JSON object"),
        ("config", {"id2label": {str(n): n for n in range(5)}}, "id2label 0 for class 0, which"),
        ("config", {"id2label": {"7": "seven"}}, "id2label None for class 0, which is not a name"),
        ("config", {"model_type": "swin"}, "model_type 'swin', but only vit and dinov2 are known"),
        ("config", {"model_type": 5}, "model_type 5, but only vit and dinov2 are known"),
        ("config", {"model_type": "dinov2", "use_swiglu_ffn": True}, "use_swiglu_ffn True, which"),
        ("processor", {"do_resize": False}, "do_resize False, which is not supported: remove"),
        ("processor", {"resample": "bicubic"}, "resample 'bicubic', which is not supported"),
        ("processor", {"resample": 17}, "resample 17, which is not supported"),
        ("processor", {"rescale_factor": 0}, "rescale_factor 0, which is not supported"),
        ("processor", {"rescale_factor": "1/255"}, "rescale_factor '1/255', which is not"),
        ("processor", {"do_normalize": "no"}, "do_normalize 'no', which is not supported"),
        ("processor", {"image_mean": [0.5]}, "image_mean [0.5], which is not supported"),
        ("processor", {"image_std": [0.5, "a", 1]}, "image_std [0.5, 'a', 1], which is not"),
        ("processor", {"size": {"shortest_edge": 16}}, "size {'shortest_edge': 16}, which is"),
        ("processor", {"size": {"longest_edge": 16}}, "size {'longest_edge': 16}, which is not"),
        ("processor", {"size": None}, "size None, which is not supported"),
        ("processor", {"size": 32}, "has an image size of [32, 32], but vit_base_patch16_224 is"),
        ("processor", {"do_center_crop": True}, "crop_size None, which is not supported"),
        ("processor", {"do_flip_channel_order": True}, "do_flip_channel_order True, which is not"),
        ("processor", {"image_processor_type": "SamImageProcessor"}, "image_processor_type 'Sam"),
    ],
    ids=lambda each: "_".join(map(str, each)) if isinstance(each, dict) else "",
)
def test_what_transformers_would_do_otherwise(file, change, told, hugging_face, changed):
    name = {"config": "config.json", "processor": "preprocessor_config.json"}[file]
    path = hugging_face / name
    changed(path, json.loads(path.read_text()) | change)
    line = refused(hugging_face)
    assert line.startswith(str(path))
    assert told in line


def test_values_that_a_processor_leaves_out_are_those_of_its_class():
    for name, kind in (("ViT", "vit"), ("DeiT", "deit"), ("Bit", "bit"), ("CLIP", "clip")):
        processor = getattr(transformers, f"{name}ImageProcessor")()
        written = json.loads(processor.to_json_string())
        complete = processing_of(Sidecar(Path(kind), written), "ViT")
        short = {"image_processor_type": written["image_processor_type"]}
        assert processing_of(Sidecar(Path(kind), short), "ViT") == complete


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dinov2_with_the_images_of_its_processor(tmp_path):
    """Its processor makes smaller images than the model was trained with, as in the public ones:
    positions are resampled as transformers does."""
    sizes = {key: VIT[key] for key in VIT if key not in ("intermediate_size", "image_size")}
    config = transformers.Dinov2Config(image_size=28, **sizes)
    model = filled(transformers.Dinov2Model(config))
    model.save_pretrained(tmp_path / "there")
    crop = {"height": 16, "width": 16}
    BitImageProcessorPil(size={"shortest_edge": 20}, crop_size=crop).save_pretrained(
        tmp_path / "there"
    )
    words = f"--eval_only --knn --num_classes 5 --data_dir {DIGITS} --init_from"
    flags = run_vit_training.read_flags([*words.split(), str(tmp_path / "there")])
    config, found = find_trained(flags.run)
    assert config.model.img_size == 16
    assert str(config.data.preprocessing).endswith("crop 0.8, bicubic")
    config, spec = resolve_model(config)
    ours = spec.build()
    initial = adapt(found, spec)
    for name, unit in spec.units(ours):
        initial.initialize(unit, name)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        expected = model(pixels).last_hidden_state
        torch.testing.assert_close(
            ours.eval().forward_features(pixels), expected, atol=1e-4, rtol=1e-4
        )


# -- files that cannot be read ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no JSON", "which describes the weights, cannot be read (Expecting value: line 1"),
        (b"", "which describes the weights, cannot be read (Expecting value: line 1"),
        (b"[1]", "which describes the weights, cannot be read (it is not a JSON object)"),
        (b"\xff\xfe\xff", "which describes the weights, cannot be read ("),
        (b'{"a":' * 200_000, "which describes the weights, cannot be read (it is nested too deep"),
        (b'{"architecture": "vit_9b"}', "has architecture 'vit_9b', which timm does not have: na"),
        (b'{"architecture": ["vit"]}', "has architecture ['vit'], which timm does not have"),
        (b'{"architecture": "resnet18"}', "timm/resnet18 is not a supported Vision Transformer"),
        (b'{"architecture": "vit_tiny_patch16_224", "model_args": [1]}', "has model_args [1], whi"),
        (b'{"pretrained_cfg": "x"}', "has pretrained_cfg 'x', which is not a JSON object"),
        (b'{"architecture": "vit_tiny_patch16_224", "input_size": 3}', "has input_size 3, which"),
    ],
    ids=lambda each: each[:20] if isinstance(each, bytes) else "",
)
def test_a_damaged_config_is_named(content, told, vit, changed):
    path = vit / "config.json"
    changed(path, content)
    line = refused(vit)
    assert told in line
    assert line.startswith(str(path))
    assert "vit_10b" not in line


@pytest.mark.parametrize("key", ["label_names", "num_classes"])
@pytest.mark.parametrize("value", [[1, 2], "ten", True, -1, 2.5, {"0": 5}, [["a"]]])
def test_class_names_and_counts_of_other_types(key, value, vit, changed):
    path = vit / "config.json"
    config = json.loads(path.read_text())
    changed(path, config | {key: value})
    assert refused(vit).startswith(f"{path} has {key} ")
    trained = config["pretrained_cfg"] | {key: value}  # the same as older files have it
    config = {name: each for name, each in config.items() if name != key}
    changed(path, config | {"pretrained_cfg": trained})
    assert refused(vit).startswith(f"{path} has pretrained_cfg.{key} ")


def test_a_byte_order_mark_and_names_by_label(tmp_path, capsys, image):
    names = {str(label): f"digit {label}" for label in range(5)}
    folder = timms(tmp_path / "there", label_names=names)[1]
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    words = ["--predict", str(image), "--resume", str(folder), "--json"]
    assert run_vit_training.main(words) == 0
    for top in json.loads(capsys.readouterr().out)[0]["top5"]:
        assert top["class"] == names[str(top["index"])]


# -- .safetensors files: shards and metadata -------------------------------------------------------


def sharded(folder):
    """A folder of two shards, with their index."""
    model, folder = timms(folder)
    assert (
        convert(
            [
                str(folder),
                str(folder.parent / "shards"),
                "--to",
                "safetensors",
                "--max_shard_size",
                "40KB",
            ]
        )
        == 0
    )
    return model, folder.parent / "shards"


def test_a_shard_is_missing(tmp_path, capsys, image):
    _, folder = sharded(tmp_path / "whole")
    expected = predicted(capsys, image, tmp_path / "whole")
    assert torch.equal(predicted(capsys, image, folder), expected)
    last = max(folder.glob("model-*.safetensors"))
    last.unlink()
    line = refused(folder)
    assert f"model.safetensors.index.json lists {last.name}, which the folder does not have" in line
    (folder / "model.safetensors").write_bytes(
        (tmp_path / "whole" / "model.safetensors").read_bytes()
    )
    assert torch.equal(predicted(capsys, image, folder), expected)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no JSON", "Expecting value"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {"a": 5}}', "lists 5, which is not a file in its folder"),
        (b'{"weight_map": {"a": "../b.safetensors"}}', "which is not a file in its folder"),
        (b'{"weight_map": {"a": "\\u001b[31mb"}}', r"lists \x1b[31mb, which the folder does not"),
    ],
    ids=lambda each: each[:24] if isinstance(each, bytes) else "",
)
def test_a_damaged_index(content, told, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert told in refused(tmp_path, "--model", NAME)


AT = '"step": 0, "epoch": 0, "images_in_epoch": 0'


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"pretrained_cfg": "no JSON"}, "pretrained_cfg in its metadata cannot be read (Expecting"),
        ({"pretrained_cfg": "[1]"}, "pretrained_cfg in its metadata cannot be read (it is not a"),
        ({"training": f'{{"arguments": [1], {AT}}}'}, "its training.arguments is damaged"),
        (
            {"training": f'{{"arguments": {{}}, "classes": [1], {AT}}}'},
            "its training.classes is damaged",
        ),
        ({"training": '{"arguments": {}, "step": "x"}'}, "has no position of whole numbers"),
    ],
    ids=lambda each: str(each)[:40] if isinstance(each, dict) else "",
)
def test_damaged_metadata(metadata, told, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", metadata)
    assert told in refused(tmp_path, "--model", NAME)


def test_metadata_of_another_program_is_passed_over(tmp_path):
    path = tmp_path / "model.safetensors"
    for entry in ("yes", "[1]", '{"a":' * 200_000, '{"epochs": 3}'):
        save_file({"a": torch.ones(1)}, path, {"training": entry})
        assert find(path, "--resume").run is None


def test_escape_sequences_in_names_are_shown(tmp_path, capsys):
    """A terminal would obey them: they could rewrite what was printed before."""
    name = "blocks.0.\x1b[2J\x1b]0;owned\x07\r\n\u202egniht"
    tensors = {**timm.create_model(NAME, **TINY_SIZES).state_dict(), name: torch.zeros(2)}
    save_file(tensors, tmp_path / "odd.safetensors")
    flags = ["--model", NAME, *(f"--{key}={value}" for key, value in TINY_SIZES.items())]
    line = told_in_one_line(
        capsys, "--predict", "none.png", "--resume", tmp_path / "odd.safetensors", *flags
    )
    assert line.isprintable()
    assert r"\x1b[2J\x1b]0;owned\x07\r\n\u202egniht" in line
    beside = {
        "x.blocks.0.norm1.weight": torch.ones(2),
        name.removeprefix("blocks.0."): torch.ones(2),
    }
    save_file(beside, tmp_path / "more.safetensors")
    assert convert([str(tmp_path / "more.safetensors"), str(tmp_path / "out.pt")]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert r"left out: \x1b[2J\x1b]0;owned" in told
    assert told.isprintable()
    bad = tmp_path / "\x1b[31mnone.safetensors"
    assert convert([str(bad), str(tmp_path / "out2.pt")]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert r"\x1b[31mnone" in told
    assert told.isprintable()
