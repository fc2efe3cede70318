"""Trains as the command line after the first argument says; the compiled programs go to a folder.

The folder, the first argument, then holds what XLA made of each graph for one device.
"""

import os
import sys

DUMP = "--xla_dump_to={} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=SyncTensorsGraph.*"

if __name__ == "__main__":
    folder, *flags = sys.argv[1:]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DUMP.format(folder)}"
    import run_vit_training  # XLA reads its flags once

    sys.exit(run_vit_training.main(flags))
