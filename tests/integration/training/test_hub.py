"""Weights by their names on the Hugging Face Hub, which is a server of this machine."""

import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save
from torch import nn

import run_vit_training
from data.hub import _SETTINGS
from tests.fakes.hub_server import TOKEN, HubServer, Repository
from tests.support.cli import DIGITS, TINY_SIZES, run_program
from tests.support.launching import free_port
from tests.support.usage_error import told_in_one_line
from tools.convert import main as convert
from training.checkpoints.format import SavedRun
from training.errors import UsageError
from training.evaluation import predict
from training.flags import with_values
from training.resolve import model_of
from training.schedule import Position
from training.weights import hub
from training.weights.describe import describe
from training.weights.find import commits, find, pretrained

TRAIN = [
    *f"--data_dir {DIGITS} --hflip 0 --batch_size 16 --num_workers 0 --max_steps 2".split(),
    *"--num_classes 10 --warmup_steps 1 --log_step_interval 1 --eval_batches 1".split(),
]
NAME = "hf-hub:us/tiny"


def timms_files(**more):
    """A model of timm's, and what timm writes of it for the Hub."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY_SIZES)
    nn.init.normal_(model.head.weight, std=0.5)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 10,
        "model_args": TINY_SIZES,
        "pretrained_cfg": {
            "mean": [0.4] * 3,
            "std": [0.3] * 3,
            "crop_pct": 1.0,
            "interpolation": "bilinear",
        },
        **more,
    }
    files = {"config.json": json.dumps(config).encode(), "README.md": b"a model"}
    return model, {**files, "model.safetensors": save(model.state_dict(), {"format": "pt"})}


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub_here(server, tmp_path, monkeypatch):
    """The Hub of this process."""
    constants, cache = huggingface_hub.constants, tmp_path / "cache"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _template(server.url))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return cache


def _template(url):
    return url + "/{repo_id}/resolve/{revision}/{filename}"


def put(server, name, files, **kind):
    repository = server.repositories.setdefault(name, Repository(**kind))
    return repository.commit(files)


# -- what is downloaded ----------------------------------------------------------------------------


def test_predicts_as_timm_with_its_names(server, hub_here, capsys):
    """Model, preprocessing and class names are those of config.json; the logits timm's own."""
    names = [f"digit {label}" for label in range(10)]
    model, files = timms_files(label_names=names)
    commit = put(server, "us/tiny", files)
    images = sorted((DIGITS / "val" / "3").glob("*.png"))[:3]
    words = ["--predict", *map(str, images), "--resume", NAME, "--json"]
    assert run_vit_training.main(words) == 0
    printed = capsys.readouterr()
    predicted = json.loads(printed.out)

    how = {"mean": (0.4,) * 3, "std": (0.3,) * 3, "crop_pct": 1, "interpolation": "bilinear"}
    transform = timm.data.create_transform((3, 16, 16), **how)
    batch = torch.stack([transform(Image.open(path).convert("RGB")) for path in images])
    with torch.inference_mode():
        wanted = model.eval()(batch).softmax(-1)
    for row, probabilities in zip(predicted, wanted, strict=True):
        for top in row["top5"]:
            assert top["class"] == names[top["index"]]
            assert top["probability"] == pytest.approx(probabilities[top["index"]].item(), abs=1e-4)
    snapshot = hub_here / "models--us--tiny" / "snapshots" / commit
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]


