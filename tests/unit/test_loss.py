"""The chunked head and the losses against plain autograd, their memory, their weights and their counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drafter_items import CE, HIDDEN, VOCAB, borrowed, drafter, features, gradients, item
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.config import LossConfig
from forebay.errors import ContractError
from forebay.models import loss as loss_module
from forebay.models.loss import BlockSums, FrozenHead, dpace_weights
from forebay.models.step import micro_step


def block_loss(hidden, slots, labels, weights, head, config, scale=1.0, last=None, first_slot=1):
    """The loss of all blocks' states [A, B, H], of which the slots are taken."""
    rows = hidden.flatten(0, 1).index_select(0, slots)
    shape = (*hidden.shape[:2], first_slot)
    return loss_module.block_loss(rows, slots, labels, weights, head, config, shape, scale, last)


def norm(x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


KEPT = torch.arange(0, VOCAB, 3)
LOSSES = {
    "ce": {},
    "half of ce": {"weights": {"ce": 0.5}},
    "ce on the target's argmax": {"labels": "target"},
    "kl": {"weights": {"kl": 1.0}},
    "tv": {"weights": {"tv": 1.0}},
    "a weighted sum": {"weights": {"ce": 0.3, "kl": 0.5, "tv": 2.0}},
}


def case(kept=None, dtype=torch.float64, slots=37, seed=0, **head):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(10, 4, HIDDEN, generator=generator).to(dtype).requires_grad_()
    last = torch.randn(slots, HIDDEN, generator=generator).to(dtype)
    index = torch.randperm(40, generator=generator)[:slots].sort().values
    labels = torch.randint(0, VOCAB, (slots,), generator=generator)
    weights = torch.rand(slots, generator=generator)
    weights[torch.randperm(slots, generator=generator)[:5]] = 0
    return hidden, index, labels, weights, last, borrowed(dtype, kept=kept, norm=norm, **head).head


def dense_loss(hidden, index, labels, weights, last, head, config):
    """The losses as their formulas read, with every logit at once."""
    rows = hidden.flatten(0, 1)[index]
    kept = torch.arange(VOCAB) if head.kept is None else head.kept

    def logits(x):
        out = x @ head.weight.T
        if head.bias is not None:
            out = out + head.bias
        out = out * head.scale
        return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)

    target = logits(norm(last))
    log_q, p = logits(rows)[:, kept].log_softmax(-1), target[:, kept].softmax(-1)
    wanted = target.argmax(-1) if config.labels == "target" else labels
    inside = torch.isin(wanted, kept)
    row = torch.searchsorted(kept, wanted).clamp_max(len(kept) - 1)
    ce = torch.where(inside, -log_q.gather(1, row[:, None])[:, 0], 0.0)
    terms = {
        "ce": ce,
        "kl": (p * (p.log() - log_q)).sum(-1),
        "tv": (p - log_q.exp()).abs().sum(-1) / 2,
    }
    total = sum(weight * terms[name] for name, weight in config.weights.items())
    hits = (log_q.argmax(-1) == row) & inside & (weights > 0)
    return (total * weights).sum(), int(hits.sum())


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full head", "kept rows"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("chunk", "pieces"), [(5, 1), (64, 1), (5, 7)])
def test_the_chunked_head_equals_the_dense_one(name, kept, chunk, pieces, monkeypatch):
    """C87: loss, hits and gradients; the last chunk is short, as is the vocabulary's last piece, and some chunks hold
    slots without weight."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 8 * chunk * (VOCAB if pieces == 1 else len(KEPT) // pieces))
    config = LossConfig(**LOSSES[name], chunk_slots=chunk)
    *given, head = case(kept)
    want, hits = dense_loss(*given, head, config)
    (slope,) = torch.autograd.grad(want, given[0])
    index, labels, weights, last = given[1:]
    total, sums = block_loss(given[0], index, labels, weights, head, config, 3.0, last)
    (ours,) = torch.autograd.grad(total, given[0])
    assert total.item() == pytest.approx(3 * want.item(), rel=1e-10)
    assert sums.loss.item() == pytest.approx(want.item(), rel=1e-10)
    assert (ours - 3 * slope).abs().max() < 1e-10
    assert int(sums.hits.sum()) == hits


@pytest.mark.parametrize("name", ["ce", "a weighted sum"])
def test_logit_scale_softcap_and_bias_are_honoured(name, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 8 * 7 * len(KEPT) // 3)
    config = LossConfig(**LOSSES[name], chunk_slots=7)
    bias = torch.linspace(-1, 1, VOCAB)
    *given, head = case(KEPT, scale=0.7, softcap=3.0, bias=bias.double())
    want, _ = dense_loss(*given, head, config)
    (slope,) = torch.autograd.grad(want, given[0])
    total, _ = block_loss(*given[:4], head, config, 1.0, given[4])
    (ours,) = torch.autograd.grad(total, given[0])
    assert total.item() == pytest.approx(want.item(), rel=1e-10)
    assert (ours - slope).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_slope_of_an_all_but_certain_label_keeps_its_digits(dtype):
    """Its size is that of the other probabilities, here e^-20, which one minus the label's would round away."""
    head = FrozenHead.build(torch.eye(8)[:, :4] * 2, dtype)
    hidden = torch.tensor([[12.0, 2.0, 1.0, -1.0]], dtype=dtype, requires_grad=True)
    total, sums = block_loss(hidden[None], torch.tensor([0]), torch.tensor([0]), torch.ones(1), head, CE)
    (slope,) = torch.autograd.grad(total, hidden)
    exact = hidden.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact @ head.rows.double().T, torch.tensor([0]))
    (slope_wanted,) = torch.autograd.grad(want, exact)
    assert torch.allclose(slope.double(), slope_wanted, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=0)
    assert 0 < slope_wanted.abs().max() < 1e-8 and int(sums.hits.sum()) == 1


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("name", LOSSES)
def test_no_tensor_of_slots_by_vocabulary_exists(name):
    """C87: forward and backward of 40 slots with 8 a chunk."""
    config = LossConfig(**LOSSES[name], chunk_slots=8)
    hidden, index, labels, weights, last, head = case(slots=40)
    with Largest() as seen:
        block_loss(hidden, index, labels, weights, head, config, 1.0, last)[0].backward()
    assert seen.elements == max(8 * VOCAB, VOCAB * HIDDEN) < 40 * VOCAB


