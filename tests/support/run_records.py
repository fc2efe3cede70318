"""Records of made-up runs, whose truth is known, for the tools that read them."""

import json

from tools.goodput import main
from training.logs.records import EVENTS_FILE

BATCH_S, SAVE_S = 0.05, 0.4
"""What tests/fakes/slow_on_purpose.py takes more for a batch, and for a checkpoint."""


def goodput(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_events(folder, *events):
    folder.mkdir(exist_ok=True)
    named = [dict(zip(("event", "time", "step"), e, strict=False)) | e[3] for e in events]
    lines = map(json.dumps, named)
    (folder / EVENTS_FILE).write_text("\n".join(lines) + "\n" + '{"event": "sa')


def two_starts():
    """A start killed 30 s after step 300, whose last checkpoint is of step 200; and a second."""
    return [
        ("start", 1012.0, 0, {"process_started": 1000.0}),
        ("first_step", 1100.0, 1, {"seconds": 60.0}),  # 40 s of starting
        ("steps", 1298.0, 100, {"steps": 99, "waited": 18.0}),
        ("steps", 1498.0, 200, {"steps": 100, "waited": 20.0}),
        ("save", 1528.0, 200, {"seconds": 30.0, "written": True}),
        ("eval", 1578.0, 200, {"seconds": 50.0}),
        ("steps", 1678.0, 250, {"steps": 50, "waited": 10.0}),  # lost
        ("steps", 1778.0, 300, {"steps": 50, "waited": 10.0}),  # lost
        ("start", 1912.0, 200, {"process_started": 1900.0}),  # 122 s after the last sign of life
        ("first_step", 1950.0, 201, {"seconds": 10.0}),
        ("steps", 2148.0, 300, {"steps": 99, "waited": 0.0}),
        ("save", 2178.0, 300, {"seconds": 30.0, "written": True}),
        ("save", 2178.0, 300, {"seconds": 0.0, "written": False}),
        ("stop", 2178.0, 300, {"how": "completed"}),
        ("end", 2180.0, 300, {}),
    ]


STEPS = 300


def loss_at(step):
    return 2.0 / step + 0.01 * (step % 7)


def write_run(folder, *, steps=STEPS, every=1, lr=1e-3, **settings):
    """A run whose every measure is known; its events are those of ``two_starts``."""
    write_events(folder, *two_starts())
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            record = {"step": step, "epoch": 1, "loss": loss_at(step), "lr": lr}
            file.write(json.dumps(record | {"images_per_s": 100.0 + step % 3}) + "\n")
            if step % (steps // 3) == 0:
                found = {"val_top1": 10.0 + step / 10, "val_knn_10": 60.0, "val_probe": 70.0}
                file.write(json.dumps({"step": step, "epoch": 1, **found}) + "\n")
    content = {"arguments": {"lr": lr, "model": "vit", **settings}, "devices": 8}
    (folder / "run.json").write_text(json.dumps(content))
    return folder