def test_of_open_clip(server, hub_here):
    """The file of weights has another name, and another file describes them."""
    about = {"model_cfg": {"embed_dim": 4}}
    names = ("visual.conv1.weight", "token_embedding.weight")
    weights = save({name: torch.zeros(1) for name in names})
    files = {"open_clip_model.safetensors": weights, "open_clip_pytorch_model.bin": b"code"}
    files["open_clip_config.json"] = json.dumps(about).encode()
    commit = put(server, "us/tiny", files)
    found = find(NAME, "--init_from")
    assert found.name == f"{NAME}@{commit}"
    assert describe(found).config.content == about
    assert not server.downloads("open_clip_pytorch_model.bin")


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
def test_of_transformers(server, hub_here, tmp_path, monkeypatch, kind):
    """The model, its classes and preprocessing follow from what transformers writes."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    sizes |= {"intermediate_size": 128} if kind == "vit" else {}
    sizes |= {"patch_size": 14, "id2label": {n: f"digit {n}" for n in range(10)}}
    torch.manual_seed(0)
    if kind == "vit":
        made = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    else:
        made = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    made.eval().save_pretrained(tmp_path / "made")
    processor = {
        "image_mean": [0.4] * 3,
        "image_std": [0.3] * 3,
        "resample": 2,
        "size": {"height": 28},
    }
    (tmp_path / "made" / "preprocessor_config.json").write_text(json.dumps(processor))
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    put(server, "us/tiny", files)

    seen = {}

    def look(config, weights):
        seen.update(config=config, weights=weights)

    if kind == "vit":
        monkeypatch.setattr(predict, "predict_images", look)
        run_vit_training.main(["--predict", "x.png", "--resume", NAME])
    else:
        monkeypatch.setattr(
            run_vit_training,
            "run_on_backend",
            lambda flags, config, prepare: look(config, prepare.args[0]),
        )
        run_vit_training.main([*"--eval_only --knn --init_from".split(), NAME])
    config, weights = seen["config"], seen["weights"]
    told = str(config.data.preprocessing)
    assert told == "mean 0.4 0.4 0.4, std 0.3 0.3 0.3, crop 1 squash, bilinear"
    spec = model_of(config)
    model = spec.build().to_empty(device="cpu")
    names = [name for name in spec.meta.state_dict() if not name.startswith("head.")]
    names += ["head.weight", "head.bias"] if kind == "vit" else []
    model.load_state_dict(weights.read(names), strict=kind == "vit")
    images = torch.rand(2, 3, 28, 28)
    with torch.inference_mode():
        if kind == "vit":
            assert describe(weights).class_names == [f"digit {n}" for n in range(10)]
            pair = model.eval()(images), made(images).logits
        else:
            pair = model.eval().forward_features(images), made(images).last_hidden_state
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


def test_two_processes_download_once_and_a_resume_needs_no_network(server, tmp_path):
    commit = put(server, "us/tiny", timms_files()[1])
    flags = [*TRAIN, "--backend", "cuda", "--init_from", NAME, "--ckpt_dir", str(tmp_path / "run")]
    variables = server.variables(tmp_path / "cache", TOKEN)
    done = run_program("run_vit_training.py", *flags, processes=2, variables=variables)
    assert done.returncode == 0, done.stderr
    assert server.downloads("model.safetensors") == 1
    pinned = f"{NAME}@{commit}"
    assert f"initial weights of {pinned}" in done.stdout
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["arguments"]["init_from"] == pinned
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
    assert TOKEN not in done.stdout + done.stderr

    server.requests.clear()  # the revision has moved, and nobody asks
    put(server, "us/tiny", timms_files(num_features=1)[1])
    variables = server.variables(tmp_path / "empty") | {"HF_HUB_OFFLINE": "1"}
    more = ["--max_steps", "3", "--num_epochs", "1"]
    done = run_program("run_vit_training.py", *flags, *more, variables=variables)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout
    assert not server.requests


def test_a_revision_moves(server, hub_here):
    """A name without a commit is asked for again; one with a commit stays."""
    first = put(server, "us/tiny", timms_files()[1])
    server.repositories["us/tiny"].revisions["v1"] = first
    assert hub.download(NAME, "--init_from")[0] == f"{NAME}@{first}"
    second = put(server, "us/tiny", {"config.json": b"{}"})
    assert hub.download(NAME, "--init_from")[0] == f"{NAME}@{second}"
    assert hub.download(f"{NAME}@v1", "--init_from")[0] == f"{NAME}@{first}"
    server.requests.clear()
    name, folder = hub.download(f"{NAME}@{first}", "--init_from")
    assert (name, folder.name) == (f"{NAME}@{first}", first)
    assert not server.requests  # all of it is here


def test_a_teacher_of_a_resumed_run_is_of_the_same_commit(server, hub_here):
    """Without asking: a checkpoint's commit stays, unless another revision is named."""
    first = put(server, "us/tiny", timms_files()[1])
    put(server, "us/tiny", {"config.json": b"{}"})
    saved = SavedRun(hub_here, Position(), {"teacher_weights": f"{NAME}@{first}"}, None)

    def teacher(name, saved):
        words = ["--teacher", "vit_tiny_patch16_224", "--teacher_weights", name]
        config = run_vit_training.read_flags(words).run
        return commits(config, saved)["teacher_weights"].partition("@")[2]

    assert teacher(NAME, saved) == first
    assert not server.requests
    newest = server.repositories["us/tiny"].revisions["main"]
    assert teacher(NAME, None) == newest
    assert teacher(f"{NAME}@main", saved) == newest
    assert teacher("hf-hub:us/tiny@" + first[:40], saved) == first