def test_a_head_in_one_chunk_is_caught_by_the_memory_test():
    """Mutation: the dispatch mode does see a [slots, vocabulary] tensor."""
    hidden, index, labels, weights, _, head = case(slots=40)
    with Largest() as seen:
        block_loss(hidden, index, labels, weights, head, LossConfig(chunk_slots=40))
    assert seen.elements >= 40 * VOCAB


def test_weights_scale_the_loss_and_zero_weight_gives_exactly_no_gradient():
    """C07: zero-weight slots: gradient exactly zero; the rest: weight x (softmax - one-hot)."""
    hidden, index, labels, weights, _, head = case()
    total, _ = block_loss(hidden, index, labels, weights, head, CE)
    (slope,) = torch.autograd.grad(total, hidden)
    rows = slope.flatten(0, 1)
    assert torch.equal(rows[index[weights == 0]], torch.zeros(5, HIDDEN, dtype=rows.dtype))
    unused = sorted(set(range(40)) - set(index.tolist()))
    assert not rows[unused].any() and rows[index[weights > 0]].abs().sum(-1).min() > 0


def test_weights_never_enter_the_counts_and_zero_weight_is_unscored():
    """C102 and the metrics section: hits count slots, whatever they weigh; unscored slots are no misses."""
    hidden, index, labels, weights, _, head = case()
    light, heavy = (block_loss(hidden, index, labels, weights * w, head, CE)[1] for w in (1e-3, 10.0))
    for name in ("hits", "scored", "prefix_hits", "prefix_scored"):
        assert torch.equal(getattr(light, name), getattr(heavy, name))
    assert int(light.scored.sum()) == int((weights > 0).sum())


def runs(pattern, first_slot=1):
    """Sums of blocks whose slots are hit (1), missed (0) or unscored (None), through the real loss."""
    blocks, block = len(pattern), len(pattern[0])
    hidden, index, labels, weights = torch.zeros(blocks, block, HIDDEN), [], [], []
    head = borrowed().head
    for a, row in enumerate(pattern):
        for j, hit in enumerate(row):
            hidden[a, j] = head.weight[7] * 100
            if hit is not None:
                index.append(a * block + j)
                labels.append(7 if hit else 8)
                weights.append(1.0)
    best = (head.weight @ head.weight[7]).argmax()
    labels = [int(best) if x == 7 else int(best) + 1 for x in labels]
    return block_loss(
        hidden, torch.tensor(index), torch.tensor(labels), torch.tensor(weights), head, CE, first_slot=first_slot
    )[1]


