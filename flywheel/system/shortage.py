"""What a process or its system lacks. An error about that is no fault of the work that met it, and no defect."""

from __future__ import annotations

import errno
import os
from typing import Final

_REMEDIES: Final = {
    errno.EMFILE: "Raise its limit of open files: `LimitNOFILE=` of a unit, `--ulimit nofile=` of a container, "
    "`ulimit -n` of a shell.",
    errno.ENFILE: "Raise fs.file-max of the system, or end what holds many files open.",
    errno.ENOMEM: "Free memory, or raise its limit (`MemoryMax=` of a unit).",
    errno.ENOSPC: "Free some space on that disk.",
    errno.EDQUOT: "Free some space, or raise the quota.",
}


def shortage_of(error: BaseException) -> tuple[str, str] | None:
    """What was missing when an error, or what it follows from, arose, and what to do; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            return os.strerror(cause.errno).lower(), _REMEDIES[cause.errno]
        cause = cause.__cause__ or cause.__context__
    return None
