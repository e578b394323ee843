"""Are captured states right? At start against a plain forward, and of every item by its reader.

Guarantees: `self_test` compares captures (alone, batched, repeated) with transformers' own `output_hidden_states` and
names the layer and the way that differ. `check_states` refuses an item whose length, width, token ids or values cannot
be those of its job: wrong length, swapped with another, a copy of the one before, constant or not finite. It costs one
read of the features and a few hashes, and cannot tell states that are finite, plausible and wrong: that is the
self-test's part. Called by `stages.extract` and at the start of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.errors import TargetError
from forebay.models.facts import probe_ids
from forebay.models.load import plain_products
from forebay.models.target import Rows, Target

MIN_COSINE = 0.99
PROMPT_LENGTHS = (3, 7, 12)
STRIDE = 16  # packed positions between two sampled rows
SAMPLED_COLUMNS = 64


@dataclass(frozen=True)
class Sample:
    """A few rows of an item, by packed position: (hash of the document's tokens up to it, hash of its features)."""

    rows: dict[int, tuple[int, int]]


def check_states(
    batch: Rows,
    features: torch.Tensor,
    echo: np.ndarray,
    *,
    width: int | None = None,
    layers: int = 1,
    previous: Sample | None = None,
    name: str = "job",
) -> Sample:
    """Check an item's features [>= tokens, K * H] against its batch. Returns the sample for the next call's `previous`.

    width: the K * H that the reader was made for. layers: K, to find a layer that was left out.
    Raises TargetError naming the job and what is wrong.
    """
    tokens = int(batch.doc_offsets[-1])
    if width is not None and features.shape[-1] != width:
        raise TargetError(
            f"{name}: features are {features.shape[-1]} wide but the drafter reads {width}: "
            "target.layer_ids or allow_last_layer differ from those it was made for"
        )
    if len(echo) != tokens or features.shape[0] < tokens:
        raise TargetError(
            f"{name}: {min(len(echo), features.shape[0])} states came back for {tokens} tokens: the target cut the job"
        )
    if not np.array_equal(echo, batch.tokens[:tokens]):
        at = int(np.flatnonzero(echo != batch.tokens[:tokens])[0])
        raise TargetError(
            f"{name}: the states belong to other tokens (position {at}: ran {int(echo[at])}, "
            f"the job has {int(batch.tokens[at])}): results were swapped"
        )
    low, high = torch.aminmax(features[:tokens])
    if not bool(torch.isfinite(low) & torch.isfinite(high)):  # NaN passes through aminmax
        bad = int((~torch.isfinite(features[:tokens]).all(-1)).nonzero()[0])
        raise TargetError(f"{name}: states are not finite (first at packed position {bad})")
    if bool(low == high):
        raise TargetError(f"{name}: all states equal {float(low):g}: the target computed nothing")
    sample = _sample(batch, features, tokens)
    some = features[:tokens:STRIDE].unflatten(-1, (layers, -1))  # [rows, K, H]
    if bool((some == some[..., :1]).all(-1).any()):
        raise TargetError(f"{name}: a token's states are all one number: the target left part of the job out")
    if previous is not None:
        for position, (prefix, row) in sample.rows.items():
            if position in previous.rows and previous.rows[position][1] == row and previous.rows[position][0] != prefix:
                raise TargetError(f"{name}: states are a copy of the item before (packed position {position})")
    return sample


def _sample(batch: Rows, features: torch.Tensor, tokens: int) -> Sample:
    """Every 16th position: states depend on nothing but the document's tokens up to there."""
    positions = range(0, tokens, STRIDE)
    rows = features[:tokens:STRIDE, :SAMPLED_COLUMNS].to(torch.float32).cpu().numpy()
    starts = batch.doc_offsets[np.searchsorted(batch.doc_offsets, positions, side="right") - 1]
    return Sample(
        {
            p: (hash(batch.tokens[s : p + 1].tobytes()), hash(row.tobytes()))
            for p, s, row in zip(positions, starts.tolist(), rows, strict=True)
        }
    )


@dataclass(frozen=True)
class Packed:
    """Prompts in the shape of a host batch. `splits` makes one sub-batch of each, or one of all."""

    tokens: np.ndarray
    doc_offsets: np.ndarray
    splits: tuple[int, ...]

    @property
    def job(self) -> Packed:
        return self

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], splits: tuple[int, ...]) -> Packed:
        lengths = [len(p) for p in prompts]
        return cls(
            np.concatenate([np.asarray(p, np.int32) for p in prompts]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            splits,
        )


def self_test(target: Target, prompts: Sequence[Sequence[int]] | None = None) -> dict[int, float]:
    """Least cosine of each captured layer to a plain forward, over prompts of different lengths.

    Prompts are captured alone, batched, alone again. Raises TargetError naming the layer and the way that differ.
    """
    if prompts is None:
        ids = probe_ids(target.model, sum(PROMPT_LENGTHS))
        ends = np.cumsum(PROMPT_LENGTHS)
        prompts = [ids[e - n : e] for e, n in zip(ends, PROMPT_LENGTHS, strict=True)]
    expected = torch.cat([_plain_states(target, p) for p in prompts])
    single, whole = (1,) * len(prompts), (len(prompts),)
    alone, batched, again = (_captured(target, prompts, splits) for splits in (single, whole, single))
    worst: dict[int, float] = {}
    hidden = target.facts.hidden_size
    for k, layer in enumerate(target.layer_ids):
        part = slice(k * hidden, (k + 1) * hidden)
        for way, got in (("alone", alone), ("batched", batched)):
            cosine = _least_cosine(got[:, part], expected[:, part])
            worst[layer] = min(worst.get(layer, 1.0), cosine)
            if not cosine >= MIN_COSINE:  # NaN counts as different
                raise TargetError(
                    f"self-test: the states captured {way} at layer {layer} differ from a plain forward of "
                    f"{target.facts.architecture} (cosine {cosine:.3f} < {MIN_COSINE}): this target cannot be captured "
                    "reliably with this transformers version"
                )
        # kernels on a GPU may add in another order; a state that leaks moves far more
        same = torch.equal(alone[:, part], again[:, part])
        if not same and (alone.device.type == "cpu" or _least_cosine(alone[:, part], again[:, part]) < 0.9999):
            raise TargetError(
                f"self-test: the states of layer {layer} changed when the same prompts were captured again: "
                f"{target.facts.architecture} keeps something between forwards"
            )
    return worst


def _captured(target: Target, prompts: Sequence[Sequence[int]], splits: tuple[int, ...]) -> torch.Tensor:
    batch = Packed.of(prompts, splits)
    out = torch.zeros(len(batch.tokens), target.feature_width, dtype=target.dtype, device=target.device)
    target.capture(batch, out)
    return out


@torch.inference_mode()
def _plain_states(target: Target, prompt: Sequence[int]) -> torch.Tensor:
    """[len, K * H] by transformers' own means; the last layer's before the final norm, where they give it after."""
    before_norm: list[torch.Tensor] = []
    hook = target.final_norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    try:
        ids = torch.tensor([list(prompt)], device=target.device)
        with plain_products(target.model):
            states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    last = target.facts.num_layers - 1
    return torch.cat([(before_norm[0] if i == last else states[i + 1])[0] for i in target.layer_ids], dim=-1)


def _least_cosine(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(got.float(), expected.float(), dim=-1).min())
