"""Makes the tiny checkpoints beside this file and what transformers computes with them.

Run by hand when an architecture is added; the tests read only what is checked in:

    pip install torch==2.11.0 transformers safetensors
    python trainer/tests/golden/make.py

Each folder holds `checkpoint/`, as `save_pretrained` writes it, and
`expected.safetensors`:

    tokens   [rows, length] i64, right-padded with 0
    lengths  [rows] i64, tokens of each row
    logits   [rows, length, vocabulary] f32, 0 in the padding; every row was run alone
    gradient_norm.<parameter>  f32, of the mean cross-entropy over all next tokens
"""

import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file

LENGTHS = [24, 17, 5]
SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    # Some wavelengths must fall on each side of every scaling's bounds.
    max_position_embeddings=64,
)
CASES = {
    "llama3-rope": (
        transformers.LlamaConfig(
            **SHAPE,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=1000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        torch.float32,
        "1GB",
    ),
    "llama-yarn": (
        transformers.LlamaConfig(
            **SHAPE,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=4.0,
            ),
        ),
        torch.float16,
        "1GB",
    ),
    "qwen2-tied": (
        transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
        torch.bfloat16,
        "1GB",
    ),
    "qwen3-sharded": (
        transformers.Qwen3Config(
            **{**SHAPE, "head_dim": 16, "intermediate_size": 32},
            rope_parameters=dict(rope_type="linear", rope_theta=1000000.0, factor=2.0),
        ),
        torch.float32,
        "40KB",
    ),
}


def randomize(model, generator):
    """Draws weights large enough that every part of the model shows in the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.2 * noise)


def expected(model, tokens):
    """Runs each row alone; returns the padded logits, with a graph, and the mean loss."""
    logits = torch.zeros(*tokens.shape, model.config.vocab_size)
    losses = []
    for row, length in enumerate(LENGTHS):
        alone = model(tokens[row : row + 1, :length]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(alone[:-1], tokens[row, 1:length], reduction="none"))
        logits[row, :length] = alone.detach()
    return logits, torch.cat(losses).mean()


def main():
    here = pathlib.Path(__file__).parent
    for seed, (name, (config, dtype, shard)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, generator)
        folder = here / name
        shutil.rmtree(folder, ignore_errors=True)
        model.to(dtype).save_pretrained(folder / "checkpoint", max_shard_size=shard)

        # What was stored is what counts, computed in float32.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
        tokens = torch.randint(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator)
        for row, length in enumerate(LENGTHS):
            tokens[row, length:] = 0
        logits, loss = expected(model, tokens)
        loss.backward()
        tensors = {"tokens": tokens, "lengths": torch.tensor(LENGTHS), "logits": logits}
        for parameter_name, parameter in model.named_parameters():
            tensors[f"gradient_norm.{parameter_name}"] = parameter.grad.norm()
        save_file(tensors, folder / "expected.safetensors")


main()
