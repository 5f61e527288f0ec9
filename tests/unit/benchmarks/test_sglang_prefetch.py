"""What the benchmark of SGLang's prefetch makes of what it measures, with engines of a few lines."""

import json
from pathlib import Path

import pytest
import sglang_prefetch
from sglangbench.plan import SHAPES, Prefetched, Shape
from storebench.processes import SystemFailed

TINY = Shape(name="tiny", layers=2, heads=1, head_dim=16, page_tokens=16, prompt_tokens=128, prompts=2)
SECONDS = {"ours": 0.1, "ours-tcp": 0.2, "file": 0.25, "mooncake": 0.14}


class FakePair:
    """`first` and `second` at once. What `broken` names cannot be started; `wrong` brings other bytes."""

    broken = ""
    wrong = ""
    turns: list[str]

    def __init__(self, name: str, shape: Shape, directory: Path) -> None:
        self.name, self.shape = name, shape
        self.first = self.second = self

    def start(self) -> None:
        if self.name == self.broken:
            raise SystemFailed("not installed")

    def save(self, prompt: int) -> int:
        return 100 + prompt

    def prefetch(self, prompt: int) -> Prefetched:
        type(self).turns.append(self.name)
        digest = 0 if self.name == self.wrong and prompt == 1 else 100 + prompt
        return Prefetched(seconds=SECONDS[self.name], tokens=self.shape.prompt_tokens, digest=digest)

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakePair]:
    class Fresh(FakePair):
        turns: list[str] = []  # noqa: RUF012

    monkeypatch.setattr(sglang_prefetch, "EnginePair", Fresh)
    return Fresh


def test_systems_take_turns_and_ratios_are_of_one_round(fake: type[FakePair], tmp_path: Path) -> None:
    measured = sglang_prefetch.measure(TINY, ["ours", "file"], 4, tmp_path)
    assert fake.turns[4:8] == ["ours", "file", "file", "ours"]
    assert {name: len(seconds) for name, seconds in measured.seconds.items()} == {"ours": 4, "file": 4}
    assert measured.ratio("file") == 2.5
    assert measured.gb_per_s("ours") == pytest.approx(TINY.prompt_bytes / 0.1 / 1e9)


def test_a_missed_target_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "figures.json"
    arguments = ["--only", "8b", "--rounds", "2"]
    assert sglang_prefetch.main([*arguments, "--vs", "file", "--json", str(result)]) == 0
    assert "2.50 x as fast" in capsys.readouterr().out
    assert json.loads(result.read_text())[0]["seconds"]["file"] == [0.25, 0.25]
    assert sglang_prefetch.main(arguments) == 1
    assert "1.40 x as fast" in capsys.readouterr().out


def test_wrong_bytes_are_the_exit_status(fake: type[FakePair], capsys: pytest.CaptureFixture[str]) -> None:
    fake.wrong = "ours"
    assert sglang_prefetch.main(["--only", "8b", "--rounds", "2", "--vs", "none"]) == 1
    assert "WRONG BYTES: ours, prompt 1" in capsys.readouterr().out


def test_what_cannot_be_measured_is_named(fake: type[FakePair], capsys: pytest.CaptureFixture[str]) -> None:
    fake.broken = "file"
    assert sglang_prefetch.main(["--only", "8b", "--rounds", "2", "--vs", "file"]) == 0
    assert "file left out: not installed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sglang_prefetch.main(["--vs", "redis"])
    assert "redis is none of file, mooncake" in capsys.readouterr().err


def test_prompts_do_not_fit_into_the_caches_of_a_cpu() -> None:
    for shape in SHAPES:
        assert shape.prompts * shape.prompt_bytes >= 512 << 20
        assert shape.prompt_tokens % shape.page_tokens == 0
