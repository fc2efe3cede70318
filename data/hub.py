"""The Hugging Face Hub: what it refuses, in one line, and its data sets.

``--data_source huggingface --data_dir OWNER/NAME[@REVISION]``: ``datasets`` downloads a data set to
its usual cache; its lock lets one process per host download while the others wait. A name with a
commit, which runs record, needs no network once the data set is in the cache. ``datasets`` runs no
code of a data set.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.files import DataFolderError, reason_of

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that never changes."""

# -- what the Hub refuses --------------------------------------------------------------------------


class HubUnreachable(Exception):
    """Raised if the Hub does not answer, with the reason."""


@contextlib.contextmanager
def refusals(what: str, refused: type[Exception]) -> Iterator[None]:
    """Turn refusals of the Hub into an error of the class ``refused``, which begins with ``what``,
    and all other failures into HubUnreachable: of the network, of its settings, or of
    ``huggingface_hub``."""
    import httpx2
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # What they log is said by the errors.
    for name in ("huggingface_hub.hf_api", "huggingface_hub.repocard", "datasets"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if not re.fullmatch(r"[!-~]*", get_token() or ""):
            raise refused(f"{what}: {_TOKEN} has characters that no token has: set it again")
        yield
    except refused:
        raise
    except GatedRepoError:
        raise refused(
            f"{what}: this repository is gated: accept its conditions on its page at "
            f"{constants.ENDPOINT}, and log in with `hf auth login` or HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise refused(f"{what}: no such revision in this repository") from None
    except HFValidationError:
        raise refused(f"{what}: not a valid repository name") from None
    except LocalTokenNotFoundError:
        raise refused(f"{what}: not logged in: use `hf auth login` or HF_TOKEN") from None
    # Whatever is raised, for example ImportError by httpx2 for a proxy of the kind socks5://.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            message = error.server_message or ""
            if isinstance(error, RepositoryNotFoundError) and "redential" not in message:
                raise refused(_NOT_FOUND.format(what=what)) from None
            raise refused(f"{what}: the Hub rejects {_TOKEN}") from None
        if isinstance(error, RepositoryNotFoundError):
            raise refused(_NOT_FOUND.format(what=what)) from None
        if constants.HF_HUB_OFFLINE:
            raise HubUnreachable("HF_HUB_OFFLINE is set") from None
        cause = error.__cause__ or error
        text = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, httpx2.InvalidURL):  # its text may hold part of a password
            text = "invalid URL"
        text = text if len(text) <= 200 else f"{text[:200]}..."
        if given := [name for name in _SETTINGS if {name, name.lower()} & os.environ.keys()]:
            text = f"{text}; {', '.join(given)} set"
        raise HubUnreachable(text) from None


_SETTINGS = ("HF_ENDPOINT", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "SSL_CERT_FILE")
"""Environment variables with which the Hub may be unreachable; their values may be secret."""
_TOKEN = "the token of HF_TOKEN or `hf auth login`"
_NOT_FOUND = (
    "{what}: no such repository on the Hub, or you have no access to it: check the name, and log "
    "in with `hf auth login` or HF_TOKEN"
)


def shows_progress() -> bool:
    """Return True if this process shows the progress of downloads; the others of its host wait."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and sys.stderr.isatty()


def note_cached(what: str, cache: object, commit: str, error: HubUnreachable) -> None:
    """Say on stderr, in the first process of torchrun, that files of the cache are used."""
    if os.environ.get("RANK", "0") == "0":
        print(
            f"note: using {what} from the cache {cache}, commit {commit[:12]}: {error}",
            file=sys.stderr,
        )


# -- names of data sets ----------------------------------------------------------------------------

_REPOSITORY = r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
_NAME = re.compile(rf"{_REPOSITORY}(@(?P<revision>[^@\s]+))?")
_URL = "hf://datasets/"
_FILES = re.compile(  # of revisions with a slash, huggingface_hub knows these in a URL
    rf"{_URL}{_REPOSITORY}(@(?P<revision>refs/(convert|pr)/[^/]+|[^/@]+))?(?P<path>/.*)?"
)


@dataclass(frozen=True)
class HubName:
    """A data set on the Hub, as its name or as a URL of files in it."""

    repository: str
    revision: str | None
    path: str | None = None
    """The path in a URL, with its slash; None: it is no URL."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        prefix = "" if self.path is None else _URL
        return f"{prefix}{self.repository}{at}{self.path or ''}"


def name_on_hub(name: str, data_source: str) -> HubName | None:
    """Return what ``name`` names on the Hub; None for anything else. A folder that exists is meant
    before a data set of this name."""
    if match := _FILES.fullmatch(name):
        return HubName(match["repository"], match["revision"], match["path"] or "")
    match = _NAME.fullmatch(name) if data_source == "huggingface" else None
    if match and not os.path.exists(name):
        return HubName(match["repository"], match["revision"])
    return None


def with_commits(config: DataConfig, saved: Mapping[str, Any]) -> DataConfig:
    """Return the configuration with the commits of data sets on the Hub, and the name of the data
    set's configuration: those of ``saved``, the values of the resumed checkpoint, unless flags name
    others. Raises DataFolderError if there is no such data set."""
    changes: dict[str, Any] = {}
    for field, source in (("data_dir", config.data_source), ("segment_dir", "")):
        name = name_on_hub(getattr(config, field) or "", source)
        if name is None:
            continue
        configuration, saved_one = config.dataset_config_name, saved.get("dataset_config_name")
        before = name_on_hub(str(saved.get(field)), source)
        if before and is_pinned(before) and replace(before, revision=None) == name:
            name = before
            configuration = configuration or (saved_one and str(saved_one))
        if name.path is None:
            name, changes["dataset_config_name"] = resolve(name, configuration)
        else:
            name = _resolve_url(name, f"--{field}")
        changes[field] = str(name)
    return replace(config, **changes)


def is_pinned(name: HubName) -> bool:
    """Return True if a name has a commit."""
    return COMMIT.fullmatch(name.revision or "") is not None


def _resolve_url(name: HubName, flag: str) -> HubName:
    try:
        with refusals(f"{flag} {name}", DataFolderError):
            commit = _look_up(name)
    except HubUnreachable as error:
        raise DataFolderError(f"{flag} {name} cannot be read: {error}") from None
    return replace(name, revision=commit)


def _look_up(name: HubName) -> str:
    """Return the commit of a data set that may be read. Raises what ``refusals`` turns into
    lines."""
    from huggingface_hub import HfApi

    api, repository = HfApi(), name.repository
    options: dict[str, Any] = {"repo_type": "dataset", "revision": name.revision}
    commit: str = api.resolve_revision(repository, **options).resolved  # perhaps from the cache
    api.dataset_info(repository, revision=commit, expand=["sha"])
    api.auth_check(repository, repo_type="dataset")
    return commit


# -- data sets in the cache of ``datasets`` --------------------------------------------------------


def import_datasets() -> Any:
    """Return the package ``datasets``. Raises DataFolderError if it is not installed."""
    datasets: Any = None
    with contextlib.suppress(ImportError):
        datasets = importlib.import_module("datasets")
    # A folder of that name, as this program has, is imported too, but as a package without a file.
    if datasets is None or datasets.__file__ is None:
        raise DataFolderError(
            "--data_source huggingface requires the package datasets: python3 -m pip install "
            "datasets"
        )
    if not shows_progress():
        datasets.disable_progress_bars()
    return datasets


def resolve(name: HubName, configuration: str | None) -> tuple[HubName, str]:
    """Return a data set's name with the commit, and the name of its configuration: the default one
    unless ``configuration`` names another. Raises DataFolderError."""
    if is_pinned(name) and configuration:
        return name, configuration
    try:
        builder = _builder(name, configuration)
    except HubUnreachable as error:
        return _cached(name, configuration, error)
    return replace(name, revision=builder.hash), builder.config.name


def open_dataset(name: HubName, configuration: str) -> Any:
    """Return the data set of a name with a commit, a ``datasets.DatasetDict``, cached or
    downloaded. Raises DataFolderError."""
    if not (folders := _folders(name, configuration)):
        try:
            builder = _builder(name, configuration)
            with _failures(name):
                builder.download_and_prepare()
        except HubUnreachable as error:
            raise _not_cached(name, error) from None
        folders = [Path(builder.cache_dir)]
    cache = importlib.import_module("datasets.packaged_modules.cache.cache").Cache
    *_, version, commit = folders[0].parts
    of_name = {"repo_id": name.repository, "dataset_name": name.repository.partition("/")[2]}
    try:
        reader = cache(**of_name, config_name=configuration, version=version, hash=commit)
        return reader.as_dataset()
    except Exception as error:  # it raises what it likes
        raise DataFolderError(
            f"{folders[0]} is damaged ({reason_of(error)}): remove it to download it again"
        ) from error


def cache_folders() -> tuple[str, ...]:
    """Return the folders to which image files are downloaded or unpacked, ending with a slash."""
    from huggingface_hub import constants

    unpacked = import_datasets().config.DOWNLOADED_DATASETS_PATH
    return tuple(
        os.path.join(os.path.abspath(each), "") for each in (constants.HF_HUB_CACHE, unpacked)
    )


def _builder(name: HubName, configuration: str | None) -> Any:
    """Return what ``datasets`` will build the data set with; downloads a few small files. Raises
    DataFolderError and HubUnreachable."""
    from huggingface_hub import HfApi

    datasets, script = import_datasets(), f"{name.repository.partition('/')[2]}.py"
    with refusals(f"--data_dir {name}", DataFolderError):
        commit = _look_up(name)
        where = {"repo_type": "dataset", "revision": commit}
        is_script = HfApi().file_exists(name.repository, script, **where)
    if is_script:
        raise DataFolderError(
            f"--data_dir {name} is a script, and no code of a data set is run: try the Hub's own "
            f"conversion, --data_source parquet --data_dir {_URL}{name.repository}@~parquet/default"
        )
    with _failures(name):
        builder = datasets.load_dataset_builder(name.repository, configuration, revision=commit)
        if builder.hash != commit:  # the newest in the cache, of any commit
            raise ConnectionError("the Hub did not answer")
    return builder


@contextlib.contextmanager
def _failures(name: HubName) -> Iterator[None]:
    """As ``refusals``, and turn errors about the content into DataFolderError."""
    datasets = import_datasets()
    content = (
        *(ValueError, datasets.exceptions.DatasetsError),
        *(datasets.data_files.EmptyDatasetError, NotImplementedError),
    )
    with refusals(f"--data_dir {name}", DataFolderError):
        try:
            yield
        except content as error:
            reason = reason_of(error).partition(" Example of usage")[0]
            if "onfig" in reason:
                reason += ": set --dataset_config_name"
            raise DataFolderError(f"--data_dir {name}: {reason}") from None


def _folders(name: HubName, configuration: str | None) -> list[Path]:
    """Return the folders of this commit in the cache, one for each configuration."""
    datasets = import_datasets()
    owner, _, short = name.repository.partition("/")
    short = datasets.naming.camelcase_to_snakecase(short)
    root = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{short}"
    pattern = f"{glob.escape(configuration) if configuration else '*'}/*/{name.revision}"
    return sorted(path for path in root.glob(pattern) if path.is_dir())


def _cached(name: HubName, configuration: str | None, error: HubUnreachable) -> tuple[HubName, str]:
    """Return what ``resolve`` does, from the cache alone."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    datasets, options = import_datasets(), {"repo_type": "dataset", "revision": name.revision}
    try:
        found = HfApi().resolve_revision(name.repository, **options, local_files_only=True)
    except (OSError, RevisionResolutionError):
        raise _not_cached(name, error) from None
    pinned = replace(name, revision=found.resolved)
    names = [folder.parts[-3] for folder in _folders(pinned, configuration)]
    if not names:
        raise _not_cached(name, error)
    if len(names) > 1:
        raise DataFolderError(
            f"--data_dir {name} cannot be downloaded ({error}), and the cache has several "
            f"configurations of it: choose with --dataset_config_name: {', '.join(names)}"
        )
    note_cached(
        f"--data_dir {name} ({names[0]})", datasets.config.HF_DATASETS_CACHE, found.resolved, error
    )
    return pinned, names[0]


def _not_cached(name: HubName, error: HubUnreachable) -> DataFolderError:
    return DataFolderError(
        f"--data_dir {name} cannot be downloaded ({error}), and is not complete in the cache "
        f"{import_datasets().config.HF_DATASETS_CACHE}: check the network, or save it elsewhere by "
        "datasets' save_to_disk and use --data_dir FOLDER"
    )