def test_connections_that_break(server, hub_here, monkeypatch):
    """The rest of a file is fetched; where that never succeeds there is one line, and what was
    complete before is still there."""
    put(server, "us/tiny", timms_files()[1])
    server.breaks[:] = [3000]
    _, folder = hub.download(NAME, "--init_from")
    whole = server.repositories["us/tiny"].commits[folder.name]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == whole
    assert {*load_file(folder / "model.safetensors")}

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    put(server, "us/tiny", {"model.safetensors": whole[:-4] + b"\1\2\3\4"})
    server.breaks[:] = [100] * 20
    with pytest.raises(
        UsageError, match=r"cannot be downloaded \(peer clo.*\), and is not complete in"
    ):
        hub.download(NAME, "--init_from")
    server.breaks.clear()
    assert hub.download(NAME, "--init_from")[1] != folder


def test_many_at_once(server, hub_here):
    put(server, "us/tiny", timms_files()[1])
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: hub.download(NAME, "--init_from"), range(4))}
    assert len(found) == 1
    assert server.downloads("model.safetensors") == 1


def test_of_what_kind_the_files_are():
    one, index = "model.safetensors", "model.safetensors.index.json"
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert hub.weight_files([one, "open_clip_model.safetensors", "pytorch_model.bin"]) == [one]
    assert hub.weight_files([index, *shards, "pytorch_model.bin"]) == [index, *shards]
    assert hub.weight_files([index, shards[0]]) == []  # incomplete
    assert hub.weight_files([index, shards[0], one]) == [one]
    assert hub.weight_files([*shards, "pytorch_model.bin"]) == ["pytorch_model.bin"]
    assert hub.missing_shards([index, shards[0]]) == [shards[1]]
    assert hub.missing_shards(shards) == [index]
    assert hub.missing_shards([one]) == hub.missing_shards([index, *shards]) == []
    assert hub.weight_files(["a.safetensors", "b.bin"]) == ["a.safetensors"]
    assert hub.weight_files(["a.safetensors", "b.safetensors"]) == []
    assert hub.weight_files(["pytorch_model.bin", "other.bin"]) == ["pytorch_model.bin"]
    assert hub.weight_files(["x/model.safetensors", "README.md"]) == []


def test_shards_that_are_incomplete(server, hub_here, capsys):
    """The whole file is used if there is one; else the missing shard is named."""
    files = timms_files()[1]
    whole = files.pop("model.safetensors")
    files["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    files["model-00001-of-00002.safetensors"] = whole
    put(server, "us/tiny", files)
    told = told_in_one_line(capsys, "--predict", "x.png", "--resume", NAME)
    assert "has shards, but no model-00002-of-00002.safetensors: use a complete revision" in told
    put(server, "us/tiny", {"model.safetensors": whole})
    folder = hub.download(NAME, "--resume")[1]
    assert (folder / "model.safetensors").read_bytes() == whole
    assert find(folder, "--resume").layouts.keys() == timms_files()[0].state_dict().keys()


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "us/none": "no such repository on the Hub, or you have no access to it",
    "us/private": "no such repository on the Hub, or you have no access to it",
    "us/gated": "is gated: accept its conditions",
    "us/tiny@v9": "no such revision in this repository",
    "us/empty": "has neither model.safetensors nor",
    "us": "use hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION",
    "us/tiny@": "use hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION",
    "us/../tiny": "use hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION",
    "us/--tiny": "not a valid repository name",
}


