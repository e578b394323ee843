"""Answer prompts with a target and its drafter, and say how many tokens each verification gave.

    python examples/generate.py TARGET DRAFTER "Tell me a story." "What is 12 times 13?"

TARGET is a Hugging Face folder, DRAFTER an exported drafter or the folder of a run.
"""

import sys

from forebay import api


def main(target: str, drafter: str, *prompts: str) -> None:
    generator = api.SpeculativeGenerator.from_folders(target, drafter)
    for prompt, answer in zip(prompts, generator.generate(prompts, max_new_tokens=128), strict=True):
        print(f"> {prompt}\n{answer.text}\n[{len(answer.tokens)} tokens, accept length {answer.accept_length:.2f}]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
