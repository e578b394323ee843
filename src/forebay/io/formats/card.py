"""The model card of an exported drafter: what it is for, how good it is, how to serve it.

Guarantees: every convention that a reader or an engine could get wrong is written out, and each command line carries
the number of draft tokens that its engine wants (C93: vLLM block_size - 1, SGLang block_size). Figures are printed as
given and said to be missing where they are not. Called by `formats.write_drafter` and `decode.check`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forebay.models.spec import DrafterSpec


def vllm_config(spec: DrafterSpec, drafter: str, drafts: int | None = None) -> dict[str, Any]:
    """vLLM's speculative_config. `drafts`: tokens to draft each round, if other than the block has slots for."""
    return {"method": "dflash", "model": drafter, "num_speculative_tokens": drafts or spec.scored_slots}


def engine_commands(
    spec: DrafterSpec, *, format: str = "zlab", drafter: str = "DRAFTER", target: str = "TARGET"
) -> dict[str, str]:
    """One command or snippet per engine that reads `format`."""
    vllm = json.dumps(vllm_config(spec, drafter))
    commands = {"vllm": f"vllm serve {target} --speculative-config '{vllm}'"}
    if format == "zlab" and not spec.sample_from_anchor:
        commands["sglang"] = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {spec.block_size}"
        )
    if format == "zlab" and not spec.sample_from_anchor and spec.draft_vocab_size is None:
        commands["transformers"] = (
            "from dflash.model import DFlashDraftModel, dflash_generate  # pip install 'dflash[local]'\n"
            f'drafter = DFlashDraftModel.from_pretrained("{drafter}").eval()\n'
            "dflash_generate(drafter, target, input_ids, max_new_tokens=256, stop_token_ids=[...])"
        )
    return commands


def model_card(
    spec: DrafterSpec,
    *,
    format: str = "zlab",
    target: str | None = None,
    about: Mapping[str, Any] | None = None,
    drafter: str = "path/to/this/folder",
) -> str:
    """README.md of an export.

    `about` may hold `data` (what it was trained on), `accept_length`, `acceptance_by_position`, `eval_prompts`,
    `steps`, `license`.
    """
    about = dict(about or {})
    target = target or "TARGET"
    front = {"library_name": "transformers", "tags": ["speculative-decoding", "dflash", "forebay"]}
    if "/" in target and not target.startswith(("/", ".")):
        front["base_model"] = target
    if about.get("license"):
        front["license"] = about["license"]
    lines = ["---", *(f"{k}: {json.dumps(v)}" for k, v in front.items()), "---", ""]
    lines += [f"# DFlash drafter for {target}", ""]
    lines += [
        f"A draft model for speculative decoding of **{target}**, trained with Forebay. It proposes "
        f"{spec.scored_slots} tokens per step; the target verifies them, so the text is the target's own.",
        "",
        "## Figures",
        "",
        *_figures(about),
        "",
        "## Conventions",
        "",
        *(f"- {line}" for line in conventions(spec, format)),
        "",
        "## Serving",
        "",
    ]
    for engine, command in engine_commands(spec, format=format, drafter=drafter, target=target).items():
        lines += [f"{engine}:", "", "```python" if engine == "transformers" else "```sh", command, "```", ""]
    lines += [
        "Before blaming the drafter for an accept length near 1 in an engine, run "
        f"`forebay check {drafter} --target {target} --prompts FILE`: it measures the accept length without engines.",
        "",
    ]
    return "\n".join(lines)


def _figures(about: Mapping[str, Any]) -> list[str]:
    length, shares = about.get("accept_length"), about.get("acceptance_by_position")
    lines = [f"- data: {about.get('data', 'not recorded')}"]
    if about.get("steps") is not None:
        lines.append(f"- optimizer steps: {about['steps']}")
    if length is None:
        return [*lines, "- held-out accept length: not measured"]
    prompts = f" on {about['eval_prompts']} held-out prompts" if about.get("eval_prompts") else ""
    lines.append(
        f"- held-out accept length: {length:.3f}{prompts} (1 + sum over j of P(first j drafts all accepted), greedy)"
    )
    if shares:
        lines.append("- acceptance by position: " + ", ".join(f"{j + 1}: {s:.3f}" for j, s in enumerate(shares)))
    return lines


def conventions(spec: DrafterSpec, format: str = "zlab") -> list[str]:
    """What an engine must do as training did, one line each."""
    ids, masks, longest = list(spec.target_layer_ids), spec.block_size - 1, "not recorded"
    if spec.trained_max_length:
        longest = f"{spec.trained_max_length} tokens, the longest text of its training; beyond it drafts may get worse"
    lines = [
        f"block size {spec.block_size}: the anchor token and {masks} mask tokens (id {spec.mask_token_id})",
        "slot j predicts token anchor + j + 1, from slot 0 on (sample_from_anchor)"
        if spec.sample_from_anchor
        else "slot j predicts token anchor + j for j >= 1; slot 0 is the anchor and predicts nothing",
        f"captured target layers {ids} of {spec.num_target_layers} (0-based; HF hidden_states[id + 1])",
        f"rope: {json.dumps(spec.rope)}; max_position_embeddings {spec.max_positions}, as its target reads",
        f"trained_max_length: {longest}",
        "attention inside a block: causal" if spec.causal else "attention inside a block: bidirectional in full layers",
        "embedding and head are the target's own, in the target's numbering",
    ]
    if format == "speculators":
        lines[2] += (
            f"; this folder's config.json says {[i + 1 for i in ids]}, because its layout counts from the embedding"
        )
    if "sliding_attention" in spec.layer_types:
        inside = "causal" if spec.causal or spec.sliding_causal else "bidirectional"
        lines.append(
            f"sliding layers see {spec.sliding_window} positions, measured from the {spec.window_from}, and are "
            f"{inside} inside the block; layer types {list(spec.layer_types)}"
        )
    if spec.draft_vocab_size is not None:
        lines.append(
            f"the head covers {spec.draft_vocab_size} of {spec.vocab_size} tokens: d2t and t2d in model.safetensors "
            "say which"
        )
    return lines
