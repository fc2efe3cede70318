"""What a training starts from, what it takes over, and whether it may continue."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from data.source import FILES
from features.mae.config import MaeConfig
from gpu_fsdp.resolve_gpu import resolve
from run_vit_training import read_flags
from tests.fakes.backend import FakeBackend, FakeData
from tests.support.checkpoints import flip, left, truncate, write_checkpoint
from tests.support.cli import tiny
from tests.support.resolved import on_gpus
from training.checkpoints import inventory
from training.checkpoints.choose import AllDamaged, Candidates, Start, choose_start
from training.checkpoints.compatible import changes_since, check, check_continues, other_order
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import SavedRun, quiet_dcp, read_saved_run
from training.checkpoints.inventory import FoundCheckpoint, Inventory, digest
from training.errors import UsageError
from training.prepare import plan_start
from training.resolve import take_over
from training.schedule import Position, make_schedule
from training.start import confirm_start, newest_usable, set_aside_newer_checkpoints
from training.weights.describe import settings_of

pytestmark = pytest.mark.fast

EPOCH = 11
"""The batches of an epoch: 128 of 1438 images each."""


@pytest.fixture(autouse=True)
def without_a_job(monkeypatch):
    monkeypatch.delenv("RUN_JOB_ID", raising=False)


def words(ckpt_dir, *flags):
    return [*tiny(ckpt_dir), "--backend", "cuda", "--batch_size", "128", *map(str, flags)]


def planned(ckpt_dir, *flags):
    config, start, _ = plan_start(read_flags(words(ckpt_dir, *flags)).run)
    return config, start


def checked(ckpt_dir, *flags):
    """Where a run begins whose settings are those of its checkpoint, except for these flags."""
    config, start = planned(ckpt_dir, *flags)
    run = resolve(replace(config, backend="cuda"), read_flags(words(ckpt_dir)).torch)
    return check(start, run, FakeData())


def confirmed(ckpt_dir, *flags, plan=None):
    start, local = confirm_start(
        plan or Start("new", found=Inventory(alone=True)),
        on_gpus(words(ckpt_dir, *flags)),
        FakeBackend(),
    )
    assert local is None
    return start


def write(ckpt_dir, step, *flags, images_in_epoch=None, **how):
    """A checkpoint of a run with these flags, after so many batches of 128 images."""
    epoch, batches = divmod(step, EPOCH)
    images = batches * 128 if images_in_epoch is None else images_in_epoch
    how = {"classes": None, "order": FakeData().order()} | how
    arguments = on_gpus(words(ckpt_dir, *flags)).values
    position = Position(step, epoch, images)
    return write_checkpoint(ckpt_dir, step, position=position, arguments=arguments, **how)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    for step in (5, 10):
        write(folder, step)
    return folder


@pytest.fixture
def run(written, tmp_path):
    """The folder of a run with checkpoints of steps 5 and 10, in the middle of the first epoch."""
    return shutil.copytree(written, tmp_path / "run")


# -- which case it is, by what there is -----------------------------------------------


def found(step, **how):
    path = Path(f"run/step_{step}")
    return FoundCheckpoint(path, **{"saved": SavedRun(path, Position(step), {})} | how)


OLD = FoundCheckpoint(Path("run/step_5"))
BOTH = (found(10), OLD)
DAMAGED = (found(10, damage="of its files", saved=None), found(5, unreadable="no", saved=None))
LOCAL = {"local_ckpt_dir": "disk"}


@pytest.mark.parametrize(
    ("flags", "there", "kind", "steps"),
    [
        ({}, {}, "new", []),
        ({}, {"here": BOTH}, "here", [10, 5]),
        ({}, {"here": (DAMAGED[0], found(5))}, "here", [5]),
        ({"resume": "none"}, {}, "new", []),
        ({"resume": "none"}, {"here": BOTH, "is_restart": True}, "here", [10, 5]),
        ({"resume": "x"}, {"named": (found(7),), "named_is_here": False}, "elsewhere", [7]),
        ({"resume": "x"}, {"named": (found(7),), "here": BOTH}, "here", [7]),
        ({"resume": "x"}, {"named": BOTH, "names_one": False}, "here", [10, 5]),
        ({"resume_epoch": 2}, {"named": (found(22),), "here": BOTH}, "here", [22]),
        ({"resume_epoch": 2}, {"alone": True}, "new", []),
        ({"resume": "best"}, {"named": (found(5),), "here": BOTH}, "here", [5]),
        ({"resume": "best"}, {"here": BOTH, "alone": True}, "here", [10, 5]),
        ({"resume": "best"}, {"alone": True}, "new", []),
        ({"init_from": "weights.pt"}, {}, "weights", []),
        ({"init_from": "weights.pt"}, {"here": BOTH}, "here", [10, 5]),
        ({"pretrained": True}, {}, "weights", []),
        (LOCAL, {"here": DAMAGED}, "new", []),
        (LOCAL | {"resume": "x"}, {"here": DAMAGED, "is_restart": True}, "new", []),
    ],
)
def test_the_start_that_an_inventory_leaves(flags, there, kind, steps):
    start = choose_start(Inventory(**there), CheckpointConfig(ckpt_dir="run", **flags))
    assert start.kind == kind
    assert [path.name for path in start.candidates.paths] == [f"step_{step}" for step in steps]
    assert (start.saved is None) == (not steps)
    assert start.candidates.explicit == (start.found.named != () and start.found.names_one)
    newest = not flags.keys() & {"resume", "resume_epoch"} or start.found.is_restart
    assert start.resumes_newest == newest


@pytest.mark.parametrize(
    ("flags", "there", "told"),
    [
        ({}, {"here": DAMAGED}, "step_10 is damaged (of its files), and so are all older check"),
        (LOCAL | {"resume": "x"}, {"named": DAMAGED, "names_one": False}, "and so are all older"),
        ({"resume": "none"}, {"here": BOTH}, "--resume none, but run contains step_10 of an ear"),
        ({"resume": "x"}, {"named": DAMAGED[:1]}, "cannot read the checkpoint run/step_10: of its"),
        ({"resume": "x"}, {"named": DAMAGED[1:]}, "no"),
        ({"resume_epoch": 2}, {"here": BOTH}, "run has no checkpoint from the end of that epoch"),
        ({"resume_epoch": 2}, {"here": BOTH, "alone": True}, "from the end of that epoch"),
        ({"resume_epoch": 2}, {"is_restart": True}, "from the end of that epoch"),
        ({"resume": "best"}, {"here": BOTH}, "--resume best: run has no evaluated checkpoint"),
    ],
)
def test_an_inventory_with_nothing_to_start_from(flags, there, told):
    with pytest.raises(UsageError) as error:
        choose_start(Inventory(**there), CheckpointConfig(ckpt_dir="run", **flags))
    assert told in str(error.value)


# -- which case it is, in a folder ----------------------------------------------------


def test_a_new_run(tmp_path):
    config, start = planned(tmp_path / "run")
    assert (start.kind, start.saved) == ("new", None)
    assert config.model.embed_dim == 32
    assert confirmed(tmp_path / "run") == start
    assert not (tmp_path / "run").exists()


def test_the_newest_checkpoint_is_resumed_here_and_elsewhere(run, tmp_path):
    for folder, flags, kind in (
        (run, [], "here"),
        (tmp_path / "new", ["--resume", run], "elsewhere"),
        (tmp_path / "new", ["--resume", run / "step_10"], "elsewhere"),
    ):
        for start in (planned(folder, *flags)[1], confirmed(folder, *flags)):
            assert (start.kind, start.continues_from) == (kind, run / "step_10")
            assert start.saved.position == Position(10, 0, 1280)


def test_the_checkpoint_of_an_epochs_end(run):
    write(run, EPOCH)
    write(run, 12)
    shutil.copytree(run / "step_11", run / "step_33")  # passed over: it is no step 33
    assert planned(run, "--resume_epoch", 1)[1].continues_from == run / "step_11"
    with pytest.raises(UsageError, match="has no checkpoint from the end of that epoch"):
        planned(run, "--resume_epoch", 2)


def test_the_best_of_the_evaluated_checkpoints(run):
    with pytest.raises(UsageError, match="has no evaluated checkpoint"):
        planned(run, "--resume", "best")
    records = ((5, 1.0, 90.0), (10, 0.5, 80.0), (12, 0.1, 99.0))  # step 12 was not saved
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "val_loss": loss, "val_top1": top1}) + "\n"
            for step, loss, top1 in records
        )
    )
    assert planned(run, "--resume", "best")[1].continues_from == run / "step_5"
    assert planned(run, "--resume", "lowest_loss")[1].continues_from == run / "step_10"


def test_a_restart_of_the_same_job_resumes_its_newest_checkpoint(run, tmp_path, monkeypatch):
    elsewhere = write(tmp_path / "elsewhere", 7)
    (run / "run.json").write_text(json.dumps({"job": "vit"}))
    for flags in (["--resume", "none"], ["--resume", elsewhere], ["--resume_epoch", 3]):
        monkeypatch.setenv("RUN_JOB_ID", "vit")
        assert planned(run, *flags)[1].continues_from == run / "step_10"
        monkeypatch.setenv("RUN_JOB_ID", "another")
        if flags[1] == elsewhere:
            assert planned(run, *flags)[1].continues_from == elsewhere
        else:
            with pytest.raises(
                UsageError, match=r"contains step_10 of an earlier run|no checkpoint"
            ):
                planned(run, *flags)


def test_trained_weights_begin_a_run_once(tmp_path):
    """The same command continues the run when it is started again."""
    torch.save({"w": torch.ones(3)}, tmp_path / "weights.pt")
    flags = ["--init_from", tmp_path / "weights.pt"]
    _, plan, weights = plan_start(read_flags(words(tmp_path / "run", *flags)).run)
    assert (plan.kind, [*weights.tensors]) == ("weights", ["w"])
    assert confirmed(tmp_path / "run", *flags, plan=plan).kind == "weights"
    write(tmp_path / "run", 5)
    assert planned(tmp_path / "run", *flags)[1].kind == "here"
    assert confirmed(tmp_path / "run", *flags, plan=plan).kind == "here"
    ignored = f"note: ignoring --init_from {tmp_path}/weights.pt: resuming this run"
    assert checked(tmp_path / "run", *flags).notes == (ignored,)


# -- what is taken over from a checkpoint ---------------------------------------------


def test_model_objective_and_preprocessing_are_the_checkpoints(tmp_path):
    trained = "--objective mae --mask_ratio 0.5 --drop_path_rate 0.1 --mean 0.1 0.2 0.3".split()
    saved = write(tmp_path / "run", 5, *trained, "--class_token")
    bare = ["--backend", "cuda", "--resume", str(saved), "--ckpt_dir", str(tmp_path / "new")]
    config, *_ = plan_start(read_flags(bare).run)
    assert (config.model.embed_dim, config.model.depth, config.model.drop_path_rate) == (32, 2, 0.1)
    assert (config.objective.objective, config.of(MaeConfig).mask_ratio) == ("mae", 0.5)
    assert config.data.mean == (0.1, 0.2, 0.3)
    del (older := read_saved_run(saved)).arguments["crop_mode"]  # as before there was the flag
    again = read_flags(bare).run
    again = take_over(again, settings_of(older, again.data), saved)
    assert again.data.crop_mode == "center"
    config, *_ = plan_start(read_flags([*bare, "--drop_path_rate", "0", "--mask_ratio", "0.6"]).run)
    assert (config.model.drop_path_rate, config.of(MaeConfig).mask_ratio) == (0, 0.6)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--embed_dim 64", "was trained with --embed_dim 32, not 64: use the same"),
        ("--class_token", "was trained with --no-class_token, not --class_token: use the same"),
        (
            "--embed_dim 64 --init_values 0.1 --optimizer lion --linear_probe",
            "with --embed_dim 32, not 64; without --init_values, but this run has --init_values "
            "0.1; with --optimizer adamw, not lion; without --linear_probe, but this run has --l",
        ),
        ("--model vit_tiny_patch16_224", "was trained with --model vit_10b, not"),
        ("--objective mae", "was trained with --objective classify, not mae: use the same obj"),
    ],
)
def test_another_training_is_refused(flags, told, run, tmp_path):
    for folder, resume in ((run, []), (tmp_path / "new", ["--resume", run])):
        with pytest.raises(UsageError) as error:
            checked(folder, *resume, *flags.split())
        assert told in str(error.value)


def test_other_classes_and_weights_alone_are_refused(run):
    run_here = on_gpus(words(run))
    saved = replace(read_saved_run(run / "step_10"), classes=["cat", "dog"])
    with pytest.raises(UsageError, match="class 1 is dog in the checkpoint, cow in the data"):
        check_continues(saved, run_here, FakeData(classes=["cat", "cow"]))
    with pytest.raises(UsageError, match="use the --class_order or --class_map of the training"):
        check_continues(saved, run_here, FakeData(classes=["dog", "cat"]))
    alone = run / "step_12"
    with quiet_dcp():
        dcp.save({"model": {"w": torch.ones(1)}}, checkpoint_id=alone, no_dist=True)
    with pytest.raises(UsageError, match="contains only weights"):
        check_continues(replace(saved, path=alone), run_here, FakeData())


# -- damage ---------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [flip, truncate])
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(harm, run):
    harm(run / "step_10")
    start = confirmed(run)
    assert start.continues_from == run / "step_5"
    (warning,) = [note for note in start.notes if note.startswith("warning: ")]
    assert f"{run}/step_10 is damaged (" in warning
    assert warning.endswith(": resuming step_5 instead")


def test_a_damaged_checkpoint_that_was_asked_for(run):
    flip(run / "step_10")
    flags = ["--resume", run / "step_10"]
    with pytest.raises(
        UsageError, match=r"step_10 is damaged \(.*use another one, or use it unverified"
    ):
        confirmed(run, *flags)
    assert confirmed(run, *flags, "--no_verify_checkpoint").continues_from == run / "step_10"


def test_all_are_damaged(run, tmp_path):
    """By their sizes, which the plan sees, and by their checksums."""
    copy = shutil.copytree(run, tmp_path / "copy")
    for step in ("step_5", "step_10"):
        truncate(run / step)
        flip(copy / step)
    with pytest.raises(
        AllDamaged, match="and so are all older checkpoints: use --resume with another"
    ):
        planned(run)
    with pytest.raises(UsageError, match="step_10 is damaged"):
        confirmed(copy)
    # The hosts' own disks may have a step.
    _, start = planned(run, "--local_ckpt_dir", tmp_path / "disk")
    assert (start.saved, start.candidates.paths) == (None, ())
    assert len(start.candidates.passed_over) == 2


@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (lambda f: (f / ".metadata").write_bytes(b"garbage"), "cannot read the checkpoint"),
        (lambda f: (f / "__0_0.distcp").unlink(), "cannot read the checkpoint"),
        (lambda f: (f / "__0_0.distcp").write_bytes(b"short"), "cannot read the checkpoint"),
        (lambda f: (f / ".metadata").unlink(), "cannot read the checkpoint"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json: its save was"),
        (shutil.rmtree, "no such checkpoint folder"),
    ],
)
def test_a_checkpoint_that_cannot_be_read(lose, told, run, tmp_path):
    lose(run / "step_10")
    with pytest.raises(UsageError, match=told):
        planned(tmp_path / "new", "--resume", run / "step_10")


# -- what may change between the plan and the lock ------------------------------------


def test_a_checkpoint_that_the_first_start_of_the_job_still_wrote(run):
    """The new start has looked for a checkpoint before the one that is ending wrote its last."""
    _, plan = planned(run)
    write(run, 12)
    assert confirmed(run, plan=plan).continues_from == run / "step_12"


def test_the_plan_stands_if_nothing_has_changed(run, monkeypatch):
    """Nothing is read or decided again."""
    _, plan = planned(run)
    for name in ("inventory", "read_or_problem"):
        monkeypatch.delattr(inventory, name)
    assert confirmed(run, plan=plan) == plan
    (run / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(AttributeError, match="inventory"):
        confirmed(run, plan=plan)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: write(run, 12),
        lambda run: shutil.rmtree(run / "step_5"),
        lambda run: (shutil.rmtree(run / "step_10"), write(run, 10, "--seed", "1")),
        lambda run: (run / "step_10" / "manifest.json").unlink(),
        lambda run: (run / "run.json").write_text('{"job": "vit"}'),
        lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    ],
)
def test_what_changes_a_folders_digest(change, run):
    before = digest(run)
    (run / "profile.txt").write_text("")
    assert digest(run) == before
    change(run)
    assert digest(run) != before


def test_a_checkpoint_that_was_removed_meanwhile(run):
    _, plan = planned(run)
    for step in ("step_5", "step_10"):
        shutil.rmtree(run / step)
    with pytest.raises(UsageError, match="step_10 was removed while this run started"):
        confirmed(run, plan=plan)


# -- steps on the hosts' own disks ----------------------------------------------------


def test_a_newer_step_of_the_hosts_disks_is_resumed(run):
    part = SavedRun(Path("disk/part_0/step_12"), Position(12, 1, 128), {}, is_part=True)

    class Disks:
        def __init__(self, newest):
            self.newest = newest

        def resume(self, step, *, verify):
            """Return the newest step if it is newer than ``step``, and lines for the log."""
            return (part if self.newest > step else None), ["note: of the disks"]

    plan = Start("here", candidates=Candidates((run / "step_10", run / "step_5")))
    for newest, found in ((12, part.path), (9, run / "step_10")):
        start = newest_usable(plan, Disks(newest), verify=True)
        assert (start.kind, start.saved.path) == ("local" if newest == 12 else "here", found)
        assert start.continues_from == run / "step_10"
        assert start.notes == ("note: of the disks",)
    flip(run / "step_10")  # then a step of the disks that is newer than step 5
    start = newest_usable(plan, Disks(9), verify=True)
    assert start.kind == "local"
    assert start.notes[-1].endswith("resuming step_12 instead")


def test_a_copy_under_another_name(run):
    """A folder is believed by its content: step 99 is step 10, and set aside."""
    shutil.copytree(run / "step_10", run / "step_99")
    shutil.copytree(run / "step_5", run / "step_7")
    told = "step_99: it contains step 10, not step 99"
    for flags in ([], ["--resume", run]):
        assert planned(run, *flags)[1].continues_from == run / "step_10"
        start = confirmed(run, *flags)
        assert start.continues_from == run / "step_10"
        assert told in start.notes[0]
    (note,) = set_aside_newer_checkpoints(start, None, on_gpus(words(run)), is_main=True)
    assert f"moved step_99 to {run}/set_aside_1" in note
    with pytest.raises(UsageError, match=told):
        planned(run, "--resume", run / "set_aside_1" / "step_99")
    (run / "metrics.jsonl").write_text('{"step": 7, "val_loss": 1.0, "val_top1": 90.0}\n')
    with pytest.raises(UsageError, match="it contains step 5, not step 7"):
        planned(run, "--resume", "best")
    flip(run / "step_10")  # found by all processes together; then step 7, then step 5
    start = confirmed(run)
    assert start.continues_from == run / "step_5"
    assert "it contains step 5, not step 7" in start.notes[1]


def test_a_copy_that_the_user_has_named(run):
    """It is resumed as the step that it contains."""
    write(run, 3)
    copy = shutil.copytree(run / "step_5", run / "best_so_far")
    start, here = confirmed(run, "--resume", copy), on_gpus(words(run))
    assert (start.kind, start.saved.position.step) == ("here", 5)
    set_aside_newer_checkpoints(start, None, here, is_main=True)
    assert left(run) == [3, 5]
    assert left(run / "set_aside_1") == [10]


# -- going back -----------------------------------------------------------------------


def test_later_checkpoints_are_set_aside(run):
    flags = ["--resume", run / "step_5"]
    start, here = confirmed(run, *flags), on_gpus(words(run, *flags))
    assert set_aside_newer_checkpoints(start, None, here, is_main=False) == []
    (note,) = set_aside_newer_checkpoints(start, None, here, is_main=True)
    assert note.startswith(
        f"note: this run continues from an earlier step: moved step_10 to {run}/set_aside_1; "
    )
    assert left(run) == [5]
    assert left(run / "set_aside_1") == [10]
    assert set_aside_newer_checkpoints(start, None, here, is_main=True) == []


# -- where in the data ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "batch_size", "epoch_steps", "expected"),
    [
        (1280, 128, 11, Position(10, 0, 1280)),
        (1280, 256, 5, Position(10, 1, 0)),  # so many batches are no more in the epoch
        (640, 256, 5, Position(10, 0, 512)),
        (512, 128, 11, Position(10, 0, 512)),
        (0, 300, 4, Position(10, 0, 0)),
    ],
)
def test_position_with_any_batch_size(images, batch_size, epoch_steps, expected, tmp_path):
    """The same place in the data, and so in the schedule; steps are counted on."""
    saved = write(tmp_path, 10, images_in_epoch=images)
    run = on_gpus(words(tmp_path, "--batch_size", batch_size))
    start, data = Start("here", read_saved_run(saved)), FakeData()
    assert data.steps_of_epoch(batch_size) == epoch_steps
    assert check(start, run, data).at == expected
    assert check(Start("new"), run, data).at == Position()


def test_last_step_with_another_batch_size(tmp_path):
    """Step 10 is 5 batches of 128 images into epoch 2; of 256 it is 2 of 5."""
    flags = ["--num_epochs", 4, "--max_steps", 99, "--warmup_steps", 4]
    for batch_size, epoch_steps, last in ((128, 11, 10 + 44 - 16), (256, 5, 10 + 20 - 7)):
        run = on_gpus(words(tmp_path, *flags, "--batch_size", batch_size))
        at = Position(10, 1, 5 * 128 // batch_size * batch_size)
        schedule, last_step = make_schedule(run, epoch_steps, at)
        assert (last_step, schedule.total_steps) == (last, 4 * epoch_steps)
    run = on_gpus(words(tmp_path, *flags, "--max_steps", 12))
    assert make_schedule(run, 11, Position(10, 1, 640))[1] == 12
    assert make_schedule(run, 11, Position(20, 1, 640))[1] == 20  # it is past that already


@pytest.mark.parametrize(
    ("flags", "data", "told"),
    [
        ("", FakeData(), None),
        ("--batch_size 64", FakeData(), None),
        ("--data_source webdataset", FakeData(files="of tar files"), None),
        ("--seed 1", FakeData(), "--seed changed from 0 to 1"),
        ("--data_source webdataset --seed 1", FakeData(), "--seed changed from 0 to 1"),
        ("--aug_repeats 2", FakeData(), "--aug_repeats changed from 1 to 2"),
        ("--buckets 16x16", FakeData(), "--buckets changed from none to 16x16"),
        ("--data_source digits", FakeData(), "--data_source changed from folder to digits"),
        ("", FakeData(images=1437), "the number of training images changed from 1438 to 1437"),
        ("", FakeData(files="f" * 16), f"{FILES} changed from 0123456789abcdef to {'f' * 16}"),
    ],
)
def test_another_order_of_images_in_mid_epoch(flags, data, told, run):
    """It is refused: some images would be trained on twice. --restart_epoch restarts the epoch."""
    here, saved = on_gpus(words(run, *flags.split())), read_saved_run(run / "step_10")
    assert other_order(saved, here, data) == told
    at_the_end = replace(saved, position=Position(11, 1, 0))
    assert other_order(at_the_end, here, data) is None
    if told is None:
        assert check_continues(saved, here, data) is None
        return
    with pytest.raises(UsageError, match="step_10 was saved in the middle of epoch 1") as error:
        check_continues(saved, here, data)
    assert f"({told})" in str(error.value)
    restarted = on_gpus(words(run, *flags.split(), "--restart_epoch"))
    progress = check(Start("here", saved), restarted, data)
    assert progress.notes == (f"note: {told}: restarting epoch 1",)
    assert progress.at == Position(10, 0, 0)


def test_order_with_buckets_and_of_older_checkpoints(run):
    saved = read_saved_run(run / "step_10")
    older = replace(saved, order=None)
    assert other_order(older, on_gpus(words(run)), FakeData(images=7)) is None
    read = replace(older, arguments=saved.arguments | {"images_per_read": 64})
    assert (
        other_order(read, on_gpus(words(run)), FakeData())
        == "--images_per_read changed from 64 to none"
    )
    saved.arguments["buckets"] = ["16x16"]  # a batch's size decides which images it has
    here = on_gpus(words(run, "--buckets", "16x16", "--batch_size", 64))
    assert other_order(saved, here, FakeData()) == "--batch_size changed from 128 to 64"


def test_flags_of_the_objective_may_change(tmp_path):
    dino = "--objective dino --class_token --koleo_weight 0 --local_crop_size 8".split()
    saved = read_saved_run(write(tmp_path, 5, *dino))
    here = on_gpus(words(tmp_path, *dino, "--crop_sizes", "16x8"))
    assert changes_since(saved, here) == [
        "note: --crop_sizes changed from none to 16x8 at this step"
    ]
