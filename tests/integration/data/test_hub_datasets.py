"""Data sets by their names on the Hugging Face Hub, which is a server of this machine."""

import io
import json
import shutil

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import hub
from data.batch import BatchShard
from data.config import DataConfig
from data.files import DataFolderError
from data.open import open_data
from data.source import DatasetRequest
from tests.fakes.hub_server import TOKEN, HubServer, Repository
from tests.support.cli import run_program
from tests.support.loading import check_same_epochs
from tests.support.table_files import CLASSES, noise_png, write_beans
from tests.support.usage_error import told_in_one_line

BEANS = ["--data_source", "huggingface", "--data_dir", "us/beans"]
TRAIN = [
    *"--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 1".split(),
    *"--num_classes 3 --batch_size 8 --num_workers 0 --max_steps 2 --warmup_steps 1".split(),
]


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub_here(server, tmp_path, monkeypatch):
    """The Hub of this process, without repositories. Returns what moves to another cache."""
    constants, config = huggingface_hub.constants, datasets.config
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(server, "repositories", {})
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(config, "HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def move(name):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / name / "hub"))
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / name / "datasets")
        downloads = str(tmp_path / name / "datasets" / "downloads")
        monkeypatch.setattr(config, "DOWNLOADED_DATASETS_PATH", downloads)

    move("cache")
    return move


def put(server, name, files, **kind):
    repository = server.repositories.setdefault(f"datasets/us/{name}", Repository(**kind))
    return repository.commit(files)


def opened(data_dir, source="huggingface", **changes):
    values = {"data_dir": str(data_dir), "data_source": source, "batch_size": 8, "num_workers": 0}
    return open_data(DatasetRequest(DataConfig(**values | changes), 3, (16, 16), 3, seed=3))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def same_images(one, other):
    """Of training, in their order, and of validation."""
    pairs = [
        (one.train_loader(8, BatchShard()), other.train_loader(8, BatchShard())),
        (one.val_loader(8, BatchShard()), other.val_loader(8, BatchShard())),
    ]
    for ours, theirs in pairs:
        check_same_epochs(ours.epoch(0), theirs.epoch(0))


# -- what is read ----------------------------------------------------------------------------------


def test_two_processes_download_once_and_a_resume_needs_no_network(server, hub_here, tmp_path):
    """The run goes on with the commit that it recorded, although the revision has moved."""
    files = write_beans()[1]
    commit = put(server, "beans", files, private=True)
    flags = [*TRAIN, *BEANS, "--backend", "cuda", "--ckpt_dir", str(tmp_path / "run")]
    variables = server.variables(tmp_path / "cache", TOKEN)
    done = run_program("run_vit_training.py", *flags, processes=2, variables=variables)
    assert done.returncode == 0, done.stderr
    assert f"data: us/beans@{commit}: 30 training, 12 validation images" in done.stdout
    assert [server.downloads(name) for name in files] == [1, 1, 1]
    saved = json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]
    assert (saved["data_dir"], saved["dataset_config_name"]) == (f"us/beans@{commit}", "default")
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()

    put(server, "beans", write_beans(first=1000)[1])
    server.requests.clear()
    variables = server.variables(tmp_path / "cache") | {"HF_HUB_OFFLINE": "1"}
    done = run_program("run_vit_training.py", *flags, "--max_steps", "3", variables=variables)
    assert done.returncode == 0, done.stderr
    assert f"data: us/beans@{commit}" in done.stdout
    assert "resuming" in done.stdout
    assert not server.requests


def test_as_saved_by_datasets(server, hub_here, tmp_path):
    """Images, labels, order and checksums; from the network, then from the cache."""
    tables, files = write_beans()
    commit = put(server, "beans", files)
    tables.save_to_disk(tmp_path / "saved")
    saved, found = opened(tmp_path / "saved"), opened("us/beans")
    assert found.name == f"us/beans@{commit}"
    assert found.classes == CLASSES
    same_images(found, saved)
    server.requests.clear()
    again = opened(f"us/beans@{commit}", dataset_config_name="default")
    assert not server.requests
    same_images(again, saved)
    assert again.fingerprint() == found.fingerprint()
    test = opened("us/beans", val_split="test")
    assert test.val_length == 9
    batch = next(test.val_loader(9, BatchShard()).epoch(0))
    assert batch["target"].tolist() == tables["test"]["labels"][:]
    put(server, "beans", write_beans(first=1000)[1])
    assert opened("us/beans").fingerprint() != found.fingerprint()


