"""What is asked: two long public-domain documents, and a chat of several turns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from demo_lib.cluster import MODEL_NAME
from demo_lib.openai_client import Answer, Request

DATA_DIR = Path(__file__).resolve().parent.parent.parent / "examples" / "data"
MAX_TOKENS = 16
# The tiny model reads one token a byte: this keeps its prompts at about 2,000 tokens too.
TINY_DOCUMENT_BYTES = 2000

GREEDY: dict[str, Any] = {
    "model": MODEL_NAME,
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
    "return_token_ids": True,
}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

# Built when its turn comes, since a chat repeats the answers given so far.
Build = Callable[[list[Answer]], Request]


class Step(NamedTuple):
    """`target` is the process asked. `measures_reuse` marks the request whose TTFT is the demo's figure."""

    name: str
    target: str
    build: Build
    measures_reuse: bool = False


def document(name: str, tiny: bool) -> str:
    text = (DATA_DIR / f"{name}.txt").read_text()
    return text[:TINY_DOCUMENT_BYTES] if tiny else text


def question(text: str, asked: str, stream: bool = True) -> Build:
    request = Request(
        "/v1/completions",
        {**GREEDY, **(STREAM if stream else {}), "prompt": f"{text}\n\nQuestion: {asked}\nAnswer:"},
    )
    return lambda answers: request


def chat_turn(system: str, said: list[str], first_answer: int) -> Build:
    """A chat with the user's lines so far; `first_answer` indexes the answer given to the first of them."""

    def build(answers: list[Answer]) -> Request:
        messages = [{"role": "system", "content": system}]
        for turn, line in enumerate(said):
            messages.append({"role": "user", "content": line})
            if turn < len(said) - 1:
                messages.append({"role": "assistant", "content": answers[first_answer + turn].text})
        return Request("/v1/chat/completions", {**GREEDY, **STREAM, "messages": messages})

    return build


def warm_up(tiny: bool) -> Request:
    """Touches the code paths once, with words that no later prompt begins with."""
    text = "A first request pays for what an engine sets up on demand. " * (2 if tiny else 6)
    return Request("/v1/completions", {**GREEDY, **STREAM, "prompt": text})


def steps(tiny: bool) -> list[Step]:
    genesis, declaration = document("genesis", tiny), document("declaration", tiny)
    system = "You are a patient teacher of history. Answer in one short sentence. " * 4
    said = [
        "Who printed the first books in Europe?",
        "And where did he live?",
        "What did people use before that?",
    ]
    plan = [
        Step("genesis, cold", "router", question(genesis, "What was made on the first day?")),
        Step("genesis, asked again", "router", question(genesis, "What was made on the sixth day?")),
        Step("genesis, not streamed", "router", question(genesis, "Who named the cattle?", stream=False)),
        Step("declaration, by prefill alone", "prefill", question(declaration, "Who signed it?")),
        Step(
            "declaration, new to decode",
            "router",
            question(declaration, "Which rights are named?"),
            measures_reuse=True,
        ),
    ]
    first_answer = len(plan)
    for turn in range(1, len(said) + 1):
        plan.append(Step(f"chat, turn {turn}", "router", chat_turn(system, said[:turn], first_answer)))
    return plan
