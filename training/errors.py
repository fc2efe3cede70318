"""The one kind of error that is the user's to mend."""


class UsageError(Exception):
    """A wrong argument, file or folder: ends the program with one line, exit code 2.

    The message says what is wrong and what to change.
    """
