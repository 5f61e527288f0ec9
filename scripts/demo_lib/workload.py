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


def question(text: str, asked: str) -> Build:
    """About a document given as the system message: the prompt's beginning is the same for every question."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": asked}]
    request = Request("/v1/chat/completions", {**GREEDY, **STREAM, "messages": messages})
    return lambda answers: request


def continuation(text: str) -> Build:
    """The other endpoint, and an answer in one piece; ignore_eos since a text may well end here."""
    request = Request("/v1/completions", {**GREEDY, "prompt": text, "ignore_eos": True})
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
    declaration, genesis = document("declaration", tiny), document("genesis", tiny)
    system = "You are a patient teacher of history. Answer in one short sentence. " * 4
    said = [
        "Who printed the first books in Europe?",
        "And where did he live?",
        "What did people use before that?",
    ]
    plan = [
        Step("declaration, cold", "router", question(declaration, "Which unalienable rights are named?")),
        Step(
            "declaration, asked again", "router", question(declaration, "Who is accused here, and of what?")
        ),
        Step("declaration, continued", "router", continuation(declaration)),
        Step("genesis, by prefill alone", "prefill", question(genesis, "Summarise this text.")),
        Step(
            "genesis, new to decode",
            "router",
            question(genesis, "What did God create on the first day?"),
            measures_reuse=True,
        ),
    ]
    first_answer = len(plan)
    for turn in range(1, len(said) + 1):
        plan.append(Step(f"chat, turn {turn}", "router", chat_turn(system, said[:turn], first_answer)))
    return plan
