"""Chat templates as vLLM applies them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from router.prompts.chat_template import ChatTemplate, NotText, load_chat_template

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}{{ part.text }}|{% endfor %}{% endfor %}"
)


def render(source: str, **request: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(request)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_text_and_the_generation_prompt() -> None:
    asked = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert render(CHATML, messages=user("hi")) == asked
    assert (
        render(CHATML, messages=user("hi"), add_generation_prompt=False)
        == asked[: -len("<|im_start|>assistant\n")]
    )


def test_parts_become_what_the_template_expects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in render(CHATML, messages=user(parts))
    assert render(PARTS, messages=user(parts)) == "<s>user:a|b|"
    assert render(PARTS, messages=user("whole")) == "<s>user:whole|"
    assert "user\n<|im_end|>" in render(CHATML, messages=user(None))


def test_arguments_of_tool_calls_are_parsed() -> None:
    source = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}{{ tools | tojson }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(source, messages=messages, tools=[{"name": "ü"}]) == 'Zürich[{"name": "ü"}]'
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}  # the request itself is left alone


def test_kwargs_and_helpers_of_templates() -> None:
    assert (
        render("{{ enable_thinking }}", messages=[], chat_template_kwargs={"enable_thinking": False})
        == "False"
    )
    assert render("{% generation %}{{ messages | length }}{% endgeneration %}", messages=user("x")) == "1"
    assert render("{% for m in messages %}{% break %}{% endfor %}end", messages=user("x")) == "end"
    assert len(render("{{ strftime_now('%Y') }}", messages=[])) == 4


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
        {"messages": user("hi"), "chat_template": "{{ 1 }}"},
        {"messages": user("hi"), "continue_final_message": True},
        {"messages": user("hi"), "tools": "bad"},
    ],
)
def test_what_cannot_be_said_is_no_text(request_fields: dict[str, Any]) -> None:
    source = "{% if tools is string %}{{ raise_exception('tools') }}{% endif %}" + CHATML
    with pytest.raises(NotText):
        render(source, **request_fields)


def test_templates_are_sandboxed() -> None:
    with pytest.raises(NotText):
        render("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", messages=[])


def test_loading(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None) is None
    config: dict[str, Any] = {"bos_token": {"content": "<b>"}, "chat_template": "one {{ bos_token }}"}

    def rendered(file: Path | None = None) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = load_chat_template(tmp_path, file)
        assert template is not None
        return template.render({"messages": []})

    assert rendered() == "one <b>"
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered() == "d"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert rendered() == "own file"
    (tmp_path / "other.jinja").write_text("other file {{ bos_token }}")
    assert rendered(tmp_path / "other.jinja") == "other file <b>"
    with pytest.raises(ConfigError, match="cannot be read"):
        rendered(tmp_path / "none.jinja")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="mistake"):
        rendered()
