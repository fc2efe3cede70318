"""``--profile``: record some steps with the backend's profiler, with steps and hooks named."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from training.backend import Profiler
from training.loop import Hook, StepDone
from training.schedule import Position

PROFILE_DIR = "profile"
HOOK = "hook "
"""What the names of hooks begin with."""


class StepProfiler(Hook):
    """Profiles the steps ``first`` to ``last``, counted from 1, and what is between them. Must be
    the first hook."""

    def __init__(self, steps: tuple[int, int], profiler: Profiler) -> None:
        self._first, self._last = steps
        self._profiler = profiler
        self._running = self._written = False
        self._step = contextlib.ExitStack()

    def before_step(self, step: int, *, is_first: bool) -> None:
        if self._first <= step <= self._last and not self._written:
            if not self._running:
                self._profiler.start()
                self._running = True
            self._step.enter_context(self._profiler.step(step))

    def after_step(self, done: StepDone) -> None:
        self._step.close()
        if done.at.step == self._last:
            self._write()

    def naming(self, hooks: Iterable[Hook]) -> list[Hook]:
        """Return hooks that call ``hooks`` under their names in the profile."""
        return [_NamedHook(hook, self._profiler.span) for hook in hooks]

    def finish(self, say: Callable[[str], None]) -> None:
        """Write the profile, even if training ended before ``last``, and log where it is."""
        self._write()
        steps = f"steps {self._first} to {self._last}"
        if self._written:
            say(f"profile of {steps}: {self._profiler.folder}")
        else:
            say(f"no profile: this run did not reach any of the {steps}")

    def _write(self) -> None:
        if self._running:
            self._step.close()
            self._profiler.stop()
            self._running, self._written = False, True


class _NamedHook(Hook):
    """Calls a hook under its name in the profile."""

    def __init__(self, hook: Hook, span: Callable[[str], AbstractContextManager]) -> None:
        self._hook, self._span, self._name = hook, span, f"{HOOK}{type(hook).__name__}"

    def reached(self, at: Position) -> None:
        with self._span(self._name):
            self._hook.reached(at)

    def before_step(self, step: int, *, is_first: bool) -> None:
        with self._span(self._name):
            self._hook.before_step(step, is_first=is_first)

    def after_step(self, done: StepDone) -> None:
        with self._span(self._name):
            self._hook.after_step(done)
