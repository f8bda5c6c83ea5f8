"""An environment and the example trainer of Atropos, unmodified, exchange groups through the server at `ATROPOS_URL`.

The environment is a subclass of Atropos' `BaseEnv` that generates nothing, but answers with fixed tokens. Its loop
registers it, asks for its status, and sends groups. The functions of the example trainer register the trainer, read
batches and pad them. The program prints a JSON object with what the trainer got.
"""

import asyncio
import json
import os
import sys
import tempfile

URL = os.environ["ATROPOS_URL"].rstrip("/")
BATCH_SIZE = 8
GROUP_SIZE = 4
STEPS = 3


def tokenizer(folder):
    """A tokenizer without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]").save_pretrained(folder)
    return folder


def environment(tokenizer_name):
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

    class Counting(BaseEnv):
        name = "counting"

        async def setup(self):
            self.next = 0

        async def get_next_item(self):
            self.next += 1
            return self.next

        async def evaluate(self, *args, **kwargs):
            pass

        async def collect_trajectories(self, item):
            # Long enough that the client compresses the body.
            response = [1000 + item] * 400
            tokens = [[1, 2, member, *response] for member in range(GROUP_SIZE)]
            group = {
                "tokens": tokens,
                "masks": [[-100, -100, *sequence[2:]] for sequence in tokens],
                "scores": [float(member) for member in range(GROUP_SIZE)],
                "inference_logprobs": [[1.0, 1.0] + [-0.5] * (len(sequence) - 2) for sequence in tokens],
                "overrides": [{"set_advantage_to_zero": member == 3} for member in range(GROUP_SIZE)],
                "group_overrides": {},
                "generation_params": {"temperature": 0.5},
            }
            return group, []

    config = BaseEnvConfig(
        rollout_server_url=URL,
        use_wandb=False,
        wandb_name="counting",
        tokenizer_name=tokenizer_name,
        group_size=GROUP_SIZE,
        max_token_length=512,
        max_batches_offpolicy=2,
    )
    server = APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False)
    return Counting(config, [server])


async def main():
    from example_trainer.api import check_atropos_api, get_batch, register_trainer
    from example_trainer.config import TrainingConfig
    from example_trainer.data import get_data

    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            model_name="none",
            atropos_url=URL,
            batch_size=BATCH_SIZE,
            gradient_accumulation_steps=1,
            seq_len=1024,
            training_steps=100,
            save_path=folder,
        )
        assert check_atropos_api(URL)
        register_trainer(config)
        assert get_batch(URL)["batch"] is None
        loop = asyncio.create_task(environment(tokenizer(folder)).env_manager())
        steps = []
        while len(steps) < STEPS:
            if loop.done():
                loop.result()
            data, _ = await asyncio.to_thread(get_data, BATCH_SIZE, 1024, URL)
            for tokens, labels, advantages, temperatures, logprobs in data:
                steps.append(
                    {
                        "sequences": sum(len(batch) for batch in tokens),
                        "items": sorted({int(row[3]) - 1000 for batch in tokens for row in batch}),
                        "trained": sum(int((batch != -100).sum()) for batch in labels),
                        "advantages": [round(float(value), 3) for batch in advantages for value in batch.flatten()],
                        "temperatures": sorted({float(value) for batch in temperatures for value in batch.flatten()}),
                        "logprobs": sorted({float(value) for batch in logprobs for value in batch.flatten()}),
                    }
                )
        loop.cancel()
        json.dump({"steps": steps}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
