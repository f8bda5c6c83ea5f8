#!/usr/bin/env python3
"""Generation with `transformers`, for scripts/bench-serve to compare `forebay-trainer serve` with.

Loads a checkpoint and prints one JSON object that describes the engine. Then it obeys one JSON object per line
of standard input, and answers each with a line:

    {"prompts": [[...], ...], "new_tokens": N}    samples N tokens after each prompt, all of one length, in one batch
    {"prompt": [...], "response": [...]}          the log-probabilities of the response after the prompt
"""

import argparse
import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


def generate(model, prompts, new_tokens):
    inputs = torch.tensor(prompts, device=model.device)
    # No end token, so that every answer has all its tokens. top_k = 0 samples from the whole vocabulary.
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
        eos_token_id=None, pad_token_id=0,
    )
    started = time.perf_counter()
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    seconds = time.perf_counter() - started
    assert output.shape == (len(prompts), inputs.shape[1] + new_tokens), output.shape
    return {"seconds": seconds}


def score(model, prompt, response):
    ids = torch.tensor([prompt + response], device=model.device)
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1:-1].float(), -1)
    return {"logprobs": logprobs.gather(1, ids[0, len(prompt):, None]).squeeze(1).tolist()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--device", default="cpu", help="a GPU computes in bfloat16")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")
    model.to(arguments.device)
    # The checkpoint's own settings would fill in what a request leaves out.
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.eval()
    print(json.dumps({
        "engine": f"transformers {transformers.__version__}, PyTorch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": model.config.vocab_size,
    }), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            work = json.loads(line)
            answer = score(model, **work) if "response" in work else generate(model, **work)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
