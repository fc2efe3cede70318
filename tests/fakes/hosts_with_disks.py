"""run_vit_training.py, each process as a host with a disk of its own: disks/host_<rank>, beside the
run's --ckpt_dir. HOSTS="2 3": the processes are these hosts; "0 0 1": two are on one host.
With --ckpt_dir_per_host, that disk is the current folder of the process, in which --ckpt_dir is.

Each save is done before the next one, as if there were more steps between them. KILLED="RANK STEP":
before that step, when the saves before are done, that process ends by SIGKILL. LATE_S: the losses
arrive from the device so many seconds late. ``--fsdp megatron`` runs without CUDA.
"""

import os
import signal
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import run_vit_training
from tests.fakes.megatron_on_cpu import without_cuda
from training import loop
from training.checkpoints.local_tier import LocalTier
from training.files import in_background
from training.logs.reports import Reports
from training.processes import exchange


def main(argv: list[str]) -> int:
    if "megatron" in argv:
        without_cuda()
    rank, step = map(int, os.environ.get("KILLED", "-1 0").split())
    train_step, save, writing = loop.train_step, LocalTier.save, []

    def save_after_the_last(tier, *args):
        wait(writing)
        figures = save(tier, *args)
        writing[:] = [tier._writing] if tier._writing else []
        return figures

    def killed(model, objective, backend, done, *args, **kwargs):
        if done + 1 == step:
            wait(writing)
            exchange.all_gather_object(None)
            if exchange.rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
        return train_step(model, objective, backend, done, *args, **kwargs)

    late_s, log = float(os.environ.get("LATE_S", "0")), Reports.log

    def log_late(reports, *record):
        *others, values, slowest = record
        arrived = in_background(lambda: (time.sleep(late_s), values.result())[1])
        log(reports, *others, arrived, slowest)

    if late_s:
        Reports.log = log_late
    loop.train_step, LocalTier.save = killed, save_after_the_last
    host = os.environ.get("REHEARSAL_WORKER", os.environ.get("RANK", "0"))
    if hosts := os.environ.get("HOSTS", "").split():
        host = hosts[int(host)]
    run = Path(argv[argv.index("--ckpt_dir") + 1])
    if "--ckpt_dir_per_host" in argv:
        disk = Path(os.environ["DISKS"], f"host_{host}")
        disk.mkdir(parents=True, exist_ok=True)
        os.chdir(disk)
        return run_vit_training.main(argv)
    return run_vit_training.main([*argv, "--local_ckpt_dir", f"{run.parent}/disks/host_{host}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
