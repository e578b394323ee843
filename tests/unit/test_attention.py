"""What a block sees: the rule, its chunked form, and the faults that would break it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafter_items import HIDDEN, borrowed, drafter, features, item, spec

from forebay.cost.flops import DrafterShape
from forebay.cost.memory import drafter_step_bytes
from forebay.models import attention, flex
from forebay.models.attention import attend, attend_dense, block_view
from forebay.models.step import slot_states

VARIANTS = {
    "bidirectional": {},
    "causal": {"causal": True},
    "one head": {"heads": 1, "kv_heads": 1},
    "sliding from the query": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6},
    "sliding from the anchor": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 6,
        "window_from": "anchor",
        "sliding_causal": False,
    },
}


def heads(made, rows, blocks, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def of(count, n):
        return torch.randn(count, n, made.head_dim, generator=generator, dtype=dtype).requires_grad_()

    slots, groups = blocks * made.block_size, made.kv_heads
    return of(slots, made.heads), (of(rows, groups), of(rows, groups)), (of(slots, groups), of(slots, groups))


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_attention_equals_the_dense_definition(variant):
    """Outputs and gradients, over many anchors in documents of uneven length and with anchors that see nothing."""
    made = spec(**VARIANTS[variant])
    rng = np.random.default_rng(0)
    cuts, rows = [0, 7, 8, 60, 64, 120], 120
    anchors = np.sort(rng.choice(rows, 40, replace=False))
    starts = np.asarray(cuts)[np.searchsorted(cuts, anchors, side="right") - 1]
    anchors, starts = np.append(anchors, [0, 0]), np.append(starts, [0, 0])
    results = []
    for dense in (True, False):
        q, context, own = heads(made, rows, len(anchors))
        if dense:
            out = attend_dense(q, context, own, anchors, starts, made, 0)
        else:
            out = attend(q, context, own, block_view(anchors, starts, made, torch.float64), 0)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
        results.append((out, *torch.autograd.grad(out, (q, *context, *own), upstream)))
    for ours, want in zip(*results, strict=True):
        assert (ours - want).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_flex_mask_equals_the_dense_definition(variant):
    """Forward only, in eager mode (its CPU kernel has no backward); and no tile that is needed is left out."""
    made = spec(**VARIANTS[variant])
    rng = np.random.default_rng(1)
    cuts, rows = [0, 560, 567, 600], 700
    anchors = np.sort(rng.choice(600, 90, replace=False))
    starts = np.asarray(cuts)[np.searchsorted(cuts, anchors, side="right") - 1]
    anchors, starts = np.append(anchors, [0, 0]), np.append(starts, [0, 0])
    q, context, own = heads(made, rows, len(anchors), torch.float32)
    mask = block_view(anchors, starts, made, flex_context=rows).flex[0]
    with torch.no_grad():
        want = attend_dense(q, context, own, anchors, starts, made, 0)
        keys, values = (torch.cat(x) for x in zip(context, own, strict=True))
        assert (flex.attend_flex(q.detach(), keys, values, mask, flex.flex_attention) - want).abs().max() < 1e-5
    count = torch.arange
    seen = mask.mask_mod(None, None, count(len(q))[:, None], count(len(keys))[None])
    pad = [-n % flex.TILE for n in seen.shape]
    by_tile = torch.nn.functional.pad(seen, (0, pad[1], 0, pad[0])).unfold(0, 128, 128).unfold(1, 128, 128)
    first, _ = attention.visible(anchors, starts, made, 0)
    some, whole = flex.tiles(first.ravel(), np.repeat(anchors, made.block_size), rows, made.block_size)
    assert (by_tile.any(-1).any(-1).numpy() <= (some | whole)).all()
    assert (whole <= by_tile.all(-1).all(-1).numpy()).all() and (whole.any() or "sliding" in variant)
    assert (some | whole).mean() < 0.7 and torch.equal(mask.to_dense()[0, 0].bool(), torch.from_numpy(some | whole))


def test_the_context_of_a_chunk_is_no_wider_than_its_documents():
    """No mask of all queries and all keys: the pairs computed stay near the pairs that are visible."""
    made = spec(block_size=16)
    lengths = [50] * 40
    starts = np.repeat(np.arange(0, 2000, 50), 8)
    anchors = starts + np.tile(np.arange(5, 45, 5), 40)
    view = block_view(anchors, starts, made)
    chunks = view.layers[0].chunks
    pairs = sum((c.last - c.first) * 16 * (c.hi - c.lo) for c in chunks)
    visible = sum(16 * (anchors - starts))
    assert sum(lengths) == 2000 and visible <= pairs < 0.05 * (320 * 16) * 2000
    assert [c.first for c in chunks] == [0, *(c.last for c in chunks[:-1])] and chunks[-1].last == 320


def test_layers_of_one_kind_share_their_chunks():
    view = block_view(np.array([9]), np.array([0]), spec(layers=3))
    assert view.layers[0] is view.layers[1] is view.layers[2]


def test_an_item_without_anchors_has_no_chunks():
    assert [x.chunks for x in block_view(np.array([], int), np.array([], int), spec()).layers] == [(), ()]


def test_an_item_without_anchors_or_slots_is_an_empty_one_and_not_an_error():
    none = SimpleNamespace(**vars(item([9], [(0, 2)])) | {"n_anchors": 0, "n_slots": 0})
    assert states(drafter(), none, features(9)).shape == (0, 4, HIDDEN)
    assert drafter_step_bytes(DrafterShape.of(spec()), tokens=9, anchors=0, slots=0, dtype="float32") > 0


def states(made, batch, context, tokens=None):
    given = SimpleNamespace(**vars(batch) | ({} if tokens is None else {"tokens": tokens}))
    with torch.no_grad():
        return slot_states(made, given, context, borrowed(context.dtype), context.dtype)


def test_nothing_at_or_after_the_anchor_reaches_its_block():
    """C01: anchors 8..20; states and tokens from a on are changed; the block at a stays bit-equal."""
    made, context = drafter(), features(40)
    batch = item([40], [(0, a) for a in range(8, 21)])
    before = states(made, batch, context)
    for i, a in enumerate(range(8, 21)):
        changed, tokens = context.clone(), batch.tokens.copy()
        changed[a:] += 1.0
        tokens[a + 1 :] = (tokens[a + 1 :] + 7) % 300
        after = states(made, batch, changed, tokens)
        assert torch.equal(after[i], before[i])
        assert not torch.equal(after[-1], before[-1]) or a == 20


def test_a_leaking_mask_is_seen_by_the_leak_test(monkeypatch):
    """Mutation: a rule that lets blocks see their anchor's own context row fails C01."""
    rule = attention._chunk

    def leak(a, b, anchors, first, dtype, device):
        return rule(a, b, anchors + 1, first, dtype, device)

    monkeypatch.setattr(attention, "_chunk", leak)
    with pytest.raises(AssertionError):
        test_nothing_at_or_after_the_anchor_reaches_its_block()


