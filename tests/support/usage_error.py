"""A user's mistake, told by the program in one line."""

import sys

import run_vit_training
from tests.support.cli import need_xla


def told_in_one_line(capsys, *flags: object) -> str:
    """The line that the program ends with, run in this process, without its beginning."""
    try:
        code = run_vit_training.main(list(map(str, flags)))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    output = capsys.readouterr()
    assert output.out == "", output.out[-800:]
    (line,) = output.err.splitlines()
    assert line.startswith("run_vit_training.py: error: ")
    if " requires --backend xla, " in line:  # which it is where there is no torch_xla
        need_xla()
    assert sys.modules.get("torch_xla") is None
    return line.removeprefix("run_vit_training.py: error: ")
