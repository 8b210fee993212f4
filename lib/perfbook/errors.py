"""One base error. Its message is a single line: what is wrong, where, and what to do next."""

from __future__ import annotations


class PerfbookError(Exception):
    """Something perfbook can explain; shown as one line, never as a traceback.

    Attributes
    ----------
    exit_code : int
        What the ``perfbook`` command exits with: 1, something failed; 2, the input was wrong.
    """

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: in a notebook the message stands alone, without a page of frames."""
        return [f"{type(self).__name__}: {self}"]


class BadInput(PerfbookError):
    """A parameter, file or argument that cannot be used; nothing was started."""

    exit_code = 2


class ServerFailed(PerfbookError):
    """The server did not start, died, hung, or is not there."""


class MeasurementFailed(PerfbookError):
    """Nothing could be measured, or what was measured cannot be used."""


class OutOfOrder(PerfbookError):
    """A notebook needs what an earlier one records; the message names the one to run first."""
