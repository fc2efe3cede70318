"""A process that stops answering in a run of several: the others end with a code, none waits for
ever. With gloo, also in the graph of a whole step: XLA's plugin for the CPU has no collectives
between processes."""

import signal

import pytest

from tests.reliability.faults.program import last_step_printed, running
from tests.support.cli import ROOT, tiny

pytestmark = pytest.mark.long

FOR_EVER = "--max_steps 1000000 --num_epochs 1000000 --log_step_interval 1 --step_timeout_s 10"
FORMS = {"fsdp2": [], "simple": ["--compile"]}


@pytest.mark.parametrize("form", FORMS)
def test_a_process_that_is_late(form, tmp_path):
    flags = ["--backend", "cuda", "--fsdp", form, *FORMS[form], *FOR_EVER.split()]
    command = [str(ROOT / "launch" / "torchrun.sh"), *tiny(tmp_path / "run"), *flags]
    with running(command, tmp_path / "log") as program:
        assert program.wait_until(lambda: last_step_printed(program.output()) > 2), program.output()
        program.signal(signal.SIGSTOP, [program.ranks()[1].pid])
        assert program.wait()
        output = program.output()
        assert program.root.returncode == 1, output
        assert "Timeout (0:00:10)!" in output
        assert not program.wait_for_all(60)
