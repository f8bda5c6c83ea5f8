#!/usr/bin/env python3
"""The training step of `forebay-trainer bench` in eager PyTorch, to compare with.

Same model, same rows, same microbatches, same clipped objective, same optimizer;
hidden states at trained positions alone go through the head, as in the trainer.
On a GPU layers compute in bfloat16 under autocast, and parameters stay float32, as in the trainer.
Prints one JSON object. `make bench NAME=trainer` and scripts/gpu run both in turn.
"""

import argparse
import json
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# Configurations of models, which get random weights. The first is large enough for kernels to matter on a CPU; the
# others have the sizes of Qwen3-0.6B and of Qwen2.5-1.5B.
SHAPES = {
    "small": {
        "model_type": "qwen2", "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1_536,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1_024, "intermediate_size": 3_072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "1.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1_536, "intermediate_size": 8_960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    },
}


def make(folder, shape, device):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=32_768, tie_word_embeddings=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="2GB")


def rows(count, longer, vocabulary):
    """The rows of `bench.rs`: lengths and ids by the same arithmetic."""
    made = []
    for row in range(count):
        prompt, response = (32 + row * 7 % 64) * longer, (64 + row * 37 % 192) * longer
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


def microbatch(made, indices, device):
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
    return [inputs.to(device), *(torch.tensor(part, device=device) for part in (gather, targets, old, advantages))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--make", choices=SHAPES, help="write a checkpoint of this size, and nothing else")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32", help="type of the layers")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longer", type=int, default=1, help="makes the sequences so many times as long")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatch-tokens", type=int, default=4_096)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.model, arguments.make, arguments.device)
        return
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    ).to(arguments.device)
    model.train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-5, betas=(0.9, 0.95), fused=True,
    )
    made = rows(arguments.rows, arguments.longer, model.config.vocab_size)
    trained = sum(row["response"] for row in made)
    tokens = sum(len(row["tokens"]) for row in made)
    batches = [microbatch(made, indices, arguments.device) for indices in plan(made, arguments.microbatch_tokens)]
    autocast = torch.autocast(
        torch.device(arguments.device).type, torch.bfloat16, enabled=arguments.compute == "bfloat16"
    )
    losses, seconds = [], []
    for _ in range(arguments.steps + 1):
        started = time.perf_counter()
        loss_sum = 0.0
        for inputs, gather, targets, old, advantages in batches:
            with autocast:
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
        if inputs.is_cuda:
            torch.cuda.synchronize()
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