def test_accept_length_is_one_plus_the_whole_prefixes():
    """C101: measured on runs, not on products of per-slot means; a cut block says nothing of longer runs."""
    report = runs([[None, 1, 1, 0], [None, 0, 1, 1], [None, 1, 0, 1], [None, 1, None, None]]).report()
    assert report["accuracy_by_slot"] == pytest.approx([3 / 4, 2 / 3, 2 / 3])
    assert report["acceptance_by_slot"] == pytest.approx([3 / 4, 1 / 3, 0.0])
    assert report["uniform_accept_length"] == 1 + sum(report["acceptance_by_slot"])
    dspark = runs([[1, 1, 0], [0, 1, 1]], first_slot=0).report()
    assert dspark["acceptance_by_slot"] == pytest.approx([1 / 2, 1 / 2, 0.0])


def test_a_miss_is_a_miss_where_the_label_is_outside_the_draft_vocabulary():
    """C36: 10 labels, 4 outside the map: the denominator counts 10, the 4 are rejected and give no gradient."""
    hidden = torch.zeros(10, 2, HIDDEN, requires_grad=True)
    head = borrowed(kept=torch.arange(100)).head
    labels = torch.tensor([1, 2, 3, 4, 5, 6, 200, 201, 202, 203])
    total, sums = block_loss(hidden, torch.arange(10) * 2 + 1, labels, torch.ones(10), head, CE)
    total.backward()
    assert sums.scored.tolist() == [0, 10] and float(sums.weight) == 10
    assert total.item() == pytest.approx(6 * math.log(100), rel=1e-5)
    rows = hidden.grad[:, 1]
    assert rows[:6].abs().sum(-1).min() > 0 and not rows[6:].any()


def test_dpace_weights_follow_their_formula():
    """w_j = sum over k >= j of the product over i <= k of (1 - alpha) q_i + alpha; unscored slots count as certain."""
    q = torch.tensor([0.9, 0.5, 0.1, 0.7, 0.4], dtype=torch.float64)
    slots = torch.tensor([1, 2, 3, 5, 7])
    scored = torch.tensor([True, True, True, True, True])
    a, b, c, d, e = (0.5 * q + 0.5).tolist()
    want = [a + a * b + a * b * c, a * b + a * b * c, a * b * c, d + d * e, d * e]
    assert dpace_weights(q, scored, slots, 2, 4, 0.5).tolist() == pytest.approx(want)


