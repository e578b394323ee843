"""The step of fixed shape: the same sums and gradients as the eager one, padding or not, compiled once."""

import numpy as np
import pytest
import torch
from drafter_items import CE, borrowed, drafter, features, gradients, item, spec

from forebay.config import LossConfig
from forebay.models import fixed, flex, graph
from forebay.models.attention import attend_dense, visible
from forebay.models.graph import FixedStep, compilations
from forebay.models.step import micro_step

VARIANTS = {
    "plain": ({}, CE),
    "causal": ({"causal": True}, CE),
    "sliding": ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}, CE),
    "dpace": ({}, LossConfig(decay="dpace")),
    "soft": ({}, LossConfig(weights={"ce": 1.0, "kl": 0.5}, decay="none")),
}
SHAPE = {"tokens": 80, "anchors": 8, "slots": 24}


def padded(lengths, anchors, **more):
    """An item of SHAPE, however little it holds."""
    bare = item(lengths, anchors, **more)
    pad = (80 - sum(lengths), 8 - bare.n_anchors, 24 - bare.n_slots)
    return item(lengths, anchors, pad=pad, **more)


FIRST = padded([40, 30], [(0, 3), (0, 9), (1, 5), (1, 20), (1, 28)], gamma=2.0)
OTHER = padded([20, 25, 11], [(0, 2), (1, 20), (2, 1)], gamma=2.0)


def made(variant, **loss):
    change, config = VARIANTS[variant]
    lent = borrowed(norm=torch.nn.Identity())
    step = FixedStep(drafter(**change), lent, config, torch.float32, **SHAPE)
    last = features(80, seed=9, width=32) if config.needs_last_hidden else None
    return step, drafter(**change), lent, config, last


def same(step, eager, lent, config, batch, last):
    x = features(80, seed=batch.n_slots)
    want = micro_step(eager, batch, x, lent, config, 0.1, last_hidden=last)
    for parameter in step.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sums = step(batch, x, 0.1, last)
    for name in vars(want):
        torch.testing.assert_close(getattr(sums, name), getattr(want, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(step.drafter), gradients(eager), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_of_fixed_shape_equals_the_eager_one_for_items_of_any_fill(variant):
    """C88: one shape, whatever an item holds: padding adds nothing."""
    step, eager, lent, config, last = made(variant)
    for batch in (FIRST, OTHER):
        same(step, eager, lent, config, batch, last)


def test_a_step_is_compiled_once_and_refuses_to_be_compiled_again(monkeypatch):
    """Exactly one graph, whatever the items hold; another shape is an error, not a second compilation."""
    monkeypatch.setattr(graph, "BACKEND", "aot_eager")
    step, eager, lent, config, last = made("plain")
    before = compilations()
    assert step.build() == "compiled"
    for batch in (FIRST, OTHER, FIRST):
        same(step, eager, lent, config, batch, last)
    assert compilations() - before == 1
    step.features = torch.zeros(96, 96)
    with pytest.raises(RuntimeError, match="recompile"):
        step._run()


def test_one_graph_with_flex_attention_serves_every_item_of_its_shape():
    """The states as on CUDA, forward only: masks are data, so another item is no other graph."""
    change = {"block_size": 16, "head_dim": 16, "layer_types": ("sliding_attention", "full_attention")}
    model, lent, x = drafter(sliding_window=40, **change), borrowed(), features(300)
    step = FixedStep(model, lent, CE, torch.float32, tokens=300, anchors=20, slots=300, use_flex=True)
    step._made_states = torch.compile(step._states, backend="eager", fullgraph=True, dynamic=False)
    before = compilations()
    for lengths, each in (((140, 130), 9), ((100, 90), 5), ((250, 20), 2)):
        bare = item(lengths, [(d, 3 + 2 * i) for d in range(2) for i in range(each)], block=16)
        pad = (300 - sum(lengths), 20 - bare.n_anchors, 300 - bare.n_slots)
        batch = item(lengths, [(d, 3 + 2 * i) for d in range(2) for i in range(each)], block=16, pad=pad)
        want = micro_step(model, batch, x, lent, CE, 0.1, backward=False)
        step._load(batch, x, 0.1, None)
        with torch.no_grad():
            _, sums = step._forward()
        assert float(sums.loss) == pytest.approx(float(want.loss), rel=1e-5) and torch.equal(sums.hits, want.hits)
    assert compilations() - before == 1


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_step():
    """With C++ code generation, which takes about 20 s a graph."""
    step, eager, lent, config, last = made("plain")
    before = compilations()
    step.build()
    for batch in (FIRST, OTHER):
        same(step, eager, lent, config, batch, last)
    assert compilations() - before == 1


def test_without_a_compiler_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(graph.shutil, "which", lambda name: None)
    with pytest.raises(Exception, match=r"no C\+\+ compiler"):
        made("plain")[0].build()


@pytest.mark.parametrize(
    "change", [{}, {"causal": True}, {"layer_types": ("sliding_attention",) * 2, "sliding_window": 40}]
)
def test_the_masks_for_flex_attention_see_what_the_definition_sees(change):
    """Forward only (FlexAttention has no CPU backward): its rule over buffers, and tiles that leave nothing out."""
    given = spec(block_size=16, heads=2, kv_heads=1, head_dim=16, **change)
    rng = np.random.default_rng(0)
    rows = 300
    anchors = np.append(np.sort(rng.choice(280, 38, replace=False)), [0, 0])
    starts = np.where(anchors < 150, 0, 150)
    first = fixed.first_rows(anchors, starts, given)
    assert np.array_equal(first[0], visible(anchors, starts, given, 0)[0])
    buffers = {k: torch.from_numpy(v) for k, v in fixed.tile_arrays(anchors, first[0], rows).items()}
    seen = torch.from_numpy(anchors), torch.from_numpy(first[0])
    mask = fixed.block_mask(buffers, *seen, rows, given.is_causal(0))
    view = fixed.FixedView(given, seen[0], torch.from_numpy(first), (mask,))
    generator = torch.Generator().manual_seed(0)
    q, k, v, own_k, own_v = (
        torch.randn(n, heads, 16, generator=generator)
        for n, heads in ((640, 2), (rows, 1), (rows, 1), (640, 1), (640, 1))
    )
    with torch.no_grad():
        want = attend_dense(q, (k, v), (own_k, own_v), anchors, starts, given, 0)
        for ours in (view, fixed.FixedView(given, seen[0], torch.from_numpy(first))):
            assert (ours.attend(q, (k, v), (own_k, own_v), 0) - want).abs().max() < 1e-5
    part, whole = flex.tiles(first[0].ravel(), np.repeat(anchors, 16), rows, 16)
    assert torch.equal(mask.to_dense()[0, 0].bool(), torch.from_numpy(part | whole))
    counts, order = buffers["q_num_blocks"][0, 0], buffers["q_indices"][0, 0]
    for key in range(part.shape[1]):
        assert order[key, : counts[key]].tolist() == np.flatnonzero(part[:, key]).tolist()
