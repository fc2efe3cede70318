"""make tpu-peer: that the peer is a ViT, and the table made of both sides' figures."""

import json

import pytest

from benchmarks import tpu_peer
from benchmarks.tpu_peer import Pair
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
    pair = tpu_peer.compare("ViT-Ti", "bf16", tpu_peer.Kept(tmp_path, tmp_path))
    assert pair.ours["parameters"] == pair.peer["parameters"]
    assert 0.2 < pair.time < 1.5
    assert 0.2 < pair.memory < 1.5
    assert pair.peer["expected_unknown"] == 0


def test_table_and_picture(tmp_path):
    def side(ms, gib, **more):
        return {"expected_step_s": ms / 1e3, "peak_hbm_bytes": gib * GIB} | more

    ours = side(80, 2, versions={"libtpu": "1"})
    pairs = [
        Pair("A", "fp32", ours, side(100, 2), "bf16"),
        Pair("B", "bf16", ours, side(90, 1), "fp32"),
    ]
    text = "\n".join(tpu_peer.table(pairs))
    assert "| A | fp32 | 80 | 100 (bf16) | 0.80 | 2.00 | 2.00 | 1.00 |" in text
    assert "| B | bf16 | 80 | 90 (fp32) | 0.89 | 2.00 | 1.00 | 2.00 |" in text
    assert "At most 0.85 of the peer's time in 1 of 2 rows, at most its memory in 1." in text
    tpu_peer.plot(pairs, tmp_path / "peer.png")
    assert (tmp_path / "peer.png").read_bytes().startswith(b"\x89PNG")
