"""Faults that are signals at random moments, to all processes of a run or to one of them."""

import itertools
import shutil
import signal
import time
from collections.abc import Callable

from tests.reliability.faults.program import (
    SAVE_INTERVAL,
    STEPS,
    Running,
    Setup,
    last_step,
    last_step_printed,
    newest_step,
    running,
)
from tests.reliability.faults.tries import (
    Loss,
    NotSurvived,
    Survived,
    Try,
    last_words,
    newest_folder_step,
    unfinished_save,
)
from training.checkpoints.format import is_complete
from training.checkpoints.inventory import step_folders, step_of

_ATTEMPTS = 8
"""How often a moment that comes when the run has ended is drawn again."""
_ENDS_WITHIN_S = 120.0
"""The seconds in which what is left must end after a process was killed; torchrun waits 30 s for
processes that it ends."""
_ORPHANS_END_WITHIN_S = 15.0
_WATCH_S = 0.002
IN_TRAINING = 0.7
"""The share of a run's time in training in which its hosts are lost, about."""


def sigkill(attempt: Try) -> Survived:
    """Kill without time for anything: in training, while a checkpoint is written, at the start."""
    return _signalled(attempt, signal.SIGKILL, _moment(attempt.number))


def sigterm(attempt: Try) -> Survived:
    """Ask the run to stop, and then start it again."""
    return _signalled(
        attempt, signal.SIGTERM, "start-up" if attempt.number % 10 == 9 else "at random"
    )


def _moment(number: int) -> str:
    """Choose a moment: of ten, three are while a checkpoint is written, one before step 1."""
    return {1: "saving", 4: "saving", 7: "saving", 9: "start-up"}.get(number % 10, "at random")