def test_dpace_scales_each_slot_s_gradient_and_is_not_differentiated():
    hidden, index, labels, weights, _, head = case(slots=40)
    weights = torch.ones(40, dtype=torch.float64)
    plain = torch.autograd.grad(block_loss(hidden, index, labels, weights, head, CE)[0], hidden)[0].flatten(0, 1)
    config = LossConfig(decay="dpace", dpace_alpha=0.3)
    total, sums = block_loss(hidden, index, labels, weights, head, config)
    paced = torch.autograd.grad(total, hidden)[0].flatten(0, 1)
    log_q = (hidden.flatten(0, 1)[index] @ head.weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    want = dpace_weights(log_q.exp(), weights > 0, index, 10, 4, 0.3).detach()
    assert (paced[index] - want[:, None] * plain[index]).abs().max() < 1e-12
    assert total.item() == pytest.approx(-(want * log_q).sum().item()) and float(sums.weight) == 40


def test_soft_losses_without_the_target_s_last_state_say_what_is_missing():
    hidden, index, labels, weights, _, head = case()
    with pytest.raises(ContractError, match="last hidden state"):
        block_loss(hidden, index, labels, weights, head, LossConfig(weights={"kl": 1.0}))


def test_bf16_compute_agrees_with_fp32_within_its_rounding():
    hidden, index, labels, weights, last, _ = case(dtype=torch.float32)
    for name in LOSSES:
        config, got = LossConfig(**LOSSES[name]), []
        for dtype in (torch.float32, torch.bfloat16):
            head = borrowed(dtype, norm=norm).head
            total, _ = block_loss(hidden.to(dtype), index, labels, weights, head, config, 1.0, last)
            got.append((total.item(), torch.autograd.grad(total, hidden)[0].flatten()))
        assert got[1][0] == pytest.approx(got[0][0], rel=2e-2)
        assert torch.cosine_similarity(got[0][1], got[1][1], dim=0) > 0.999


# Windows: the gradient of a step is that of one big batch, however it was split (G6).

DOCS = [[12, 9], [30], [7, 7, 7], [25]]
ANCHORS = [
    [(0, 2), (0, 5), (1, 1)],
    [(0, a) for a in range(3, 25, 4)],
    [],
    [(0, 0), (0, 4), (0, 11), (0, 20)],
]


def whole_and_parts(dtype=torch.float64):
    """One packed batch, and the same documents as four uneven items, the third without a single slot."""
    lengths = [n for docs in DOCS for n in docs]
    tokens = np.random.default_rng(5).integers(0, 300, sum(lengths))
    context = features(len(tokens), dtype)
    anchors, at, parts = [], 0, []
    for docs, own in zip(DOCS, ANCHORS, strict=True):
        first, size = len([n for d in DOCS[: len(parts)] for n in d]), sum(docs)
        anchors += [(first + d, p) for d, p in own]
        parts.append((item(docs, own, tokens=tokens[at : at + size], gamma=2.0), context[at : at + size]))
        at += size
    return (item(lengths, anchors, tokens=tokens, gamma=2.0), context), parts


@pytest.mark.parametrize(
    "config", [LossConfig(), LossConfig(weights={"ce": 0.5, "tv": 1.0}), LossConfig(decay="dpace")]
)
def test_four_uneven_parts_give_the_gradient_of_one_batch(config):
    """G6, C81: parts of very different size, one empty; fp64 to 1e-6 (here 1e-12)."""
    (batch, context), parts = whole_and_parts()
    model, lent = drafter(torch.float64), borrowed(torch.float64, norm=norm)
    last = features(len(context), torch.float64, seed=8, width=HIDDEN)
    scale = 1 / batch.weight_sum

    def step(b, x, y):
        return micro_step(model, b, x, lent, config, scale, last_hidden=y, dtype=torch.float64)

    whole = step(batch, context, last)
    want = gradients(model)
    sums, at = BlockSums.zeros(4), 0
    for b, x in parts:
        sums = sums + step(b, x, last[at : at + len(x)])
        at += len(x)
    assert parts[2][0].n_slots == 0
    assert sum(b.weight_sum for b, _ in parts) == pytest.approx(batch.weight_sum)
    for name, grad in gradients(model).items():
        assert (grad - want[name]).abs().max() < 1e-12, name
    for name, number in whole.report().items():
        assert sums.report()[name] == pytest.approx(number), name


def test_a_mean_of_part_means_is_seen_to_differ():
    """Mutation: dividing each part by its own weights is not the window's gradient."""
    (batch, context), parts = whole_and_parts()
    model, lent = drafter(torch.float64), borrowed(torch.float64)
    micro_step(model, batch, context, lent, CE, 1 / batch.weight_sum, dtype=torch.float64)
    want = gradients(model)["fc.weight"]
    for b, x in parts:
        micro_step(model, b, x, lent, CE, 1 / max(4 * b.weight_sum, 1e-9), dtype=torch.float64)
    assert (gradients(model)["fc.weight"] - want).norm() > 0.05 * want.norm()


def test_packing_equals_the_weighted_average_of_separate_runs():
    """C65: rows of 9, 5 and 13 tokens in one item with padding."""
    anchors = [(0, 2), (0, 5), (1, 1), (2, 0), (2, 8)]
    batch = item([9, 5, 13], anchors, pad=(5, 3, 4))
    model, lent, context = drafter(), borrowed(), features(32)
    packed = float(micro_step(model, batch, context, lent, CE, 1.0).loss) / batch.weight_sum
    total, weight = 0.0, 0.0
    for d, (a, b) in enumerate([(0, 9), (9, 14), (14, 27)]):
        alone = item([b - a], [(0, p) for q, p in anchors if q == d], tokens=batch.tokens[a:b])
        total += float(micro_step(model, alone, context[a:b], lent, CE, 1.0).loss)
        weight += alone.weight_sum
    assert packed == pytest.approx(total / weight, rel=1e-5)
