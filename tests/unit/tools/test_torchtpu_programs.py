"""What a step of TorchTPU runs, by the log of the plugin that takes its programs."""

import pytest

from tools.compile_only.expected import Links
from tools.compile_only.explain import explain
from tools.compile_only.torchtpu import ProgramLog
from xla_fsdp.tpu import parse_topology

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


@pytest.fixture(params=[0, 3])
def step(request, tmp_path):
    """Its end may be in the middle of a line that a thread writes."""
    for number, head in enumerate((MAKE, UPDATE)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "module_7.name.cl_1.after_codegen.txt").write_text(head)
    start, end = len(BEFORE), len(BEFORE + STEP)
    more = request.param
    return ProgramLog(BEFORE + STEP + AFTER, (start + more, end + more), tmp_path)


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


NAMED = """\
HloModule step, is_scheduled=true

FileNames
1 "/usr/lib/python3.11/torch_tpu/export.py"
2 "[blocks.mlp.fc1_forward]"
3 "/usr/lib/python3.11/torch/_library/autograd.py"
4 "[optimizer_update]"

FunctionNames
1 "run_node"
2 "[no_file]"

FileLocations
1 {file_name_id=1 function_name_id=1 line=207 end_line=207 column=0 end_column=0}
2 {file_name_id=2 function_name_id=2 line=2 end_line=2 column=0 end_column=0}
3 {file_name_id=3 function_name_id=2 line=147 end_line=147 column=0 end_column=0}
4 {file_name_id=4 function_name_id=2 line=2 end_line=2 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}

ENTRY %step (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} add(%x, %x), metadata={stack_frame_id=2}, backend_config={"estimated_cycles":"10"}
  %b = f32[8]{0} add(%a, %a), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"10"}
  %c = f32[8]{0} add(%b, %b), metadata={stack_frame_id=4}, backend_config={"estimated_cycles":"10"}
  %d = f32[8]{0} add(%x, %x), metadata={stack_frame_id=1}, backend_config={"estimated_cycles":"10"}
}
"""


def test_module_is_the_name_of_a_frames_file_or_of_its_callers():
    costs = explain(NAMED, Links(parse_topology("v6e:2x2")))
    found = {cost.instruction: (cost.module, cost.phase) for cost in costs}
    block = ("blocks.mlp.fc1", "forward")
    unnamed = ("unknown", "")
    assert found == {"a": block, "b": block, "c": ("optimizer", "update"), "d": unnamed}
