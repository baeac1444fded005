"""Checks of user-chosen arguments of vLLM's server: `serving.extra_args`, and the available parsers."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flywheel.config import ServingSettings
from flywheel.errors import ServeError
from flywheel.serving.server.model_parsers import Parsers, parsers_of

OWN_ARGUMENTS: Final = {
    "--api-key": "serving.api_key_env",
    "--host": "serving.host",
    "--port": "serving.port",
    "--model": "model.base",
    "--max-loras": "serving.max_loras",
    "--max-lora-rank": "serving.max_lora_rank",
    "--max-model-len": "serving.max_model_len",
    "--served-model-name": "model.base",
    "--tool-call-parser": "serving.tool_call_parser",
    "--reasoning-parser": "serving.reasoning_parser",
}
"""Arguments that are set by a configuration key; given twice, vLLM would silently use the last."""
BREAKING_ARGUMENTS: Final = {
    "--lora-modules": "the adapters that were deployed would not be loaded",
    "--no-enable-lora": "no adapter could be served",
    "--uds": "serving.urls would not reach the server",
}
"""Forbidden arguments, with the reason."""
DATA_PARALLEL: Final = ("--data-parallel", "-dp", "--api-server-count", "-asc")
_REGISTRIES: Final = {
    "serving.tool_call_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", "--tool-parser-plugin"),
    "serving.reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER", "--reasoning-parser-plugin"),
}
"""For each setting: vLLM's registry of parsers, and the argument that adds others."""
_ATTEMPTED: Final = "start the inference server"


def check_arguments(extra_args: Sequence[str]) -> None:
    """Raise ServeError for arguments that other settings control or that break a promise of Flywheel."""
    for argument in extra_args:
        # As vLLM parses them: underscores equal dashes, and unambiguous prefixes are accepted.
        flag = _flag(argument)
        if len(flag) > 2 and flag.startswith("--"):
            for own, key in OWN_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(_ATTEMPTED, f"serving.extra_args holds {flag}", f"Set {key} instead.")
            for own, why in BREAKING_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(_ATTEMPTED, f"serving.extra_args holds {flag}: {why}", "Leave it out.")
        if flag.startswith(DATA_PARALLEL):
            raise ServeError(
                _ATTEMPTED,
                f"serving.extra_args holds {flag}, and an adapter would be loaded into one of its replicas only",
                "Start one server per replica and name each in serving.urls.",
            )


def has_tls(extra_args: Sequence[str]) -> bool:
    return any(_flag(argument) == "--ssl-certfile" for argument in extra_args)


def chat_arguments(base: str, serving: ServingSettings) -> list[str]:
    """vLLM's arguments for chats: the parsers of a base model, and the user's own. Raises ServeError."""
    parsers = parsers_of(base, serving.tool_call_parser, serving.reasoning_parser)
    return [*_parser_arguments(parsers, serving.extra_args), *serving.extra_args]


def _parser_arguments(parsers: Parsers, extra_args: Sequence[str]) -> list[str]:
    """vLLM's arguments for the parsers. Raises ServeError for a parser that the installed vLLM does not have."""
    for setting, name in zip(_REGISTRIES, parsers, strict=True):
        known = _known(setting, extra_args)
        if name and known and name not in known:
            raise ServeError(
                _ATTEMPTED,
                f"the installed vLLM has no parser called {name}",
                f"Set {setting} to `none`, or to one of {', '.join(sorted(known))}.",
            )
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tool] if parsers.tool else []
    return arguments + (["--reasoning-parser", parsers.reasoning] if parsers.reasoning else [])


def _known(setting: str, extra_args: Sequence[str]) -> frozenset[str]:
    """The parsers in vLLM's source (importing vLLM takes seconds); none if they cannot be determined."""
    package, variable, plugin = _REGISTRIES[setting]
    found = importlib.util.find_spec("vllm")
    if found is None or not found.origin or any(_flag(argument) == plugin for argument in extra_args):
        return frozenset()
    try:
        tree = ast.parse((Path(found.origin).parent / package / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.Assign) and [variable] == [getattr(target, "id", "") for target in node.targets]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _flag(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")
