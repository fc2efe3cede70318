"""Python reads this at its start where the folder is on PYTHONPATH."""

import os
import sys

if "REHEARSAL_WORKER" in os.environ:
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    _here = Path(__file__).resolve().parent
    if "rehearsal" not in sys.modules:
        _spec = spec_from_file_location(
            "rehearsal", _here / "__init__.py", submodule_search_locations=[str(_here)]
        )
        sys.modules["rehearsal"] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["rehearsal"])
    from rehearsal import machine

    machine.stand_in()
