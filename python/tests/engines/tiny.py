"""Trains a tiny Qwen 3 that behaves like an agent's model: it thinks, calls tools in the form of Hermes, and stops.

A model with random weights never stops and never calls a tool, so it would not show how an engine parses answers. The
model has the whole vocabulary, of which the training uses only the ids that occur. The same options give the same model
on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

WORDS = ["rain", "sun", "wind", "north", "river", "stone", "light", "number"]
WORDS += ["list", "file", "test", "code", "error", "fix", "value", "city"]
# Words are not equally likely, because the probe of the service compares the probabilities of the likeliest.
WEIGHTS = [1 / rank**1.5 for rank in range(1, len(WORDS) + 1)]
CITIES = ["Kyiv", "Paris", "Tokyo"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
]
STOPS = ["<|im_end|>", "<|endoftext|>"]
VOCABULARY = 151_936
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
BATCH = 8


class Conversations:
    """Draws conversations, and the answers that the model learns."""

    def __init__(self, tokenizer: Any, thinks: bool, seed: int) -> None:
        self.tokenizer = tokenizer
        self.thinks = thinks
        self.random = random.Random(seed)

    def words(self, low: int, high: int) -> str:
        return " ".join(self.random.choices(WORDS, WEIGHTS, k=self.random.randint(low, high)))

    def call(self) -> dict[str, Any]:
        if self.random.random() < 0.5:
            days = {"days": self.random.randint(1, 9)} if self.random.random() < 0.5 else {}
            name, arguments = "weather", {"city": self.random.choice(CITIES), **days}
        else:
            name, arguments = "run", {"command": self.words(1, 3)}
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def answer(self, calls: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": self.words(0, 2) if calls else self.words(2, 10)}
        if calls:
            answer["tool_calls"] = [self.call() for _ in range(1 if self.random.random() < 0.8 else 2)]
        if self.thinks:
            answer["reasoning_content"] = self.words(1, 8)
        return answer

    def draw(self) -> tuple[list[int], list[int]]:
        """The ids of a prompt and those of its answer."""
        tools = TOOLS if self.random.random() < 0.6 else None
        messages: list[dict[str, Any]] = []
        if self.random.random() < 0.3:
            messages.append({"role": "system", "content": self.words(2, 6)})
        for _ in range(self.random.randint(0, 1)):
            messages += [{"role": "user", "content": self.words(2, 8)}, self.answer(False)]
        messages.append({"role": "user", "content": self.words(2, 8)})
        calls = tools is not None and self.random.random() < 0.6
        if tools is not None and not calls:
            messages.append(self.answer(True))
            messages += [{"role": "tool", "content": self.words(1, 6)} for _ in messages[-1]["tool_calls"]]
        options = {"enable_thinking": self.random.random() < 0.7} if self.thinks else {}
        answer = self.answer(calls)
        if not options.get("enable_thinking", True):
            answer.pop("reasoning_content")
        prompt = self.render(messages, tools, add_generation_prompt=True, **options)
        whole = self.render([*messages, answer], tools)
        assert whole.startswith(prompt), "the template does not write an answer as it opens one"
        text = whole[len(prompt) :].removesuffix("\n")
        return self.tokenizer.encode(prompt), self.tokenizer.encode(text)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def train(pool: list[tuple[list[int], list[int]]], used: list[int], steps: int, seed: int) -> Qwen3ForCausalLM:
    """A model of the used ids only. Its last id stands for all that are not used, which are together as likely as their
    number says."""
    places = {token: place for place, token in enumerate(used)}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(used) + 1, **SHAPE)).float()
    shift = torch.zeros(len(used) + 1)
    shift[-1] = math.log(VOCABULARY - len(used))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.02 + 0.98 * (1 - step / steps))
    )
    draws = random.Random(seed)
    for step in range(steps):
        # Sequences of about the same length, so that little is computed for padding.
        start = draws.randrange(0, len(pool) - BATCH)
        rows = [[places[token] for token in [*prompt, *answer]] for prompt, answer in pool[start : start + BATCH]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        trained = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(pool[start : start + BATCH]):
            trained[row, len(prompt) : len(prompt) + len(answer)] = True
        hidden = model.model(ids).last_hidden_state[:, :-1][trained[:, 1:]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden) + shift, ids[:, 1:][trained[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model


def widened(small: Qwen3ForCausalLM, used: list[int]) -> Qwen3ForCausalLM:
    """The same model with the whole vocabulary. An unused id is as likely as the id that stood for them all."""
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **SHAPE)).float()
    weights = small.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        wide = weights[name][-1:].repeat(VOCABULARY, 1)
        wide[torch.tensor(used)] = weights[name][:-1]
        weights[name] = wide
    model.load_state_dict(weights)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="folder with Qwen 3's tokenizer.json and tokenizer_config.json")
    parser.add_argument("output", type=Path, help="folder for the model")
    parser.add_argument("--template", type=Path, help="a chat template without thoughts, for a model that has none")
    parser.add_argument("--steps", type=int, default=300, help="steps of training [default: 300]")
    parser.add_argument("--seed", type=int, default=7, help="[default: 7]")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    # The result of a sum depends on how many threads add.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    options.output.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.tokenizer / "tokenizer.json", options.output)
    settings = json.loads((options.tokenizer / "tokenizer_config.json").read_text())
    if options.template:
        settings["chat_template"] = options.template.read_text()
    (options.output / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    tokenizer = AutoTokenizer.from_pretrained(options.output)
    conversations = Conversations(tokenizer, options.template is None, options.seed)
    pool = sorted((conversations.draw() for _ in range(2000)), key=lambda pair: len(pair[0]) + len(pair[1]))
    stops = tokenizer.convert_tokens_to_ids(STOPS)
    used = sorted({token for pair in pool for part in pair for token in part} | set(stops))
    model = widened(train(pool, used, options.steps, options.seed), used)
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = stops[1], stops[0], stops[1]
    # Engines end an answer at these tokens. Qwen 3 recommends the other values, which a recorded call replaces.
    model.generation_config.update(
        bos_token_id=stops[1], eos_token_id=stops, pad_token_id=stops[1], do_sample=True, temperature=0.6, top_k=20
    )
    model.save_pretrained(options.output)
    show(model, tokenizer, stops)


def show(model: Qwen3ForCausalLM, tokenizer: Any, stops: list[int]) -> None:
    for tools in (None, TOOLS):
        question = [{"role": "user", "content": "city rain"}]
        text = tokenizer.apply_chat_template(question, tools=tools, add_generation_prompt=True, tokenize=False)
        prompt = torch.tensor([tokenizer.encode(text)])
        for _ in range(3):
            sampled = model.generate(prompt, max_new_tokens=80, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=stops)
            print(repr(tokenizer.decode(sampled[0, prompt.shape[1] :])))


if __name__ == "__main__":
    main()
