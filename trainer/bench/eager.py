#!/usr/bin/env python3
"""The training step of `forebay-trainer bench` in eager PyTorch, to compare with.

Same model, same rows, same microbatches, same clipped objective, same optimizer;
hidden states at trained positions alone go through the head, as in the trainer.
Prints one JSON object. `make bench NAME=trainer` runs both in turn.
"""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


def make(folder):
    """A model with random weights that is large enough for kernels to matter."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=512, intermediate_size=1_536, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2_048,
        tie_word_embeddings=True, torch_dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, max_shard_size="2GB")


def rows(count, vocabulary):
    """The rows of `bench.rs`: lengths and ids by the same arithmetic."""
    made = []
    for row in range(count):
        prompt, response = 32 + row * 7 % 64, 64 + row * 37 % 192
        made.append({
            "tokens": [(row * 7_919 + t * 104_729) % vocabulary for t in range(prompt + response)],
            "prompt": prompt,
            "response": response,
            "advantage": row % 5 / 2.0 - 1.0,
            "logprobs": [-10.4 + (row + t) % 9 / 20.0 - 0.2 for t in range(response)],
        })
    return made


def plan(made, budget):
    order = sorted(range(len(made)), key=lambda i: -(len(made[i]["tokens"]) - 1))
    batches = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * (len(made[batches[-1][0]]["tokens"]) - 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def microbatch(made, indices):
    longest = max(len(made[i]["tokens"]) - 1 for i in indices)
    inputs = torch.zeros(len(indices), longest, dtype=torch.long)
    gather, targets, old, advantages = [], [], [], []
    for place, index in enumerate(indices):
        row = made[index]
        length = len(row["tokens"]) - 1
        inputs[place, :length] = torch.tensor(row["tokens"][:length])
        start = place * longest + row["prompt"] - 1
        gather += range(start, start + row["response"])
        targets += row["tokens"][row["prompt"]:]
        old += row["logprobs"]
        advantages += [row["advantage"]] * row["response"]
    tensor = torch.tensor
    return inputs, tensor(gather), tensor(targets), tensor(old), tensor(advantages)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--make", action="store_true", help="write the checkpoint first")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatch-tokens", type=int, default=4_096)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.model)
        return
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-5, betas=(0.9, 0.95), fused=True,
    )
    made = rows(arguments.rows, model.config.vocab_size)
    trained = sum(row["response"] for row in made)
    tokens = sum(len(row["tokens"]) for row in made)
    batches = [microbatch(made, indices) for indices in plan(made, arguments.microbatch_tokens)]
    losses, seconds = [], []
    for _ in range(arguments.steps + 1):
        started = time.perf_counter()
        loss_sum = 0.0
        for inputs, gather, targets, old, advantages in batches:
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden.flatten(0, 1)[gather]).float()
            logp = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
            ratio = (logp - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = torch.maximum(-ratio * advantages, -clipped * advantages).sum() / trained
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss_sum)
        seconds.append(time.perf_counter() - started)
    # The first step warms up.
    seconds = sorted(seconds[1:])
    print(json.dumps({
        "engine": f"eager PyTorch {torch.__version__}", "threads": torch.get_num_threads(),
        "tokens": tokens, "loss_first": losses[0], "loss_last": losses[-1],
        "seconds_median": seconds[len(seconds) // 2],
        "tokens_per_s": tokens / seconds[len(seconds) // 2],
    }))


if __name__ == "__main__":
    main()