def test_refused_in_one_line(server, hub_here, capsys, tmp_path, monkeypatch):
    files = timms_files()[1]
    put(server, "us/tiny", files)
    put(server, "us/private", files, private=True)
    put(server, "us/gated", files, gated=True)
    put(server, "us/empty", {"README.md": b""})
    flags = [*TRAIN, "--ckpt_dir", tmp_path / "run", "--init_from"]
    for name, text in REFUSED.items():
        assert text in told_in_one_line(capsys, *flags, f"hf-hub:{name}")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    told = told_in_one_line(capsys, *flags, NAME)
    assert "rejects the token" in told
    assert "hf_wrong" not in told
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.download("hf-hub:us/private", "--init_from")[0].startswith("hf-hub:us/private@")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in told_in_one_line(capsys, *flags, NAME)
    assert not (tmp_path / "run").exists()


def test_without_a_network_the_cache_is_used_and_named(server, hub_here, capsys, monkeypatch):
    put(server, "us/tiny", timms_files()[1])
    before = hub.download(NAME, "--init_from")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    capsys.readouterr()
    assert hub.download(NAME, "--init_from") == before
    commit = before[0].partition("@")[2]
    assert f"commit {commit[:12]}: [Errno 111] Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:1"}, "Using SOCKS proxy, but .*; ALL_PROXY set"),
        ({"all_proxy": "ftp://bob:S3cret@x"}, "Unknown scheme for proxy URL .*; ALL_PROXY set"),
        ({"HTTP_PROXY": "http://bob:S3cret#x@y"}, "invalid URL; HTTP_PROXY set"),
        ({"HTTPS_PROXY": "\x01", "HF_ENDPOINT": "x"}, "invalid URL; HF_ENDPOINT, HTTPS_PROXY set"),
        ({"SSL_CERT_FILE": "/nowhere"}, "No such file or directory; SSL_CERT_FILE set"),
        ({"SSL_CERT_FILE": __file__}, "no certificate or crl found .*; SSL_CERT_FILE set"),
        ("http://[::1", "invalid URL"),
        ("http://a..b", "label empty or too long"),
        ("nothing", "missing an 'http://' or 'https://' protocol"),
    ],
)
def test_settings_of_the_network(server, hub_here, capsys, monkeypatch, tmp_path, variables, text):
    """The cache is used; without one there is one line, which does not say their values."""
    put(server, "us/tiny", timms_files()[1])
    before = hub.download(NAME, "--init_from")
    with monkeypatch.context() as here:
        here.setattr("time.sleep", lambda seconds: None)
        for name in (*_SETTINGS, *map(str.lower, _SETTINGS)):
            here.delenv(name, raising=False)
        if isinstance(variables, str):
            here.setattr(huggingface_hub.constants, "ENDPOINT", variables)
        else:
            for name, value in variables.items():
                here.setenv(name, value)
        huggingface_hub.close_session()  # the next one reads the variables
        capsys.readouterr()
        assert hub.download(NAME, "--init_from") == before
        assert re.search(rf"note: using .* from the cache .*{text}", capsys.readouterr().err)
        here.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
        told = told_in_one_line(capsys, *TRAIN, "--ckpt_dir", tmp_path / "run", "--init_from", NAME)
        assert re.search(rf"cannot be downloaded \(.*{text}.*\), and is not complete in", told)
        assert "S3c" not in told
        here.setenv("HF_TOKEN", TOKEN)
        assert convert([str(before[1]), "hf-hub:us/new", "--push"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"hf-hub:us/new cannot be written: .*{text}", line)
    huggingface_hub.close_session()


def test_a_file_above_the_hubs_limit(server, hub_here, monkeypatch):
    """Files above 50 GB need another package."""
    put(server, "us/tiny", timms_files()[1])
    monkeypatch.setattr(huggingface_hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    with pytest.raises(UsageError, match=r"cannot be downloaded \(The file is too large .* hf_xet"):
        hub.download(NAME, "--init_from")


@pytest.mark.parametrize("token", ["hf_smørrebrød", "hf_a\x7fb", "hf two", "hf_\udce9"])
def test_a_token_of_other_characters(server, hub_here, capsys, monkeypatch, tmp_path, token):
    monkeypatch.setenv("HF_TOKEN", token)
    told = told_in_one_line(capsys, *TRAIN, "--ckpt_dir", tmp_path / "run", "--init_from", NAME)
    assert told.endswith(
        "HF_TOKEN or `hf auth login` has characters that no token has: set it again"
    )
    assert convert([str(DIGITS), "hf-hub:us/new", "--push"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has characters that no token has" in line


def test_resuming_weights_alone_is_refused(capsys, tmp_path):
    told = told_in_one_line(capsys, *TRAIN, "--ckpt_dir", tmp_path / "run", "--resume", NAME)
    assert told.endswith(f"--resume {NAME} contains only weights: use --init_from instead")


# -- --pretrained ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "init_from", "resume"),
    [
        ("--model vit_base_patch16_224", "vit_base_patch16_224.augreg2_in21k_ft_in1k", "auto"),
        ("--model timm/vit_base_patch16_224.mae", "vit_base_patch16_224.mae", "auto"),
        ("--model vit_base_patch16_224.mae --eval_only --knn", None, "auto"),
        ("--model timm/deit3_base_patch16_224 --eval_only", None, "deit3_base_patch16_224.fb_in1k"),
        ("--model timm/deit3_base_patch16_224 --predict x", None, "deit3_base_patch16_224.fb_in1k"),
    ],
)
def test_pretrained_names_what_timm_has(words, init_from, resume):
    flags = run_vit_training.read_flags(["--pretrained", *shlex.split(words)])
    run_vit_training.check_mode_flags(flags)
    if "patch16_224.mae --eval" in words:  # a preset has no tags
        with pytest.raises(UsageError, match=r"unknown model vit_base_patch16_224\.mae"):
            pretrained(flags.run)
        return
    saved = with_values(flags.run, pretrained(flags.run)).checkpoints
    assert saved.init_from == (init_from and f"hf-hub:timm/{init_from}")
    assert saved.resume == (resume if resume == "auto" else f"hf-hub:timm/{resume}")


def test_pretrained_without_weights(capsys, tmp_path):
    flags = [*TRAIN, "--ckpt_dir", tmp_path / "run", "--pretrained"]
    assert "--pretrained requires --model" in told_in_one_line(capsys, *flags)
    for model in ("vit_10b", "hybrid_vit", "timm/vit_giant_patch14_224"):
        told = told_in_one_line(capsys, *flags, "--model", model)
        assert f"timm has no pretrained weights for --model {model} on the Hub" in told
    told = told_in_one_line(capsys, *flags, "--model", "vit_10b", "--init_from", NAME)
    assert "--pretrained is incompatible with --init_from" in told


# -- python3 -m tools.convert ----------------------------------------------------------------------


def test_a_folder_is_pushed(server, hub_here, tmp_path, monkeypatch, capsys):
    """What was pushed, timm loads again; a repository is private unless that is asked for."""
    model, files = timms_files()
    (tmp_path / "weights").mkdir()
    for name, content in files.items():
        (tmp_path / "weights" / name).write_bytes(content)
    words = [str(tmp_path / "weights"), "hf-hub:us/new"]
    assert convert(words) == 2
    assert "requires --push" in capsys.readouterr().err
    assert convert([*words, "--push"]) == 2
    assert "not logged in: use `hf auth login` or HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert convert([*words, "--push"]) == 0
    repository = server.repositories["us/new"]
    assert f"to hf-hub:us/new@{repository.revisions['main']}" in capsys.readouterr().out
    assert repository.private
    assert convert(["hf-hub:us/new", str(tmp_path / "again"), "--to", "safetensors"]) == 0
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)

    put(server, "us/seen", files)
    capsys.readouterr()
    assert convert([words[0], "hf-hub:us/seen", "--push"]) == 2
    assert "already exists and is public" in capsys.readouterr().err
    assert convert([words[0], "hf-hub:us/seen", "--push", "--public"]) == 0
    assert convert([words[0], "hf-hub:us/open", "--push", "--public"]) == 0
    assert not server.repositories["us/open"].private
    capsys.readouterr()
    for wrong in (["--public"], ["--push", "--to", "dcp"]):
        assert convert([words[0], "hf-hub:us/x", *wrong]) == 2
    assert "us/x" not in server.repositories
