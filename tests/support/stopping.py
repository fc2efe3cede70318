"""Stop a run by a signal."""

from tests.support.cli import run_program, tiny

# Nine steps, two epochs, dropout; loader processes from where the test says so.
RUN = "--patch_size 8 --batch_size 256 --num_epochs 3 --max_steps 9 --mlp_dropout 0.1".split()
ALONE = "--backend cuda --num_workers 1".split()  # the quickest: one process, nothing to compile


def stop(monkeypatch, ckpt_dir, signal_at, *flags, processes=1):
    """The run of ``flags`` with signals in a step: the finished program."""
    monkeypatch.setenv("SIGNAL_AT", signal_at)
    words = ["-m", "tests.fakes.signal_at_step", *tiny(ckpt_dir), *RUN, *flags]
    return run_program(*words, processes=processes)
