"""What make tpu-calibrate makes of kept modules, against figures worked out by hand."""

import dataclasses
import json

import pytest

from benchmarks import tpu_calibrate
from benchmarks.common import rows_between, write_between
from benchmarks.tpu_calibrate import BEGIN, END, HEAD, Row, cells, judge, measure, table
from tests.tools.test_expected_step import fusion, module

pytestmark = pytest.mark.fast

SIZES = {"width": 1024, "depth": 2, "hidden": 4096, "batch": 1}
ROW = Row("v5e-4", "v5e:2x2", "tiny", 50.0, recomputed="attention", **SIZES)


@pytest.fixture
def kept(tmp_path):
    """A step of 3 ms, which at peak would take 1.2: 40 %."""
    (tmp_path / "graph_1.hlo").write_text(module(fusion("a", 3)))
    report = {"fits": True, "model_flops": 1.2e-3 * 197e12 * 4, "versions": {"libtpu": "1"}}
    report["mesh"] = {"dcn": 1, "fsdp": 4, "domain": 1, "tensor": 1}
    (tmp_path / "report.json").write_text(json.dumps({"commit": "abc", "report": report}))
    return tmp_path


@pytest.mark.parametrize(
    ("theirs", "again", "policy", "here"),
    [
        # In width squared: 4 + 4 + 4 of weights, 2 x 2048 / 1024 of attention.
        ("attention", 4, "selective", 1),  # of attention's two products the second
        ("attention, MLP", 4 + 4, "full", 4 + 4 + 4),
        ("all but qkv", 1 + 4 + 4, "full", 4 + 4 + 4),
        ("all", 4 + 4 + 4, "full", 4 + 4 + 4),
    ],
)
def test_what_is_recomputed_otherwise_is_counted_as_theirs(theirs, again, policy, here, kept):
    row = dataclasses.replace(ROW, recomputed=theirs)
    assert ["--grad_ckpt", policy] == row.flags[(at := row.flags.index("--grad_ckpt")) : at + 2]
    outcome = measure(row, kept, again=False)
    assert outcome.mfu == pytest.approx(40, rel=1e-3)
    assert outcome.comparable == pytest.approx(40 * (3 * 16 + here) / (3 * 16 + again), rel=1e-3)
    assert outcome.error == pytest.approx(outcome.comparable - 50)
    assert outcome.waiting == 0


def test_causal_attention_is_expected_by_half(kept):
    """Of 3 ms the kernels take 1, and all products but a billionth are attention's."""
    cost = '{"custom_call_config":{"cost_estimate":{"flops":197000000000,"bytes_accessed":8}}}'
    kernel = '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"'
    hlo = module(fusion("a", 2), f"{kernel}, backend_config={cost}")
    (kept / "graph_1.hlo").write_text(hlo)
    row = dataclasses.replace(ROW, recomputed="all", tokens=8192, weights=1e-9)
    outcome = measure(row, kept, again=False)
    assert outcome.mfu == pytest.approx(40, rel=1e-3)
    # In width squared: 12 of weights, 8 of causal attention; computed again all but fc2's 4.
    assert row.products == 1
    assert outcome.comparable == pytest.approx(100 * (1.2 / 2) / (3 - 1 / 2), rel=1e-3)


def test_causal_attention_that_was_counted_in_full_is_counted_as_computed():
    """Llama-3.1 8B at 8,192 tokens: 45.0 GFLOPs a token of weights, 12.9 of attention."""
    row = next(row for row in tpu_calibrate.ROWS if row.model == "Llama-3.1-8B")
    assert row.comparable == pytest.approx(45.46 * (45.0 + 12.9 / 2) / (45.0 + 12.9), rel=1e-3)
    assert ROW.comparable == ROW.mfu


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (None, "libtpu crashes"),
        (
            {"fits": False, "peak_hbm_bytes": 20 * 2**30, "hbm_capacity_bytes": 16 * 2**30},
            "does not fit by 4.0 GiB or more",
        ),
    ],
)
def test_a_row_that_is_not_known_says_why(tmp_path, report, why):
    (tmp_path / "report.json").write_text(json.dumps({"commit": "abc", "report": report}))
    assert measure(ROW, tmp_path, again=False) == why
    assert f"| {why} |" in "\n".join(table({tpu_calibrate.ROWS[0].name: cells(ROW, why)}))


def test_how_good_the_expectation_is():
    expected = (40.0, 45.0, 50.0, 52.0, 50.0, 46.0)
    rows = [dataclasses.replace(ROW, mfu=mfu) for mfu in (50.0, 51.0, 50.0, 52.0, 50.0, 50.0)]
    lines = "\n".join(judge(list(zip(rows, expected, strict=True))))
    assert "Over 6 rows: median error 2.0 points, largest 10.0" in lines
    # Rows 1, 3 and 5 give the factor, the middle one of 50/40, 50/50, 50/50; the others judge it.
    assert (
        "is 1.000; on the other rows the median error is then 4.0 points, without it 4.0" in lines
    )
    few = "\n".join(judge([(dataclasses.replace(ROW, mfu=m), 2 * m) for m in (10.0, 20.0, 30.0)]))
    assert "Over 3 rows: median error 20.0 points, largest 30.0, rank correlation 1.00." in few
    assert "factor" not in few


def test_rows_go_into_the_table_where_others_stay(kept, tmp_path):
    first, second, third = tpu_calibrate.ROWS[:3]
    outcome = measure(ROW, kept, again=False)
    others = [dataclasses.replace(outcome, comparable=mfu) for mfu in (60.0, 70.0)]
    found = zip((first, second, third), (outcome, *others), strict=True)
    written = table({row.name: cells(row, each) for row, each in found})
    document = tmp_path / "tpu.md"
    document.write_text(f"{BEGIN}{END}")
    write_between(document, BEGIN, END, written)
    rows = {f"{row[0]}-{row[1]}": row for row in rows_between(document, BEGIN, END)}
    assert list(rows) == [first.name, second.name, third.name]
    assert rows[first.name][-5:] == ["40.0", "37.7", "-12.3", "0.0", "abc, 1"]
    rows[second.name] = cells(second, "libtpu crashes")
    again = table(rows)
    assert again[:3] == written[:3]
    assert "| libtpu crashes |" in again[3]
    assert len(again) == 2 + 3  # of two rows nothing is said
    assert [row.name for row, _ in tpu_calibrate.compared(rows)] == [first.name, third.name]
    tpu_calibrate.plot(tpu_calibrate.compared(rows), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(row) == len(HEAD) for row in rows.values())


def test_flags_are_the_programs(tmp_path):
    from run_vit_training import read_flags

    for row in tpu_calibrate.ROWS:
        flags = read_flags(row.flags)
        assert flags.xla.tpu_topology == row.topology
        tokens = (flags.run.model.img_size[0] // 14) * (flags.run.model.img_size[1] // 14)
        assert tokens == row.tokens
        assert flags.run.model.embed_dim * flags.run.model.mlp_ratio == row.hidden
