"""The one kind of error that is the user's to mend."""


class UsageError(Exception):
    """A wrong argument, file or folder: ends the program with one line, exit code 2.

    The message says what is wrong and what to change.
    """


class StoppedBySignal(Exception):
    """Training ended early, as asked, with a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as a shell tells it of a program that died of the signal
