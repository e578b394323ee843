"""Guarantee G8: agreement of the trainer's forward with the serving loop, and planted faults caught by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import forebay.models.step
from drafters import train_on_own_text, zlab_config, zlab_tensors
from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import summarize
from forebay.decode.guard import drafts_along, guard, label_shift
from forebay.decode.serve import Generation, serve
from forebay.decode.target_side import TargetSide
from forebay.errors import GuardError
from forebay.io.formats.zlab import zlab_spec
from forebay.models.drafter import Drafter
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed
from forebay.models.target import Target
from forebay.models.vocabulary import map_tensors
from forebay.models.walk import Walk
from tiny import LAYER_IDS, tiny_target

Case = SimpleNamespace
OVERFIT = [17, 240, 33, 99, 5]


def case(**overrides: Any) -> Case:
    """T0, a random drafter served and trained, and what the loop gave on a few prompts."""
    config = zlab_config(**overrides)
    tensors = zlab_tensors(config, seed=1)
    model = tiny_target(seed=2, max_position_embeddings=512)
    served = ServedDrafter(config, tensors)
    side = TargetSide(model, served.layer_ids)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 300, (n,), generator=g).tolist() for n in (3, 9, 14, 6)]
    return Case(
        model=model,
        served=served,
        side=side,
        tensors=tensors,
        spec=zlab_spec(config, "float32"),
        generations=serve(side, served, rows, max_new_tokens=24, batch_size=4),
    )


def trainer(c: Case, spec: DrafterSpec | None = None, layer_ids: Sequence[int] = LAYER_IDS) -> Walk:
    drafter = Drafter(spec or c.spec)
    drafter.load_state_dict(c.tensors)
    target = Target(c.model, layer_ids, allow_last_layer=True)
    return Walk(target, drafter, Borrowed.of(target, torch.float32))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sample_from_anchor": True},
        {"causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True},
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 6,
            "use_sliding_window": True,
            "window_from": "anchor",
            "sliding_causal": False,
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ],
)
def test_the_trainers_forward_drafts_what_the_loop_drafts_in_every_variant(overrides: dict[str, Any]) -> None:
    c = case(**overrides)
    report = guard(c.generations, trainer(c), target=c.side, drafter=c.served)
    assert report.rounds == sum(len(g.accepted) for g in c.generations) > 20
    assert report.agreement == report.slot_agreement == 1.0
    assert report.loop_acceptance == report.trainer_acceptance


def test_the_guard_agrees_with_a_reduced_vocabulary_and_catches_another_map() -> None:
    """C33 at serving: the same weights with a map of equal size that names other tokens draft other tokens."""
    c = case(draft_vocab_size=40)
    kept, other = torch.arange(4, 244, 6), torch.arange(5, 245, 6)
    target = Target(c.model, LAYER_IDS)

    def drafts(kept: torch.Tensor) -> Walk:
        drafter = Drafter(c.spec)
        drafter.set_vocabulary(kept)
        drafter.load_state_dict(c.tensors | map_tensors(kept, 320))
        return Walk(target, drafter, Borrowed.of(target, torch.float32, kept))

    served = ServedDrafter(c.served.config, c.tensors | map_tensors(kept, 320))
    out = serve(c.side, served, [[3, 4, 5], [9] * 7], max_new_tokens=16)
    assert guard(out, drafts(kept), target=c.side, drafter=served).slot_agreement == 1.0
    with pytest.raises(GuardError, match="the same token in 0"):
        guard(out, drafts(other), target=c.side, drafter=served)


def caught(c: Case, walk: Callable[..., torch.Tensor]) -> str:
    with pytest.raises(GuardError) as error:
        guard(c.generations, walk, target=c.side, drafter=c.served)
    return str(error.value)


def test_a_changed_rope_theta_is_caught_by_name() -> None:
    c = case()
    spec = replace(c.spec, rope={"rope_type": "default", "rope_theta": 1e6})
    assert "rope theta 1e+06, the drafter says 10000 (100%)" in caught(c, trainer(c, spec))


def test_layer_ids_off_by_one_are_caught_by_name() -> None:
    c = case()
    assert "layer ids [1, 3, 5], the drafter says [0, 2, 4]: off by one" in caught(c, trainer(c, layer_ids=(1, 3, 5)))


def test_a_swapped_slot_convention_is_caught_by_name() -> None:
    c = case()
    other = trainer(c, replace(c.spec, sample_from_anchor=True))
    assert "drafts 4 tokens per block and the loop 3: the slot convention differs" in caught(c, other)
    assert "slot convention swapped" in caught(c, lambda tokens, anchors: other(tokens, anchors)[:, :3])


def test_a_mask_token_that_is_pad_is_caught_by_name() -> None:
    c = case()
    assert "mask token 0 (pad_token_id), the drafter says 310" in caught(
        c, trainer(c, replace(c.spec, mask_token_id=0))
    )


def test_a_leaking_mask_is_caught_by_name(monkeypatch: Any) -> None:
    c = case()
    plain = forebay.models.step.block_view

    def leaking(anchors: np.ndarray, *rest: Any) -> Any:
        return plain(anchors + 1, *rest)

    monkeypatch.setattr(forebay.models.step, "block_view", leaking)
    assert "a leaking mask: 1 context positions from the anchor on are visible" in caught(c, trainer(c))


def test_an_ignored_window_and_a_swapped_causality_are_caught_by_name() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
    c = case(**sliding)
    full = replace(c.spec, layer_types=("full_attention",) * 2, sliding_window=None, causal=True)
    assert "the window is ignored" in caught(c, trainer(c, full))
    assert "window measured from the anchor" in caught(c, trainer(c, replace(c.spec, window_from="anchor")))
    c = case()
    assert "causal=True inside the block" in caught(c, trainer(c, replace(c.spec, causal=True)))


def test_a_difference_that_no_usual_mistake_makes_is_told_from_its_pattern() -> None:
    """Acceptance planted in the figures: rope's pattern, a cliff, and everything different."""
    text = list(range(40, 140))
    drafts = [[text[a + j] for j in (1, 2, 3)] for a in range(10, 90, 4)]
    generation = Generation(text[:11], verified=text[11:], accepted=[3] * 20, starts=list(range(10, 90, 4)))
    generation.drafts, generation.margins = drafts, [[1.0] * 3] * 20

    def but(change: Callable[[int, list[int]], list[int]]) -> str:
        rows = torch.tensor([change(i, list(d)) for i, d in enumerate(drafts)])
        with pytest.raises(GuardError) as error:
            guard([generation], lambda tokens, anchors: rows)
        return str(error.value)

    assert "look at rope" in but(lambda i, d: [d[0] if i % 5 == 0 else 1, 1, 1])
    assert "breaks off at position 3" in but(lambda i, d: [*d[:2], 1])
    assert "Every position differs" in but(lambda i, d: [1, 1, 1])
    assert "No usual mistake" in but(lambda i, d: d if i % 3 else [1, d[1], d[2]])