def test_parquet_files(server, hub_here, tmp_path):
    files = write_beans()[1]
    commit = put(server, "beans", files)
    write(tmp_path, files)
    here = opened(tmp_path, "parquet")
    for name, workers in (("us/beans", 0), ("us/beans@main/data", 1), (f"us/beans@{commit}", 0)):
        found = opened(f"hf://datasets/{name}", "parquet", num_workers=workers)
        same_images(found, here)
    assert found.fingerprint() == here.fingerprint()


def test_a_repository_of_image_files(server, hub_here, tmp_path):
    """As from a folder of these files; and the same data set, wherever the cache is."""
    files = {
        f"{split}/{name}/{number}.png": noise_png(100 * number + label + 10 * (split == "train"))
        for split in ("train", "val")
        for label, name in enumerate(CLASSES)
        for number in range(4)
    }
    put(server, "files", files)
    write(tmp_path, files)
    found = opened("us/files")
    assert found.classes == CLASSES
    same_images(found, opened(tmp_path, "folder"))
    hub_here("another/cache")
    assert opened("us/files").fingerprint() == found.fingerprint()


def test_rows_that_name_files_of_this_machine(server, hub_here, tmp_path):
    """Only files in the cache are read: others are no part of the data set."""
    (tmp_path / "own.png").write_bytes(noise_png(0))
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": str(tmp_path / "own.png")}] * 9, kind)
    about = {"info": {"features": {"image": {"_type": "Image"}}}}
    table = pa.table({"image": images, "label": [0, 1, 2] * 3})
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, file := io.BytesIO())
    content = file.getvalue()
    put(server, "paths", {"train.parquet": content, "test.parquet": content})
    loader = opened("us/paths", columns=("image", "label")).val_loader(9, BatchShard())
    assert next(loader.epoch(0))["target"].tolist() == [-1] * 9
    assert {reason for _, reason, _ in loader.bad_images()} == {"column image is empty in this row"}


ABOUT = b"""---
configs:
- config_name: small
  data_files: [{split: training, path: small/*}, {split: dev, path: data/test*}]
- config_name: all
  data_files: [{split: train, path: data/train*}, {split: validation, path: data/val*}]
---
"""


def test_configurations_and_splits(server, hub_here, monkeypatch):
    files = write_beans()[1]
    more = {"README.md": ABOUT, "small/0.parquet": files["data/test-00000-of-00001.parquet"]}
    commit = put(server, "two", files | more)
    with pytest.raises(
        DataFolderError, match=r"pick one .* \['small', 'all'\]: set --dataset_conf"
    ):
        opened("us/two")
    with pytest.raises(DataFolderError, match=r"'none' not found. Available: \['small', 'all'\]"):
        opened("us/two", dataset_config_name="none")
    found = opened("us/two", dataset_config_name="all")
    assert (found.train_length, found.val_length) == (30, 12)
    small = {"dataset_config_name": "small", "train_split": "training", "val_split": "dev"}
    assert opened("us/two", **small).train_length == 9
    with pytest.raises(DataFolderError, match="are training, dev: choose one with --train_split"):
        opened("us/two", dataset_config_name="small")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert opened("us/two", **small).train_length == 9
    with pytest.raises(DataFolderError, match=r"cache has several .* --dataset_config_name: all, "):
        opened(f"us/two@{commit}")


def test_a_named_split_is_not_optional(server, hub_here):
    put(server, "beans", write_beans()[1])
    for source, name in (("huggingface", "us/beans"), ("parquet", "hf://datasets/us/beans")):
        values = {"data_dir": name, "data_source": source, "val_split": "dev"}
        config = DataConfig(**values, num_workers=0, batch_size=8)
        with pytest.raises(DataFolderError, match=r"no dev( split|-\*.parquet)"):
            open_data(DatasetRequest(config, 3, (16, 16), 3, seed=3, labels=False))


# -- which commit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"),
    [("huggingface", "us/beans{}"), ("parquet", "hf://datasets/us/beans{}/data")],
)
def test_a_resumed_run_has_the_same_commit(server, hub_here, source, form):
    """Unless a flag names a revision."""
    first = put(server, "beans", write_beans()[1])
    server.repositories["datasets/us/beans"].revisions["refs/pr/1"] = first
    second = put(server, "beans", {"README.md": b"---\n---\n"})

    def pinned(revision, saved):
        config = DataConfig(data_source=source, data_dir=form.format(revision))
        return hub.with_commits(config, saved).data_dir

    saved = {"data_dir": form.format(f"@{first}"), "dataset_config_name": "default"}
    assert pinned("", {}) == form.format(f"@{second}")
    assert pinned("", saved) == form.format(f"@{first}")
    assert pinned("@main", saved) == form.format(f"@{second}")
    assert pinned("@refs/pr/1", {}) == form.format(f"@{first}")
    assert pinned("", {"data_dir": form.format("2@" + first)}) == form.format(f"@{second}")


