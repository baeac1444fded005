"""How this program is installed, for messages that say how to install more of it."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from importlib import metadata
from typing import Final
from urllib.parse import unquote, urlsplit

NAME: Final = "agentscope-flywheel"


def requirement(extra: str = "") -> str:
    """What `pip install` takes for this program, with an extra, from where this installation came (PEP 610): a
    folder, an address, or an index by the name. Quoted for a shell."""
    wanted = f"[{extra}]" if extra else ""
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        origin = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
        url = origin["url"]
        if "dir_info" in origin:
            editable = "-e " if origin["dir_info"].get("editable") else ""
            return f"{editable}{shlex.quote(f'{unquote(urlsplit(url).path)}{wanted}')}"
        version_control = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
        return shlex.quote(f"{NAME}{wanted} @ {version_control}{url}")
    return shlex.quote(f"{NAME}{wanted}")
