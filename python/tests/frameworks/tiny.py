"""A tiny model and tokenizer without any download, rollouts for it, and a training with TRL as a program.

The program is `tiny.py URL POLICY FOLDER STEPS [KILL_AT]`. It trains to STEPS and continues from its last checkpoint.
With KILL_AT it is killed between the ack and the update of that step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig

import forebay
import forebay.trl

VOCABULARY = 32


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip


def post(fb: forebay.Client, policy: str, groups: int, weighting: str = "turn_mean", **rules: Any) -> None:
    """Writes the rules of a policy and posts groups of two rollouts, with up to three segments of several lengths."""
    fb.put_policy(policy, {
        "require": ["tokens", "logprobs"], "group": {"size": 2}, "batch": {"groups": 2}, "loss_weighting": weighting,
        **rules,
    })  # fmt: skip
    draw = random.Random(7)
    for group in range(groups):
        for place in range(2):
            segments: list[dict[str, Any]] = []
            for _ in range(draw.randint(1, 3)):
                length = draw.randint(1, 7)
                mask = [1, *(draw.randint(0, 1) for _ in range(length - 1))]
                segments.append({
                    "tokens": [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, 5) + length)],
                    "loss_mask": mask,
                    # What is recorded for tokens that are not trained must not matter.
                    "logprobs": [draw.uniform(-4.5, -2.5) if one else -9999.0 for one in mask],
                })  # fmt: skip
            fb.post({
                "policy": policy, "rollout_id": f"{group}-{place}", "group_id": str(group), "policy_version": 0,
                "reward": draw.random(), "segments": segments,
            })  # fmt: skip


def config(folder: str | Path, steps: int, **options: Any) -> GRPOConfig:
    return GRPOConfig(
        str(folder),
        **{
            "max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "num_generations": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "save_steps": 2,
            "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False,
            "gradient_checkpointing": False, **options,
        },
    )  # fmt: skip


class Kill(TrainerCallback):
    """Ends the process as a crash would, after the ack and before the weights change."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, policy, folder, steps, *kill_at = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = forebay.trl.GRPOTrainer(
        model(),
        config(folder, int(steps)),
        policy=policy,
        client=forebay.Client(url),
        processing_class=tokenizer(),
        publish=forebay.trl.to_folder(Path(folder, "versions")),
        callbacks=[Kill(int(step)) for step in kill_at],
    )
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