def test_without_a_network_the_cache_is_used_and_named(server, hub_here, capsys, monkeypatch):
    put(server, "beans", write_beans()[1])
    before = opened("us/beans")
    put(server, "beans", {"README.md": b"---\n---\n"})
    server.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    assert opened("us/beans").name == before.name
    commit = before.name.partition("@")[2]
    assert capsys.readouterr().err == (
        "note: using --data_dir us/beans (default) from the cache "
        f"{datasets.config.HF_DATASETS_CACHE}, commit {commit[:12]}: HF_HUB_OFFLINE is set\n"
    )
    assert not server.requests


def test_a_damaged_cache(server, hub_here):
    put(server, "beans", write_beans()[1])
    name = opened("us/beans").name
    (file,) = datasets.config.HF_DATASETS_CACHE.rglob("beans-train.arrow")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataFolderError, match=rf"^{file.parent} is damaged \(.*\): remove it"):
        opened(name)
    shutil.rmtree(file.parent)
    assert opened(name).train_length == 30


def test_connections_that_break(server, hub_here, monkeypatch):
    """The rest of a file is fetched; where that never succeeds there is one line."""
    put(server, "beans", write_beans()[1])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(server, "breaks", [100] * 20)
    with pytest.raises(
        DataFolderError, match=r"cannot be downloaded \(.*\), and is not complete in"
    ):
        opened("us/beans")
    server.breaks[:] = [1000]
    assert opened("us/beans").train_length == 30


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "us/none": "no such repository on the Hub, or you have no access to it",
    "us/private": "no such repository on the Hub, or you have no access to it",
    "us/gated": "is gated: accept its conditions",
    "us/beans@v9": "no such revision in this repository",
    f"us/beans@{40 * 'a'}": "no such revision in this repository",
}
OF_DATASETS = {
    "us/script": "is a script, and no code of a data set is run: try the Hub's own conversion",
    "us/empty": "doesn't contain any data files",
    "us/damaged": "Parquet magic bytes not found in footer",
    "us/text": "/train has no image column: set --columns IMAGE LABEL (columns: text)",
    "hf://datasets/us/beans/data": ": use --data_dir us/beans, or --data_source parquet",
    "us/beans@": "was not saved by datasets.DatasetDict.save_to_disk",
}


def test_refused_in_one_line(server, hub_here, capsys, tmp_path, monkeypatch):
    files, ran = write_beans()[1], tmp_path / "ran"
    put(server, "beans", files)
    put(server, "private", files, private=True)
    put(server, "gated", files, gated=True)
    put(server, "script", {"script.py": f"open({str(ran)!r}, 'w')".encode()})
    put(server, "empty", {"README.md": b"nothing"})
    put(server, "damaged", {"train.parquet": bytes(20), "test.parquet": bytes(20)})
    put(server, "text", {"train.txt": b"a\nb", "test.txt": b"c"})
    for name, text in {**REFUSED, **OF_DATASETS}.items():
        with pytest.raises(DataFolderError) as raised:
            opened(name)
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)
    for name, text in REFUSED.items():
        url = f"hf://datasets/{name}"
        with pytest.raises(DataFolderError, match=f"^--data_dir {url}: .*{text}"):
            hub.with_commits(DataConfig(data_source="parquet", data_dir=url), {})

    def told(source, name):
        where = ["--data_source", source, "--data_dir", name, "--ckpt_dir", tmp_path / "run"]
        return told_in_one_line(capsys, *TRAIN, *where)

    assert "us/empty: " in told("huggingface", "us/empty")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "rejects the token" in told("parquet", "hf://datasets/us/private")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    unreachable = "us/new cannot be downloaded (HF_HUB_OFFLINE is set), and is not complete in"
    assert unreachable in told("huggingface", "us/new")
    assert told("parquet", "hf://datasets/us/beans").endswith("read: HF_HUB_OFFLINE is set")
    assert not ran.exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_of_this_name_is_opened(server, hub_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_beans()[0].save_to_disk("us/beans")
    server.requests.clear()
    assert opened("us/beans").name == "us/beans"
    assert not server.requests
    with pytest.raises(DataFolderError, match="is for data sets on the Hub, and us/beans is a fol"):
        opened("us/beans", dataset_config_name="default")
