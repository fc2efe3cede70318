"""make tpu-peer: that the peer is a ViT, and the table made of both sides' figures."""

import json

import pytest

from benchmarks import tpu_peer
from tests.cli import run_program

GIB = 2**30


def test_the_peer_computes_what_timm_does():
    """To bf16's rounding, with a class token and without; the peer's weights are all of timm's."""
    done = run_program("-m", "tests.stand_ins.peer_on_cpu")
    assert done.returncode == 0, done.stderr
    assert all(0 < error < 0.02 for error in json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
def test_both_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setitem(tpu_peer.ROWS, "ViT-Ti", ("vit_tiny_patch16_224", "v5e:2x2"))
    monkeypatch.setattr(tpu_peer, "BATCH", "64")
    kept = tpu_peer.Kept(tmp_path / "ours", tmp_path / "peer")
    for each in kept:
        each.mkdir()
    row = tpu_peer.compare("ViT-Ti", "bf16", kept)
    assert row[:2] == ["ViT-Ti", "bf16"]
    assert 0.2 < float(row[tpu_peer.TIME]) < 1.5
    assert 0.2 < float(row[tpu_peer.MEMORY]) < 1.5
    (ours,), peers = (
        [json.loads(report.read_text()) for report in each.iterdir()] for each in kept
    )
    assert len(peers) == 2
    for peer in peers:
        assert peer["parameters"] == ours["parameters"]
        assert peer["expected_unknown"] == 0


def test_rows_are_written_one_by_one(tmp_path, monkeypatch):
    """From figures that are kept; what is not asked for stays as it is."""
    monkeypatch.setattr(tpu_peer, "ROOT", tmp_path)
    monkeypatch.setattr(tpu_peer, "ROWS", {"A": ("vit_a", "v5e:2x2"), "B": ("vit_b", "v6e:2x2")})
    document = tmp_path / "page.md"
    document.write_text(f"Before.\n{tpu_peer.BEGIN}\n{tpu_peer.END}\nAfter.\n")

    def side(ms, gib, **more):
        return json.dumps({"expected_step_s": ms / 1e3, "peak_hbm_bytes": gib * GIB} | more)

    def write(row, commit, ours, peers):
        """``ours``: ms and GiB by residual stream; ``peers``: by softmax."""
        monkeypatch.setattr(tpu_peer, "commit", lambda *_: commit)
        folder, name = tmp_path / "runs" / "tpu-peer" / commit, "_".join(tpu_peer.ROWS[row])
        folder.mkdir(parents=True)
        for residual, figures in ours.items():
            told = side(*figures, fits=True, versions={"libtpu": "1"})
            (folder / f"{name}_{residual}.json").write_text(told)
            for scores, of_peer in peers.items():
                told = side(*of_peer)
                (folder / f"{name}_{residual}_scores_{scores}.json").write_text(told)
        words = ["tpu_peer.py", "--rows", row, "--document", str(document)]
        monkeypatch.setattr("sys.argv", words)
        tpu_peer.main()
        return document.read_text()

    write("B", "abc", {"fp32": (80, 2), "bf16": (60, 1)}, {"fp32": (110, 1), "bf16": (100, 2)})
    write("A", "def", {"fp32": (90, 2), "bf16": (70, 1)}, {"fp32": (100, 2), "bf16": (101, 1)})
    text = write("B", "123", {"fp32": (75, 2), "bf16": (60, 1)}, {"fp32": (90, 1), "bf16": (80, 2)})
    rows = [
        "| A | fp32 | 90 | 100 (fp32) | 0.90 | 2.00 | 2.00 | 1.00 | def, 1 |",
        "| A | bf16 | 70 | 100 (fp32) | 0.70 | 1.00 | 2.00 | 0.50 | def, 1 |",
        "| B | fp32 | 75 | 80 (bf16) | 0.94 | 2.00 | 2.00 | 1.00 | 123, 1 |",
        "| B | bf16 | 60 | 80 (bf16) | 0.75 | 1.00 | 2.00 | 0.50 | 123, 1 |",
    ]
    assert "\n".join(rows) in text
    assert "At most 0.8 of the peer's time in 2 of 4 rows, at most its memory in 4." in text
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert (tmp_path / "tpu_peer.png").read_bytes().startswith(b"\x89PNG")
