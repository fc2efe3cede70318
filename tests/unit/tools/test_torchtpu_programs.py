"""What a step of TorchTPU runs, by the log of the plugin that takes its programs."""

import pytest

from tools.compile_only.torchtpu import ProgramLog

pytestmark = pytest.mark.fast

BEFORE = """\
compiled 0 5000000 0 400 0 0 400
buffer 0 400
executed 0 -> -> 0
compiled 1 7000000 400 400 400 1000 1800
"""
STEP = """\
buffer 1 100
buffer 2 400
executed 1 0 1 -> -> 2
freed 0
buffer 3 400
executed 1 2 1 -> 0 -> 3
buffer 4 50
executed 0 -> -> 4
freed 2
"""
AFTER = """\
buffer 5 100000
executed 0 -> -> 5
"""
UPDATE = (
    "HloModule update, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }, entry_"
)
MAKE = "HloModule make, is_scheduled=true, entry_computation_layout={()->f32[100]{0}}\n"


@pytest.fixture
def step(tmp_path):
    for number, head in enumerate((MAKE, UPDATE)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "module_7.name.cl_1.after_codegen.txt").write_text(head)
    end = len(BEFORE) + len(STEP)
    return ProgramLog(BEFORE + STEP + AFTER, (len(BEFORE), end), tmp_path)


def test_programs_of_the_step_are_counted(step):
    assert step.runs == {1: 2, 0: 1}
    assert [*step.runs] == [1, 0]
    assert step.compiled[1][0] == 7_000_000


def test_memory_is_that_of_what_lives_while_a_program_runs(step):
    """The first update takes the memory of its argument, the second must not: it is kept.

    First 100 of the second argument and 400 of argument and result alike, then twice 400; each
    time with 1,000 of temporaries. Later 50 more, and no temporaries.
    """
    assert step.peaks == {1: 100 + 2 * 400 + 1000, 0: 100 + 2 * 400 + 50}
