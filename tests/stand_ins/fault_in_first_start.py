"""The program with a fault of fault_at_step.py inside, on any backend, Megatron-FSDP too.

Only in a first start: what torchrun starts again is the program as it is. FAULT_RANKS names the
processes that have the fault, by default all.
"""

import os
import sys

import run_vit_training
from tests.stand_ins import fault_at_step


def main(argv: list[str]) -> int:
    if "megatron" in argv:
        from tests.stand_ins.megatron_on_cpu import without_cuda

        without_cuda()
    ranks = os.environ.get("FAULT_RANKS", "").split()
    spared = ranks and os.environ.get("RANK", "0") not in ranks
    if spared or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return run_vit_training.main(argv)
    return fault_at_step.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