def test_near_ties_are_set_aside_and_counted() -> None:
    c = case()
    rows = {}

    def nearly(tokens: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
        out = drafts_along(c.side, c.served, tokens, anchors)
        rows[tuple(tokens)] = out
        return out

    assert guard(c.generations, nearly).near_ties == 0
    text = c.generations[0].prompt + c.generations[0].verified
    first = c.generations[0].starts[0]
    c.generations[0].drafts[0][0] = text[first + 1]  # the loop accepts one more than the trainer ...
    c.generations[0].accepted[0] = 1
    rest = c.generations[:1]
    with pytest.raises(GuardError):
        guard(rest, nearly)
    c.generations[0].margins[0] = [1e-5] * 3  # ... by a tie
    assert guard(rest, nearly).near_ties == 1


def test_without_rounds_there_is_nothing_to_judge() -> None:
    assert guard([Generation([1, 2], verified=[3])], lambda t, a: torch.zeros(0, 3)).rounds == 0


def overfit(c: Case, steps: int, shift: int) -> list[Generation]:
    """The loop with a drafter trained on the text it is about to serve."""
    trained = train_on_own_text(c.model, c.spec, c.tensors, OVERFIT, steps=steps, shift=shift)
    served = ServedDrafter(c.served.config, trained.drafter.state_dict())
    out = serve(c.side, served, [OVERFIT], max_new_tokens=36)
    if shift == 0:
        assert guard(out, trained, target=c.side, drafter=served).agreement == 1.0
    return out


def test_overfitting_one_row_is_accepted_nearly_whole_and_labels_off_by_one_are_caught_by_name() -> None:
    """C05 and its mutation."""
    c = case()
    out = overfit(c, 120, 0)
    assert summarize(out, 3).accept_length >= 3.5
    assert label_shift(out) is None
    shifted = overfit(c, 120, 1)
    assert summarize(shifted, 3).accept_length < 2
    message = label_shift(shifted)
    assert message is not None and "shifted by +1" in message and "labels were off by one" in message
