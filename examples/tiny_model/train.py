"""Train the tiny Llama model that ships with the package, on text made by `corpus.py`.

Examples, tests and a first try of the package need no download: this is a real checkpoint in the Hugging Face format, with
grouped-query attention and a tokenizer, that writes readable English. Training takes about 15 minutes on one CPU core.

    python examples/tiny_model/train.py --minutes 11
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import documents
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END = "<|endoftext|>"
COMMAND = "python examples/tiny_model/train.py"
OUTPUT = Path(__file__).resolve().parents[2] / "graph_runner" / "assets" / "tiny-llama"
PROMPTS = (
    "Once upon a time", "The cat", "To make soup,", "Dear Anna,", "The fox is", "Question: What does a horse eat?",
    "One night, there was a", "Tom has three apples.", "\"What are you doing?\" asked", "In the forest, there",
)  # fmt: skip


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can spell every input.

    There is no start token: documents follow each other with `END` between them, and training windows begin at the
    start of a document, so a prompt needs nothing in front of it and ``decode(encode(text)) == text``.
    """
    core = Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False, model_max_length=1024
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Describe the model: small, but with the features of a large one (GQA, RoPE, SwiGLU, tied embeddings)."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


class Windows:
    """Draws training batches from the tokenized corpus."""

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        ids: list[int] = []
        self.starts: list[int] = []
        for row in tokenizer(texts)["input_ids"]:
            self.starts.append(len(ids))
            ids += [*row, tokenizer.eos_token_id]
        self.ids = torch.tensor(ids)
        self.rng = random.Random(seed)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return `rows` windows of `length` tokens, each starting with a document."""
        starts = [s for s in self.rng.choices(self.starts, k=2 * rows) if s + length <= len(self.ids)][:rows]
        return torch.stack([self.ids[s : s + length] for s in starts])

    def stream(self, tokens: int) -> Iterator[torch.Tensor]:
        """Yield batches of `tokens` tokens forever; every fourth has long rows, to train high positions."""
        while True:
            for length in (256, 256, 256, 1024):
                yield self.batch(max(1, tokens // length), length)


def train(model: LlamaForCausalLM, windows: Windows, minutes: float, peak_rate: float, bf16: bool) -> tuple[float, int]:
    """Train for `minutes`; return the mean loss of the last batches and the number of steps.

    The learning rate follows the clock, not a step count, so that the cosine ends with the time on any machine.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=peak_rate,
        betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    model.train()
    start, recent = time.monotonic(), deque[float](maxlen=40)
    for step, ids in enumerate(windows.stream(tokens=4096)):
        done = (time.monotonic() - start) / (60 * minutes)
        if done >= 1:
            break
        rate = peak_rate * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % 25 == 0:
            mean, left = sum(recent) / len(recent), 60 * minutes * (1 - done)
            print(f"step {step:5d}  loss {mean:.4f}  rate {rate:.5f}  {left:4.0f} s left", flush=True)
    return sum(recent) / len(recent), step


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights whose config asks for float32.

    The file is half as large that way, and a plain ``from_pretrained`` still computes in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.float32
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=256, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: value.to(torch.bfloat16) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files readable by their owner only


def write_readme(folder: Path, parameters: int, vocab: int, loss: float, steps: int, options: str) -> None:
    """Write the model card."""
    (folder / "README.md").write_text(f"""# tiny-llama

A very small Llama model that writes simple English: little stories, facts about animals, recipes, letters and
dialogues. It is there to try and test the package without a download, and knows nothing about the world.

- Architecture: `LlamaForCausalLM`, {parameters:,} parameters (4 layers, hidden size 256, 4 query and 2 key/value
  heads of 64, tied embeddings), 1024 positions, byte-level BPE tokenizer with {vocab} tokens. `<|endoftext|>` ends a
  document; there is no start token.
- Weights: stored as bfloat16; `config.json` asks for float32, so a plain `from_pretrained` computes in float32.
- Training text: generated by `examples/tiny_model/corpus.py` from its own templates; no other text was used.
- Made with: `{COMMAND} {options}` on a CPU ({steps} steps; the clock ends
  the training, so another machine makes a similar model and not the same bytes).
- Training loss at the end: {loss:.3f} (nats per token).
- Licence: Apache-2.0.
""")


@torch.inference_mode()
def check(folder: Path, new_tokens: int = 220) -> None:
    """Print greedy continuations of the saved model and how clear its choices are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.float32, model.dtype
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16, half.dtype
    for text in [*documents(200, seed=12345), " Größe\n\t x  y ?", "a , b 's <|endoftext|>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text, text
    gaps: list[torch.Tensor] = []
    stopped = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        ended = bool(out[0, -1] == tokenizer.eos_token_id)
        stopped += ended
        best = model(out).logits[0, ids.shape[1] - 1 : -1].topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
        print(f"--- {out.shape[1] - ids.shape[1]} tokens, ended: {ended}\n{tokenizer.decode(out[0])}")
    gap = torch.cat(gaps)
    low, median = gap.quantile(torch.tensor([0.01, 0.5])).tolist()
    print(f"--- {stopped} of {len(PROMPTS)} ended; gap of the two best logits over {len(gap)} tokens: "
          f"median {median:.3f}, 1st percentile {low:.4f}, least {gap.min().item():.5f}")  # fmt: skip
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print(json.dumps(sizes), f"total {sum(sizes.values()):,} bytes")


def main() -> None:
    """Train and save, or check the saved model with --check-only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=11.0, help="training time")
    parser.add_argument("--documents", type=int, default=60_000, help="size of the corpus")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fp32", action="store_true", help="train without bfloat16 autocast (slower on most CPUs)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--check-only", action="store_true", help="only print what the saved model writes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.check_only:
        torch.manual_seed(args.seed)
        texts = documents(args.documents, args.seed)
        tokenizer = train_tokenizer(texts, args.vocab_size)
        windows = Windows(texts, tokenizer, args.seed)
        model = LlamaForCausalLM(model_config(tokenizer))
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters:,} parameters, vocabulary of {len(tokenizer)}, corpus of {len(windows.ids):,} tokens")
        loss, steps = train(model, windows, args.minutes, args.rate, bf16=not args.fp32)
        print(f"final loss {loss:.4f} after {steps} steps")
        save(model, tokenizer, args.output)
        options = f"--minutes {args.minutes:g} --seed {args.seed} --threads {args.threads}"
        write_readme(args.output, parameters, len(tokenizer), loss, steps, options)
    check(args.output)


if __name__ == "__main__":
    main()