def _signalled(attempt: Try, number: int, moment: str) -> Survived:
    victims = _victims(attempt, number)
    victim = victims[(attempt.number + attempt.number // 10) % len(victims)]
    for again in range(_ATTEMPTS):
        attempt.start_anew()
        with running(attempt.command(), attempt.log("first")) as program:
            reached = _wait_for(moment, attempt, program, 0.7**again)
            pids = _pids(program, victim, moment) if reached else []
            if not pids or program.ended():
                continue
            program.signal(number, pids)
            saving = unfinished_save(attempt.run)
            step = last_step(attempt.run)
            if moment == "saving" and number == signal.SIGKILL and not saving:
                continue
            attempt.moment = (
                f"{signal.Signals(number).name} to {victim}, "
                f"{'while saving' if saving else moment}, after step {step}"
            )
            _let_end(attempt, program, number, victim)
            return attempt.resume_after(step, while_saving=saving)
    raise NotSurvived(f"no moment found in {_ATTEMPTS} starts: {last_words(program.output())}")


def _wait_for(moment: str, attempt: Try, program: Running, share: float) -> bool:
    """Wait for the moment, in training after the first step of this start; False if it does not
    come. ``share`` makes it come earlier."""
    rng, times = attempt.rng, attempt.reference
    if moment == "start-up":
        time.sleep(rng.uniform(0, times.first_step_s * share))
        return not program.ended()
    if not program.wait_until(lambda: last_step_printed(program.output()) > 0):
        return False
    program.members()  # known, they are killed at once
    if moment == "at random":
        time.sleep(rng.uniform(0, (times.total_s - times.first_step_s) * share))
        return not program.ended()
    before = newest_folder_step(attempt.run) + SAVE_INTERVAL * rng.randrange(STEPS // SAVE_INTERVAL)
    delay = rng.choice([0.0, rng.uniform(0, 0.05)])

    def begun() -> bool:
        return newest_folder_step(attempt.run) > before and unfinished_save(attempt.run)

    reached = program.wait_until(begun, _WATCH_S)
    time.sleep(delay)
    return reached


def _victims(attempt: Try, number: int) -> list[str]:
    """Choose who may be killed: all, as by a scheduler, or one process alone."""
    several = attempt.setup.processes > 1
    names = ["all", *(["torchrun", "rank 0", "rank 1"] if several else ["rank 0"])]
    if number == signal.SIGKILL:  # SIGTERM they take from their parent only
        names.append("a loader process")
    return names


def _pids(program: Running, victim: str, moment: str) -> list[int]:
    """Return the processes that are meant; all of them where that one has not been started yet."""
    if victim == "torchrun":
        return [program.root.pid]
    if victim == "a loader process":
        found = program.loaders()[:1]
    elif victim == "all":
        found = []
    else:
        rank = program.ranks().get(int(victim.removeprefix("rank ")))
        found = [rank] if rank else []
    return [member.pid for member in found or program.members()]


def _let_end(attempt: Try, program: Running, number: int, victim: str) -> None:
    """Wait for the others to end by themselves, where whoever starts the run again does."""
    if number == signal.SIGKILL and victim in ("all", "torchrun"):
        return  # a scheduler starts it again at once
    if left := program.wait_for_all(_ENDS_WITHIN_S):
        raise NotSurvived(f"{len(left)} processes had not ended {_ENDS_WITHIN_S:.0f} s later")


def torchrun_killed(attempt: Try) -> Survived:
    """Kill torchrun alone: its processes have to end by themselves, and soon."""
    for again in range(_ATTEMPTS):
        attempt.start_anew()
        with running(attempt.command(), attempt.log("first")) as program:
            if not _wait_for("at random", attempt, program, 0.5 * 0.7**again):
                continue
            step = last_step(attempt.run)
            program.signal(signal.SIGKILL, [program.root.pid])
            attempt.moment = f"SIGKILL to torchrun after step {step}"
            if left := program.wait_for_all(_ORPHANS_END_WITHIN_S):
                raise NotSurvived(
                    f"{len(left)} processes still live {_ORPHANS_END_WITHIN_S:.0f} s later"
                )
            if newest_step(attempt.run) == STEPS:
                continue  # they had come to their end
        return attempt.resume_after(step)
    raise NotSurvived(f"no moment found in {_ATTEMPTS} starts")


# -- hosts, with their disks ----------------------------------------------------------


def host(setup: Setup, number: int) -> list[int]:
    """Choose one, for a try of this number."""
    return [number % setup.processes]


def host_and_peer(setup: Setup, number: int) -> list[int]:
    """Choose a host, and the one with the other copy of its part: of the next group."""
    first = number % setup.processes
    away = setup.group_size if setup.groups > 1 else 1
    return [first, (first + away) % setup.processes]


def group(setup: Setup, number: int) -> list[int]:
    """Choose all hosts of a group."""
    first = number % setup.groups * setup.group_size
    return [*range(first, first + setup.group_size)]


def lost(choose: Callable[[Setup, int], list[int]]) -> Callable[[Try], list[Survived]]:
    """Return what kills some hosts at random moments of a run, and deletes their disks."""

    def attempts_of(attempt: Try) -> list[Survived]:
        def lose(number: int) -> Loss | None:
            with attempt.running(f"start_{number}") as program:
                if not wait_in_training(attempt, program):
                    return None
                return kill_hosts(attempt, program, choose(attempt.setup, number))

        return losses(attempt, lose)

    return attempts_of


def losses(attempt: Try, lose: Callable[[int], Loss | None], *flags: str) -> list[Survived]:
    """Lose hosts in one run, once for each number of the try, then complete and compare the run.

    ``lose`` starts it and returns the loss, or None if the run had come to its end.
    """
    found: list[Loss] = []
    for _ in range(_ATTEMPTS):
        for number in attempt.numbers:
            if not (loss := lose(number)):
                break
            found.append(loss)
        if found:
            break
        attempt.start_anew()
    else:
        raise NotSurvived(f"{_ATTEMPTS} runs ended before a host could be lost")
    attempt.complete(*flags)
    attempt.compare()
    return [attempt.survived(loss) for loss in found]


def wait_in_training(attempt: Try, program: Running, share: float = IN_TRAINING) -> bool:
    """Wait for a random moment of training, so early that all losses of the try have room in this
    share of it; False if the run has come to its end."""
    if _wait_for("at random", attempt, program, share / len(attempt.numbers)):
        return True
    if program.root.poll() != 0:
        raise NotSurvived(f"no step was trained: {last_words(program.output())}")
    return False


def kill_hosts(attempt: Try, program: Running, hosts: list[int]) -> Loss | None:
    """Kill hosts and delete their disks; return None if the run had come to its end."""
    found = program.ranks()
    if program.ended() or not found.keys() >= set(hosts):
        return None
    lost_at = time.time()
    program.signal(signal.SIGKILL, [found[host].pid for host in hosts])
    step = last_step(attempt.run)
    loss = Loss(lost_at, step, f"SIGKILL to hosts {hosts}, after step {step}")
    attempt.moment = loss.moment
    _let_end(attempt, program, signal.SIGKILL, "rank")
    for each in hosts:
        shutil.rmtree(attempt.disk(each), ignore_errors=True)
    return None if newest_step(attempt.run) == STEPS else loss


def killed_as_a_part_is_complete(attempt: Try) -> Survived:
    """Kill as soon as a host's own disk has a part of some step: the log must have that step."""
    for _ in range(_ATTEMPTS):
        attempt.start_anew()
        after = attempt.rng.randrange(2, STEPS - 4)

        def complete(after: int = after) -> bool:
            parts = attempt.disk(0).parent.glob("host_*/part_*")
            found = itertools.chain(*map(step_folders, parts))
            return any(step_of(part) >= after and is_complete(part) for part in found)

        with running(attempt.command(), attempt.log("first"), **attempt.setup.variables) as program:
            if not program.wait_until(lambda: last_step(attempt.run) > 0):
                continue
            program.members()
            if not program.wait_until(complete, _WATCH_S):
                continue
            program.signal(signal.SIGKILL)
            step = last_step(attempt.run)
            attempt.moment = f"SIGKILL to all as a part was complete, after step {step}"
        return attempt.resume_after(step)
    raise NotSurvived(f"no moment found in {_ATTEMPTS} starts")


def stop_after(attempt: Try, program: Running, step: int) -> int:
    """Send SIGKILL to all once a step is in the log; return the last step that is."""
    if not program.wait_until(lambda: last_step(attempt.run) >= step):
        raise NotSurvived(f"step {step} was not reached: {last_words(program.output())}")
    program.signal(signal.SIGKILL)
    return last_step(attempt.run)
