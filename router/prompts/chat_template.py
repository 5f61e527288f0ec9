"""Chat messages to the text an engine makes of them: Hugging Face chat templates, applied as vLLM does.

vLLM 0.32 (entrypoints/chat_utils.py) flattens content parts to strings for templates that expect strings, and
turns strings into parts for templates that iterate over parts; arguments of tool calls are parsed.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvcore.errors import ConfigError

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class NotText(Exception):
    """The prompt depends on more than text (images, audio), or cannot be rendered."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its content only counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """ConfigError when the template has mistakes."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template has a mistake: {error}") from error
        self._special = dict(special_tokens)
        self._wants_parts = self._probe()

    def render(self, request: Mapping[str, Any]) -> str:
        """`request`: the fields of a chat completion. NotText when it cannot be said."""
        messages = request.get("messages")
        if not isinstance(messages, list) or request.get("chat_template"):
            raise NotText("no messages, or a template of the request's own")
        if request.get("continue_final_message"):
            raise NotText("continues a message")
        more = request.get("chat_template_kwargs")
        variables: dict[str, Any] = dict(self._special)
        variables.update(
            messages=[self._message(message) for message in messages],
            tools=request.get("tools") or None,
            documents=request.get("documents"),
            add_generation_prompt=request.get("add_generation_prompt", True),
        )
        if isinstance(more, dict):
            variables.update(more)
        return self._render(variables)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program: it may fail in any way
            raise NotText(str(error)) from error

    def _probe(self) -> bool:
        """Whether the template iterates over content parts."""
        parts = [{"type": "text", "text": "\u2058probe"}]
        variables = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
        try:
            rendered = self._render({**self._special, **variables})
        except NotText:
            return False
        return "\u2058probe" in rendered and "'text'" not in rendered and '"text"' not in rendered

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise NotText("a message is no object")
        made: dict[str, Any] = {**message, "content": self._content(message.get("content"))}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            made["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return made

    def _content(self, content: Any) -> Any:
        if content is None:
            content = []
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wants_parts else content
        texts = [_text_of(part) for part in content] if isinstance(content, list) else [_text_of(content)]
        if self._wants_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def load_chat_template(directory: Path, file: Path | None) -> ChatTemplate | None:
    """Of a model's directory, or of `file` with the directory's special tokens. None when there is none."""
    config: dict[str, Any] = {}
    try:
        config_file = directory / "tokenizer_config.json"
        if config_file.exists():
            config = json.loads(config_file.read_text())
        own = directory / "chat_template.jinja"
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {one["name"]: one["template"] for one in source}
            source = named.get("default")
        if file is not None:
            source = file.read_text()
        elif own.exists():
            source = own.read_text()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the chat template cannot be read: {error}") from error
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and part.get("type") in ("text", "input_text")
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    raise NotText("content that is no text")


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    pair = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
