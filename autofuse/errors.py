"""Every error that a user can meet. Each message says what was expected, what was found, what to type next.

Exit codes: usage errors end the command with 2; nothing here ever reaches the user's own script.
"""

from __future__ import annotations

OUT_OF_BOUNDS = "expected indices within their bounds"  # a kernel's IndexError; eager's own error replaces it


class AutofuseError(Exception):
    """Base of all errors of autofuse."""

    exit_code = 1


class UsageError(AutofuseError):
    """A wrong command line, setting or argument."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting that is unknown or out of range."""


class ShapeError(AutofuseError, ValueError):
    """Shapes that do not fit together, or symbols without a value."""


class FusionError(AutofuseError, ValueError):
    """A fusion node or pattern that is not valid."""


class UnknownOpError(FusionError, UsageError):
    """A pattern that names an operator nobody knows."""


class LoweringError(AutofuseError):
    """A node that has no loop form; ``code`` is the machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CompilerError(AutofuseError):
    """The system compiler is missing or refused the source."""


class CompilerNotReady(CompilerError):
    """It cannot work just now, whatever the source: it is missing or killed, or there is no room for its files."""


class DeviceError(AutofuseError):
    """A GPU's driver is missing, or refused a kernel."""


class StoreError(AutofuseError):
    """The store cannot be opened, read or written."""


class StoreVersionError(StoreError, UsageError):
    """The store was written by a newer autofuse."""


class FleetError(StoreError):
    """A fleet's server cannot be used; the host goes on with its own store.

    ``is_lasting``: trying again later would not help, a person has to change something on this host.
    """

    def __init__(self, message: str, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


class DaemonError(AutofuseError):
    """The daemon cannot be started, stopped or reached."""
