"""Put faults into real runs, and print the tables of docs/evidence/reliability.md.

    python -m tests.reliability.faults        # or make faults, some hours on 2 cores

A try starts the program on digits, does something to it at a moment that the seed chooses, starts
the same command again until it completes, and compares metrics.jsonl with that of an uninterrupted
run, bit by bit. Results are saved in runs/faults/COMMIT: started again, it continues where it was.
The files of a try that is not survived stay there, too; the exit code is then 1.
"""

import argparse
import random
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import ROOT, commit
from tests.reliability.faults import damage, kills, table
from tests.reliability.faults.damage import damaged
from tests.reliability.faults.program import SETUPS
from tests.reliability.faults.tries import (
    Fault,
    NotSurvived,
    Reference,
    Skipped,
    Try,
    reference_run,
)

FAULTS = {
    "sigkill": Fault("SIGKILL at a random moment", kills.sigkill, tries=30),
    "sigterm": Fault("SIGTERM at a random moment", kills.sigterm, tries=10),
    "flipped_byte": Fault("a byte of the newest checkpoint flipped", damaged(damage.flip_byte)),
    "truncated": Fault("a file of the newest checkpoint truncated", damaged(damage.truncate)),
    "lost_file": Fault("a file of the newest checkpoint lost", damaged(damage.lose_file)),
    "lost_manifest": Fault("its manifest lost", damaged(damage.lose_manifest)),
    "disk_full": Fault("disk full while saving", damage.disk_full),
    "torchrun": Fault("torchrun killed with SIGKILL", kills.torchrun_killed, several=True),
    "part_complete": Fault(
        "SIGKILL as a host's part is complete", kills.killed_as_a_part_is_complete, groups=1
    ),
    "host_lost": Fault(
        "a host and its disk lost", kills.lost(kills.host), tries=10, in_one_run=10, groups=1
    ),
    "slice_lost": Fault(
        "a slice or replica and its disks lost",
        kills.lost(kills.group),
        tries=10,
        in_one_run=10,
        groups=2,
    ),
    "peers_lost": Fault(
        "a host and its peer lost, with their disks",
        kills.lost(kills.host_and_peer),
        tries=10,
        in_one_run=10,
        groups=1,
    ),
    "storage_away": Fault(
        "a host and its disk lost while storage is away",
        damage.storage_away,
        tries=10,
        in_one_run=3,
        groups=1,
    ),
}
CODE = (
    "run_vit_training.py check_python.py config_fields.py tpu_machines.py features training "
    "models data tpu_attention xla_fsdp torch_fsdp gpu_fsdp launch tests/reliability/faults "
    "tests/support/cli.py tests/fakes/megatron_on_cpu.py "
    "tests/fakes/hosts_with_disks.py tests/fakes/pod_of_hosts.py"
).split()
"""What the results depend on."""
Job = tuple[str, str, list[int]]
"""The fault, the backend and the numbers of the tries in one run."""


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what has been started
    folder = args.results / commit(*CODE)
    folder.mkdir(parents=True, exist_ok=True)
    results = table.Results(folder / "results.jsonl")
    backends = []
    for backend in args.backends:
        if reason := SETUPS[backend].why_not():
            print(f"{SETUPS[backend].title} is left out: {reason}", file=sys.stderr)
        else:
            backends.append(backend)
    jobs = deque(to_do(args, backends, results))
    references = {}
    for backend in dict.fromkeys(backend for _, backend, _ in jobs):
        print(f"the uninterrupted run on {SETUPS[backend].title} ...", flush=True)
        references[backend] = reference_run(SETUPS[backend], folder / f"reference-{backend}")
    tries, seconds = sum(len(numbers) for *_, numbers in jobs), 0.0
    for fault, backend, numbers in jobs:
        again = (FAULTS[fault].starts - 1) * len(numbers)
        seconds += references[backend].total_s + again * references[backend].first_step_s
    print(f"{tries} tries, about {seconds / 60:.0f} minutes", flush=True)
    lost = 0
    with tqdm(total=tries, unit="try", smoothing=0.05, dynamic_ncols=True) as bar:
        while jobs:
            fault, backend, numbers = jobs.popleft()
            bar.set_description(f"{fault}, {backend}")
            of_try = folder / f"{backend}-{fault}-{args.seed}-{numbers[0]}"
            found = attempt((fault, backend, numbers), args.seed, of_try, references[backend])
            if left := numbers[len(found) :]:
                jobs.appendleft((fault, backend, left))
            for result in found:
                results.add(result)
                bar.update()
                if result.survived is False:
                    lost += 1
                    bar.set_postfix({"not survived": lost})
                    tqdm.write(
                        f"NOT SURVIVED: {fault} on {backend}, try {result.number}, seed "
                        f"{args.seed}: {result.moment}: {result.problem}\n  see {of_try}"
                    )
    return report(args, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    backends = [name for name in SETUPS if name != "alone"]
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        default=[*FAULTS],
        metavar="FAULT",
        help=f"of {', '.join(FAULTS)}; default: all",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=SETUPS,
        default=backends,
        metavar="BACKEND",
        help=f"of {', '.join(SETUPS)}; default: {' '.join(backends)}",
    )
    parser.add_argument(
        "--tries",
        type=int,
        metavar="N",
        help="of each fault on each backend; default: 30 of sigkill, 10 of "
        "sigterm and of lost hosts, 3 or 1 of the others",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random; default: 0")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "runs" / "faults",
        help="for results and logs; default: runs/faults",
    )
    return parser.parse_args()


