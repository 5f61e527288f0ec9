"""LoRA adapters: KV is shared by what an adapter's files hold, not by what it is called."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.rig import (
    DOCUMENT,
    EngineHost,
    StoreProcess,
    cached_of,
    request,
    tokens_of,
    transfer_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RANK = 8
PROMPT = DOCUMENT[:300]


def write_adapter(directory: Path, model: str, seed: int) -> None:
    """Of all attention projections, strong enough to change every token."""
    from safetensors.numpy import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, head_size = config["hidden_size"], config["head_dim"]
    sizes = {
        "q_proj": (hidden, config["num_attention_heads"] * head_size),
        "k_proj": (hidden, config["num_key_value_heads"] * head_size),
        "v_proj": (hidden, config["num_key_value_heads"] * head_size),
        "o_proj": (config["num_attention_heads"] * head_size, hidden),
    }
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size_in, size_out) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = random.standard_normal((RANK, size_in), np.float32)
            tensors[f"{prefix}.lora_B.weight"] = random.standard_normal((size_out, RANK), np.float32)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": RANK,
                "lora_alpha": RANK,
                "target_modules": sorted(sizes),
                "bias": "none",
            }
        )
    )


def ask(host: EngineHost, adapter: Path | None) -> dict[str, Any]:
    asked = request(PROMPT) | ({"adapter": str(adapter)} if adapter else {})
    answer: dict[str, Any] = host.call("generate", requests=[asked])
    host.call("settle")
    return answer


def test_a_retrained_adapter_in_the_same_place_finds_nothing_of_the_old_one(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], model: str, tmp_path: Path
) -> None:
    engine = {**engine_kwargs, "enable_lora": True, "max_lora_rank": RANK}
    adapter = tmp_path / "adapter"
    expected = []
    for seed in (1, 2):
        write_adapter(adapter, model, seed)
        host.call("start", engine=engine, transfer=None)
        expected.append(tokens_of(ask(host, adapter)))
    plain = tokens_of(ask(host, None))
    assert expected[0] != expected[1] != plain != expected[0]

    for seed, found in ((1, False), (2, False), (1, True)):
        write_adapter(adapter, model, seed)
        host.call("start", engine=engine, transfer=transfer_config(store))
        answer = ask(host, adapter)
        assert tokens_of(answer) == expected[seed - 1], f"adapter {seed}"
        assert (cached_of(answer) != [0]) is found
        assert tokens_of(ask(host, None)) == plain
