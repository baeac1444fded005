"""Check of `notify`: what each target needs is there. Nothing is sent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config, NotifySettings
from flywheel.config.section import check_url


def check_notify(config: Config) -> Iterator[Finding]:
    """A finding for each entry of `notify`."""
    if not config.notify:
        yield Finding("notify", Result.SKIPPED, "nobody is notified: `notify` is not set")
    for each in config.notify:
        name = each.command[0] if each.command is not None else f"${each.url_env}" if each.url_env else "webhook"
        if (found := _missing(each)) is not None:
            yield Finding("notify", Result.FAILED, *found, subject=name)
        else:
            yield Finding("notify", Result.OK, ", ".join(each.on), subject=name)


def _missing(entry: NotifySettings) -> tuple[str, str] | None:
    """What is missing, and what to do about it."""
    if entry.command is not None:
        if shutil.which(entry.command[0]) is None:
            return f"{entry.command[0]} is no program that can be run", "Install it, or correct `command`."
        return None
    if not entry.target:
        return f"the variable {entry.url_env} is not set", "Put the webhook's URL into it."
    try:
        check_url(entry.target)
    except ValueError as error:
        return f"of the URL in {entry.url_env}: {error}", "Correct the variable."
    if entry.secret_env is not None and not os.environ.get(entry.secret_env):
        return f"the variable {entry.secret_env} is not set, so nothing is sent", "Put the key into it."
    return None
