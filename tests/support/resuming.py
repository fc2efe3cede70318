"""Stop a run after five steps, resume it and compare."""

import shutil

# Five steps an epoch on digits, of 4 tokens an image to be quick; dropout everywhere, so that
# random state counts.
EPOCHS_OF_5 = (
    "--patch_size 8 --batch_size 256 --num_epochs 4 --num_workers 1 --ckpt_epoch_interval 1"
).split()
DROPOUT = "--mlp_dropout 0.1 --att_dropout 0.1 --pos_dropout 0.1 --drop_path_rate 0.2".split()


def assert_resumes_at_step_7(train, folder, *flags, **how):
    """Train to the end, and again from step 7 on: bit for bit the same. Return both."""
    whole = train(folder / "whole", *flags, "--ckpt_step_interval", "7", **how)
    run = folder / "run"
    shutil.copytree(whole.ckpt_dir / "step_7", run / "step_7")
    resumed = train(run, *flags, **how)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)[7:]
    assert " at this step" not in resumed.stdout  # of the objective nothing has changed
    return whole, resumed
