"""The errors a user can cause or mend, each with the exit status that scripts may rely on.

`main()` of every command prints such an error as one or two lines, without a traceback. Anything else is a bug.
"""


class ExpectedError(Exception):
    """Something foreseeable went wrong; the message names the thing, the value, what is allowed and the remedy."""

    exit_status = 1


class ConfigError(ExpectedError):
    """Bad usage or configuration."""

    exit_status = 2


class DataError(ExpectedError):
    """Data that is missing, truncated or altered."""

    exit_status = 3


class CheckpointError(ExpectedError):
    """No usable checkpoint where one was demanded, or one that does not fit."""

    exit_status = 4


class Stopped(ExpectedError):
    """Stopped on request with everything saved: the same command goes on from there (sysexits.h EX_TEMPFAIL)."""

    exit_status = 75
