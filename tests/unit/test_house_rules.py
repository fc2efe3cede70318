"""Rules of the code that a reader relies on: who imports whom, and who sees the flags."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.cli import ROOT

pytestmark = pytest.mark.fast

MAY_IMPORT = {
    "check_python": set(),
    "config_fields": set(),
    "tpu_machines": set(),
    "models": {"config_fields"},
    "data": {"check_python", "config_fields"},
    "training": {"config_fields", "models", "data"},
    "features": {"config_fields", "models", "data", "training"},
    "tpu_attention": {"models", "training"},
    "xla_fsdp": {"config_fields", "tpu_machines", "models", "data", "training", "tpu_attention"},
    "torch_fsdp": {
        *("config_fields", "tpu_machines", "models", "data", "training", "tpu_attention"),
    },
    "gpu_fsdp": {"config_fields", "models", "data", "training", "torch_fsdp"},
    "tools": {
        *("check_python", "config_fields", "models", "data", "training"),
        *("tpu_machines", "tpu_attention", "xla_fsdp", "torch_fsdp", "gpu_fsdp"),
    },
    "launch": {"check_python", "config_fields", "tpu_machines", "training.processes.rendezvous"},
}
"""Of the program's own parts, besides itself: the core imports no tool. Launchers run without
PyTorch; launch/torchrun.py, which has it, shares one file with the program that it starts."""


def sources() -> list[Path]:
    folders = [*MAY_IMPORT, "benchmarks", "tests"]
    found = [*ROOT.glob("*.py"), *(p for each in folders for p in (ROOT / each).rglob("*.py"))]
    assert len(found) > 150
    return found


def imported_by(path: Path) -> set[str]:
    """The modules that a file imports, inside of functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_go_one_way(part):
    ours = {*MAY_IMPORT, "run_vit_training", "benchmarks", "tests"}
    allowed = tuple(f"{name}." for name in MAY_IMPORT[part] | {part})
    files = [path for path in sources() if part in path.relative_to(ROOT).with_suffix("").parts[:1]]
    for path in files:
        imported = {name for name in imported_by(path) if name.partition(".")[0] in ours}
        assert not {name for name in imported if not f"{name}.".startswith(allowed)}, path


def test_features_do_not_import_each_other():
    for path in (ROOT / "features").rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts[1]
        theirs = {n for n in imported_by(path) if n.startswith("features.")}
        assert {name for name in theirs if name.split(".")[1] != own} == set(), path


NAMED_IN = {
    "dino": {
        "training/feature_table.py",  # the table
        "training/objectives/distillation_config.py",  # --teacher requires one of two objectives
        *("training/config.py", "gpu_fsdp/config.py"),  # texts of --help
        "training/foreign_flags.py",  # the settings of DINOv2 and DINOv3
    },
}
"""The files outside of a feature's package that name it."""


@pytest.mark.parametrize("name", NAMED_IN)
def test_who_names_a_feature(name):
    """Others ask the features that are on. DINOv2 and DINOv3 are public models' names."""
    product = [p for p in sources() if p.relative_to(ROOT).parts[0] not in ("benchmarks", "tests")]
    naming = {p for p in product if re.search(rf"{name}(?!v\d)", p.read_text(), re.I)}
    own = ROOT / "features" / name
    assert {str(p.relative_to(ROOT)) for p in naming if own not in p.parents} == NAMED_IN[name]


def test_no_two_files_need_each_other():
    """Nor do more in a circle; imports inside of functions and for types alone count, too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("benchmarks", "tests")
    }
    needs: dict[str, set[str]] = {}
    for name, path in files.items():
        needs[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                needs[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                needs[name] |= names & files.keys() or {node.module}
    list(TopologicalSorter(needs).static_order())  # raises CycleError, which names them


def test_no_namespace_below_the_entrypoint():
    parts = ("models", "data", "training", "features", "xla_fsdp", "torch_fsdp", "gpu_fsdp")
    named = [p for p in sources() if p.relative_to(ROOT).parts[0] in parts]
    found = {str(p.relative_to(ROOT)) for p in named if re.search(r"\bNamespace\b", p.read_text())}
    # The second reads files of other programs, which hold their own.
    assert found <= {
        "training/command_line.py",
        "training/weights/files.py",
        "training/weights/find.py",
    }


def test_fast_files_start_no_training():
    """``make test-fast`` is for while one edits; nor have they tests that are long."""
    slow = {"train_tiny", "train_tiny_gpu", "run_program", "short_runs", "long"}
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    fast = {path: text for path, text in texts.items() if "\npytestmark = pytest.mark.fast" in text}
    assert fast
    for path, text in fast.items():
        imported = set(re.findall(r"\w+", " ".join(re.findall(r"^from .*", text, re.MULTILINE))))
        assert not imported & slow, path
        assert "\n@pytest.mark.long" not in text, path


def is_text_without_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the locale."""
    named = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if "encoding" in named or function == "tarfile.open":
        return False
    if name in ("read_text", "write_text") or named.get("text") or named.get("universal_newlines"):
        return True
    if not re.fullmatch("open|fdopen|(Named|Spooled)?TemporaryFile", name):
        return False
    words = [*(getattr(word, "value", None) for word in call.args), named.get("mode")]
    is_text = any(isinstance(word, str) and re.fullmatch("[rwax][+t]*", word) for word in words)
    return is_text or (function == "open" and len(call.args) == 1 and "mode" not in named)


def test_text_names_its_encoding():
    """Else it is the locale's: what one machine writes, another one cannot read."""
    found = "open(p); open(p, 'w'); p.open('a'); p.read_text(errors=''); run(p, text=True)"
    for line in found.split("; "):
        call = ast.parse(line, mode="eval").body
        assert isinstance(call, ast.Call)
        assert is_text_without_encoding(call), line
    for path in sources():
        if path.relative_to(ROOT).parts[0] != "tests":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    assert not is_text_without_encoding(node), f"{path}:{node.lineno}"