def to_do(args: argparse.Namespace, backends: list[str], results: table.Results) -> Iterator[Job]:
    """Yield the tries that have no result."""
    for name, fault in FAULTS.items():
        for backend in backends if name in args.faults else ():
            if not fault.fits(SETUPS[backend]):
                continue
            numbers = [
                number
                for number in range(args.tries or fault.tries)
                if (name, backend, number, args.seed) not in results
            ]
            for first in range(0, len(numbers), fault.in_one_run):
                yield name, backend, numbers[first : first + fault.in_one_run]


def attempt(job: Job, seed: int, folder: Path, reference: Reference) -> list[table.Result]:
    """Make the tries of one run, whatever comes of it; its folder stays if it is not survived."""
    fault, backend, numbers = job
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = Try(SETUPS[backend], numbers, random.Random(folder.name), folder, reference)
    start = time.monotonic()

    def result(number: int, survived: bool | None, moment: str, **more: Any) -> table.Result:
        return table.Result(fault, backend, number, seed, survived, moment, **more)

    try:
        ends = FAULTS[fault].attempt(run)
    except Skipped as skipped:
        results = [result(number, None, str(skipped)) for number in numbers]
    except NotSurvived as problem:
        seconds = (time.monotonic() - start) / len(numbers)
        about = {"problem": str(problem), "seconds": seconds}
        return [result(number, False, run.moment, **about) for number in numbers]
    else:
        ends = ends if isinstance(ends, list) else [ends]
        seconds = (time.monotonic() - start) / len(ends)
        results = [
            result(number, True, seconds=seconds, **asdict(end))
            for number, end in zip(numbers, ends, strict=False)
        ]
    shutil.rmtree(folder)
    return results


def report(args: argparse.Namespace, results: table.Results) -> int:
    """Print the tables; return exit code 1 if a try was not survived."""
    rows = results.rows(args.seed)
    for lines in table.tables(rows, FAULTS):
        print("\n".join([*lines, ""]))
    print(table.made_by(commit(*CODE)))
    lost = [result for found in rows.values() for result in found if result.survived is False]
    for result in lost:
        print(
            f"not survived: {result.fault} on {result.backend}, try {result.number}: "
            f"{result.moment}: {result.problem}",
            file=sys.stderr,
        )
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
