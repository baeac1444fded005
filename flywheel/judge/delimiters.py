"""Delimiters around other people's texts in a prompt, and texts that cannot leave them.

Delimiters carry a nonce that is drawn anew for each call, so that no traced text can know them; should one hold it by
any chance, it is broken up. So are control tokens of chat templates: servers of open-weight models make ids of them
wherever they stand, and a text with `<|im_end|>` in it would end the message that quotes it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

BLOCK: Final = "<<<{name} {nonce}>>>\n{text}\n<<<END {name} {nonce}>>>"
TURN: Final = "[{who} {nonce}] {text}"

_BAR: Final = "[|｜]"
_LESS, _MORE, _OPEN, _CLOSE = "[<＜﹤]", "[>＞﹥]", "[\\[［]", "[\\]］]"
_TAGS: Final = (
    r"s|bos|eos|pad|unk|mask|cls|sep|sop|eop|eod|eot|eoh|eom|eoa|soh|think|thinking|thought|reasoning|answer|tools?|role"
    r"|image|img|audio|video|box|ref|quad|point|\w{1,40}_\w{1,40}|(?:unused|reserved|special|dummy|extra|pad|unk)[\w-]{0,10}\d"
    r"|(?:seed|minimax|longcat):\w{1,40}|0x[0-9A-F]{2}"
)
_BRACKETS: Final = (
    r"INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w{1,20}|IMG\w{0,10}|THINK|ARGS|CALL_ID|PREFIX|MIDDLE|SUFFIX"
    r"|(?:BEGIN_|END_)?AUDIO|MODEL_SETTINGS|CLS|SEP|MASK|PAD|UNK|BOS|EOS|[gs]MASK|multimodal|control_\d{1,4}"
    r"|unused\w{0,20}"
)
CONTROL: Final = re.compile(
    rf"{_LESS}(?={_BAR}[^\s<>]{{1,64}}{_MORE}|{_BAR}[^\s<>][^<>\n]{{0,64}}[^\s<>]{_BAR}{_MORE}|/?\w{{1,40}}{_BAR}{_MORE})"
    rf"|{_LESS}(?=/?(?:{_TAGS}){_MORE})"
    rf"|{_OPEN}(?=/?(?:{_BRACKETS}){_CLOSE})"
    rf"|{_LESS}(?={_LESS}/?SYS{_MORE}{_MORE})"
    r"|◁(?=/?\w{1,20}▷)|\](?=<\]|~!?b[\[\]])|\[(?=e~\[)",
    re.IGNORECASE,
)
"""Where the control tokens of known chat templates begin: ChatML, Llama, Mistral, Gemma, DeepSeek, GLM, Kimi, MiniMax
and their like. Other tags of HTML and XML stay as they are."""


def new_nonce() -> str:
    """What no text of a task can know."""
    return secrets.token_hex(8)


def inert(text: str, nonce: str) -> str:
    """The text without the nonce, with a space in each control token, and as UTF-8 can hold it."""
    text = CONTROL.sub(lambda begin: f"{begin[0]} ", text.encode("utf-8", "replace").decode())
    return re.sub(nonce, f"{nonce[:4]}…", text, flags=re.IGNORECASE) if nonce in text.lower() else text


def block(name: str, inside: str, nonce: str) -> str:
    """A part of a prompt between its delimiters; `inside` is inert, but for the delimiters of its turns."""
    return BLOCK.format(name=name, text=inside, nonce=nonce)


def turn(who: str, text: str, nonce: str) -> str:
    """One turn, step or entry of a list: what another begins, no text can imitate."""
    return TURN.format(who=" ".join(inert(who, nonce).split()), text=inert(text, nonce), nonce=nonce)
