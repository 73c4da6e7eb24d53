"""Run vLLM's engine on moefp8, in this process, and print what it generates and how fast.

    python examples/serve_vllm.py CHECKPOINT                     # FP8 with blocks of 128x128
    python examples/serve_vllm.py CHECKPOINT --prompt "Once upon a time" --max-new-tokens 100

It needs vLLM (pip install vllm) and a Hopper GPU. A server is started by
`MOEFP8_VLLM=1 vllm serve CHECKPOINT`; it takes the same options as `LLM` below.
"""

import argparse
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a directory, or a name on the Hugging Face hub")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="how many GPUs")
    options = parser.parse_args()
    os.environ["MOEFP8_VLLM"] = "1"  # before vLLM starts, which loads plug-ins then
    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install vllm")
    llm = LLM(options.checkpoint, tensor_parallel_size=options.tensor_parallel)
    prompts = options.prompt or ["A mixture of experts is", "FP8 has eight bits:"]
    sampling = SamplingParams(max_tokens=options.max_new_tokens, temperature=0)
    llm.generate(prompts, SamplingParams(max_tokens=2))
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} a second")


if __name__ == "__main__":
    main()