def test_blocks_do_not_see_one_another():
    """C02: the block at 10 alone equals itself among 8, 9, 10, 11; and the other way round when computed apart."""
    made, context = drafter(torch.float64), features(40, torch.float64)
    alone = states(made, item([40], [(0, 10)]), context)
    among = states(made, item([40], [(0, a) for a in (8, 9, 10, 11)]), context)
    assert (among[2] - alone[0]).abs().max() < 1e-6


def test_documents_of_one_item_do_not_see_one_another():
    """C65: changing row 0 leaves row 1's blocks as they were, and a row packed equals the row alone."""
    made, context = drafter(), features(27)
    anchors = [(0, 4), (1, 1), (1, 3), (2, 0), (2, 9)]
    batch = item([9, 5, 13], anchors)
    before = states(made, batch, context)
    changed = context.clone()
    changed[:9] += 1.0
    after = states(made, batch, changed)
    assert torch.equal(after[1:], before[1:]) and not torch.equal(after[0], before[0])
    for d, (a, b) in enumerate([(0, 9), (9, 14), (14, 27)]):
        own = [p for q, p in anchors if q == d]
        alone = states(made, item([b - a], [(0, p) for p in own]), context[a:b], batch.tokens[a:b])
        mine = [i for i, (q, _) in enumerate(anchors) if q == d]
        assert (alone - before[mine]).abs().max() < 1e-5


def test_padding_changes_nothing():
    made, context = drafter(), features(40)
    plain = states(made, item([20, 12], [(0, 8), (1, 3)]), context)
    padded = states(made, item([20, 12], [(0, 8), (1, 3)], pad=(8, 3, 5)), context)
    assert torch.equal(plain, padded)


@pytest.mark.parametrize(("kinds", "moves"), [(("sliding_attention",), False), (("full_attention",), True)])
def test_context_beyond_the_window_does_not_move_a_sliding_block(kinds, moves):
    """C22: window 8, 32 tokens of context: token 3 is out of reach of the block at 30, except in a full layer."""
    window = 8 if kinds == ("sliding_attention",) else None
    made, context = drafter(layers=1, layer_types=kinds, sliding_window=window), features(32)
    batch = item([32], [(0, 30)])
    before = states(made, batch, context)
    changed = context.clone()
    changed[3] += 5.0
    assert torch.equal(states(made, batch, changed), before) is not moves


@pytest.mark.parametrize(("start", "window", "lowest"), [("query", 8, [23, 24, 25, 26]), ("anchor", 8, [22] * 4)])
def test_the_window_reaches_exactly_as_far_as_it_says(start, window, lowest):
    """From the query slot j of the block at a sees a + j - W + 1 and on; from the anchor a - W and on."""
    change = {"layers": 1, "layer_types": ("sliding_attention",), "sliding_window": window, "window_from": start}
    made, context = drafter(**change), features(32)
    batch = item([32], [(0, 30)])
    before = states(made, batch, context)[0]
    for row in range(20, 30):
        changed = context.clone()
        changed[row] += 5.0
        moved = (states(made, batch, changed)[0] != before).any(-1).tolist()
        assert moved == [row >= low for low in lowest], row


def test_a_causal_block_hides_later_slots_and_a_bidirectional_one_does_not():
    """Changing the mask embedding's later slots is impossible from outside, so slots are compared at other lengths."""
    for causal in (True, False):
        short, long = (drafter(causal=causal, block_size=b) for b in (3, 5))
        long.load_state_dict(short.state_dict())
        context = features(40)
        a = states(short, item([40], [(0, 20)], block=3), context)[0]
        b = states(long, item([40], [(0, 20)], block=5), context)[0]
        assert torch.allclose(a, b[:3], atol=1e-6) is causal
