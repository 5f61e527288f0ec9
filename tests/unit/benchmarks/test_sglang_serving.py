"""What the benchmark of SGLang's servers makes of what it measures, with servers of a few lines."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import sglang_serving
from sglangbench.plan import Serving
from sglangbench.servers import Streamed
from storebench.processes import SystemFailed

TTFT_S = {"plain": 4.0, "ours": 0.5, "file": 1.0, "mooncake": 2.0}


class FakeServer:
    def __init__(self, pair: "FakePair", is_first: bool) -> None:
        self._pair, self._is_first = pair, is_first

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Streamed:
        name = self._pair.name
        self._pair.turns.append(name + ("" if self._is_first else " again"))
        is_computed = self._is_first or name == self._pair.forgetful
        if name == self._pair.dying and prompt[0] == Serving().prompt(2)[0]:
            raise SystemFailed("gone")
        return Streamed(
            ttft_s=TTFT_S["plain" if is_computed else name],
            tbt_s=0.01 if name == "plain" else 0.02,
            tokens=[0] if name == self._pair.wrong and not self._is_first else [1, prompt[0]],
            stored=0 if is_computed else len(prompt) - 1,
        )

    def wait_saved(self, num_tokens: int) -> None:
        assert num_tokens % Serving().page_tokens == 0


class FakePair:
    broken = dying = forgetful = wrong = ""
    turns: list[str]

    def __init__(self, name: str, serving: Serving, model: Path, directory: Path) -> None:
        self.name = name
        self.first, self.second = FakeServer(self, True), FakeServer(self, False)

    def launch(self) -> None:
        if self.name == self.broken:
            raise SystemFailed("not installed")

    def wait_ready(self) -> None:
        """Nothing was started."""

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakePair]:
    class Fresh(FakePair):
        turns: list[str] = []  # noqa: RUF012

    monkeypatch.setattr(sglang_serving, "ServerPair", Fresh)
    monkeypatch.setattr(sglang_serving, "served_model", Path)
    return Fresh


def run(*arguments: str) -> int:
    return sglang_serving.main(["--rounds", "3", *arguments])


def test_storages_take_turns_and_are_set_beside_computing(
    fake: type[FakePair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert run("--vs", "file", "--json", str(figures)) == 0
    # The round before the first is thrown away.
    assert fake.turns[5:10] == ["plain", "ours", "ours again", "file", "file again"]
    assert fake.turns[10:15] == ["ours", "ours again", "file", "file again", "plain"]
    out = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line.strip()}
    assert lines["plain"] == "plain 4000 10.00 3/3"
    assert lines["ours"] == "ours 4000 500 8.00 x 20.00 2.00 x 100 6/6"
    assert lines["file"] == "file 4000 1000 4.00 x 2.00 x 20.00 2.00 x 100 6/6"
    assert len(json.loads(figures.read_text())["rounds"]) == 3


def test_another_answer_is_the_exit_status(fake: type[FakePair], capsys: pytest.CaptureFixture[str]) -> None:
    fake.wrong = "file"
    assert run("--vs", "file") == 1
    assert "3/6" in capsys.readouterr().out


def test_a_prompt_that_ours_has_not_kept_is_the_exit_status(fake: type[FakePair]) -> None:
    fake.forgetful = "file"
    assert run("--vs", "file") == 0
    fake.forgetful = "ours"
    assert run("--vs", "file") == 1


def test_what_cannot_be_measured_is_named(fake: type[FakePair], capsys: pytest.CaptureFixture[str]) -> None:
    fake.broken, fake.dying = "mooncake", "file"
    assert run() == 0
    out = capsys.readouterr().out
    assert "mooncake left out: not installed" in out and "file left out: gone" in out
    fake.broken, fake.dying = "ours", ""
    assert run() == 1
    with pytest.raises(SystemExit):
        run("--vs", "redis")
    assert "redis is none of file, mooncake, ours-tcp" in capsys.readouterr().err


def test_no_two_prompts_have_a_page_in_common() -> None:
    serving = Serving()
    pages = [tuple(serving.prompt(number)[: serving.page_tokens]) for number in range(40)]
    assert len(set(pages)) == 40
    assert all(4 <= token < 254 for page in pages for token in page)
