"""The serving loop: lossless, batched, and counted as documented."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import forebay.decode
from drafters import foresee, random_drafter
from forebay.decode.drafter import Context
from forebay.decode.evaluate import compare, eos_ids, evaluate, greedy_reference, measure_speed, summarize
from forebay.decode.serve import Generation, judge, serve
from forebay.decode.target_side import TargetSide
from forebay.errors import DataError, TargetError, UsageError
from tiny import EOS, EOT, tiny_target

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def prompts(count: int = 5, seed: int = 3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=g).tolist()
    return [torch.randint(4, 300, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_output_is_the_targets_own_whatever_is_drafted(monkeypatch: Any, right: float, batch_size: int) -> None:
    """Rows of a batch accept different numbers of drafts, so stale columns are masked for some and used by others."""
    model, rows = tiny_target(), prompts()
    expected = greedy_reference(model, rows, max_new_tokens=30, eos=(), batch_size=2)
    longer = greedy_reference(model, rows, max_new_tokens=40, eos=(), batch_size=5)
    foresee(monkeypatch, {tuple(p): t for p, t in zip(rows, longer, strict=True)}, right)
    drafter = random_drafter()
    target = TargetSide(model, drafter.layer_ids)
    out = serve(target, drafter, rows, max_new_tokens=30, batch_size=batch_size)
    assert [g.tokens for g in out] == expected
    rate = summarize(out, 3).accept_length
    assert rate == 4 if right == 1.0 else 1.0 <= rate < 4


def test_a_real_drafters_rounds_do_not_depend_on_the_batch() -> None:
    model, drafter, rows = tiny_target(), random_drafter(), prompts(6)
    target = TargetSide(model, drafter.layer_ids)
    alone = serve(target, drafter, rows, max_new_tokens=20, batch_size=1)
    together = serve(target, drafter, rows, max_new_tokens=20, batch_size=6)
    assert [(g.tokens, g.accepted, g.drafts) for g in alone] == [(g.tokens, g.accepted, g.drafts) for g in together]


def test_without_a_drafter_the_loop_is_plain_greedy_decoding() -> None:
    model, rows = tiny_target(), prompts()
    out = serve(TargetSide(model, ()), None, rows, max_new_tokens=12, batch_size=4)
    assert [g.tokens for g in out] == greedy_reference(model, rows, max_new_tokens=12, eos=())


def test_a_text_that_ends_stops_there_and_its_last_round_is_counted_apart(monkeypatch: Any) -> None:
    model, rows = tiny_target(), prompts()
    texts = greedy_reference(model, rows, max_new_tokens=40, eos=())
    at = next(i for i in range(5, 40) if texts[0][i] not in texts[0][:i])
    end = texts[0][at]
    expected = greedy_reference(model, rows, max_new_tokens=30, eos=[end])
    foresee(monkeypatch, {tuple(p): t for p, t in zip(rows, texts, strict=True)}, 1.0)
    drafter = random_drafter()
    out = serve(TargetSide(model, drafter.layer_ids), drafter, rows, max_new_tokens=30, eos_token_ids=[end])
    assert [g.tokens for g in out] == expected
    first = out[0]
    assert first.finish == "eos" and first.tokens[-1] == end
    assert first.accepted == [3] * ((at - 1) // 4) and first.cut_rounds == 1  # token 0 comes with the prompt
    assert summarize(out, 3).cut_rounds == sum(end in g.verified[1:] for g in out)


def test_the_round_that_passes_max_new_tokens_counts_whole(monkeypatch: Any) -> None:
    model, rows = tiny_target(), prompts(1)
    texts = greedy_reference(model, rows, max_new_tokens=40, eos=())
    foresee(monkeypatch, {tuple(rows[0]): texts[0]}, 1.0)
    drafter = random_drafter()
    (out,) = serve(TargetSide(model, drafter.layer_ids), drafter, rows, max_new_tokens=7)
    assert out.tokens == texts[0][:7] and out.verified == texts[0][:9]
    assert out.accepted == [3, 3] and out.finish == "length"
    text = out.prompt + out.verified
    for start, drafts, accepted in zip(out.starts, out.drafts, out.accepted, strict=True):
        assert text[start + 1 : start + 1 + accepted] == drafts[:accepted]


def test_sample_from_anchor_drafts_a_token_from_every_slot(monkeypatch: Any) -> None:
    drafter = random_drafter(sample_from_anchor=True)
    model, rows = tiny_target(), prompts(2)
    target = TargetSide(model, drafter.layer_ids)
    out = serve(target, drafter, rows, max_new_tokens=8)
    assert all(len(d) == 4 for g in out for d in g.drafts)
    assert [g.tokens for g in out] == greedy_reference(model, rows, max_new_tokens=8, eos=())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_never_copies_weights(rows: int) -> None:
    """For slices of three dimensions torch takes batched products, in bf16 over copies of the weights."""
    target, drafter = TargetSide(tiny_target().requires_grad_(False), (0, 2, 4)), random_drafter()
    context, seen = Context(drafter.layers), torch.ones(rows, 2, dtype=torch.bool)
    features, positions = torch.randn(rows, 4, 3 * 32)[:, :2], torch.arange(6).expand(rows, -1)
    block = torch.randn(rows, drafter.block_size, 32)
    products: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        drafter.extend(context, features, positions[:, :2])
        keys = products.count("bmm")
        hidden = drafter.forward(block, positions[:, 2:], context, seen)
        forward = products.count("bmm")
        drafter.draft_logits(hidden, target.head)
    assert keys == 0 and products.count("bmm") == forward and "mm" in products


def test_a_reduced_vocabulary_drafts_only_its_own_tokens() -> None:
    """C34's serving half: draft ids are mapped by the stored map, and tokens outside it are never drafted."""
    from drafters import zlab_config, zlab_tensors
    from forebay.decode.drafter import ServedDrafter

    config = zlab_config(draft_vocab_size=10)
    chosen = torch.arange(5, 305, 30)
    tensors = zlab_tensors(config) | {"d2t": chosen - torch.arange(10)}
    model, rows = tiny_target(), prompts(3)
    out = serve(TargetSide(model, (0, 2, 4)), ServedDrafter(config, tensors), rows, max_new_tokens=6)
    assert {t for g in out for d in g.drafts for t in d} <= set(chosen.tolist())
    head = model.get_output_embeddings().weight[chosen]
    stored = ServedDrafter(config, tensors | {"lm_head.weight": head.detach()})
    again = serve(TargetSide(model, (0, 2, 4)), stored, rows, max_new_tokens=6)
    assert [g.drafts for g in again] == [g.drafts for g in out]


def test_changing_a_token_outside_the_window_changes_full_layers_only() -> None:
    """C22: context token 3 is invisible to a sliding drafter's block at 30 with window 8, visible to a full one."""
    from forebay.decode.drafter import Context

    features = torch.randn(1, 30, 96, generator=torch.Generator().manual_seed(0))
    changed = features.clone()
    changed[:, 3] += 1

    def hidden(drafter: Any, features: torch.Tensor) -> torch.Tensor:
        context = Context(drafter.layers)
        drafter.extend(context, features, torch.arange(30)[None])
        block = torch.ones(1, 4, 32)
        return drafter.forward(block, 30 + torch.arange(4)[None], context, torch.ones(1, 30, dtype=torch.bool))

    one = {"num_hidden_layers": 1}
    for window_from in ("query", "anchor"):
        sliding = random_drafter(**one, layer_types=["sliding_attention"], sliding_window=8, window_from=window_from)
        assert torch.equal(hidden(sliding, features), hidden(sliding, changed))
        edge = features.clone()
        edge[:, 22] += 1  # 30 - 8: seen from the anchor, not from any query
        assert torch.equal(hidden(sliding, features), hidden(sliding, edge)) == (window_from == "query")
    full = random_drafter(**one, layer_types=["full_attention"])
    assert not torch.equal(hidden(full, features), hidden(full, changed))


def test_sliding_window_targets_shorter_than_the_text_are_served_one_by_one() -> None:
    model = MistralForCausalLM(MistralConfig(**TINY, sliding_window=12)).eval()
    drafter, rows = random_drafter(target_layer_ids=[0, 1, 2]), prompts(4)
    target = TargetSide(model, drafter.layer_ids)
    assert target.rows_at_once(40) == 1 and target.rows_at_once(12) is None
    out = serve(target, drafter, rows, max_new_tokens=20, batch_size=4)
    assert [g.tokens for g in out] == greedy_reference(model, rows, max_new_tokens=20, eos=(), batch_size=1)


def test_soft_capped_and_embedding_scaled_targets_are_served_as_they_are() -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**TINY, sliding_window=16, query_pre_attn_scalar=8)).eval()
    granite = GraniteForCausalLM(GraniteConfig(**TINY, embedding_multiplier=12.0, logits_scaling=4.0)).eval()
    assert TargetSide(gemma, ()).embed_scale == 1.0  # its embedding module scales already
    assert TargetSide(granite, ()).embed_scale == pytest.approx(12.0, rel=1e-4)
    drafter, rows = random_drafter(target_layer_ids=[0, 1, 2]), prompts(3)
    for model in (gemma, granite):
        out = serve(TargetSide(model, drafter.layer_ids), drafter, rows, max_new_tokens=16)
        assert [g.tokens for g in out] == greedy_reference(model, rows, max_new_tokens=16, eos=(), batch_size=1)


def test_a_target_with_linear_attention_is_read_again_each_round() -> None:
    config = Qwen3NextConfig(
        **TINY,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    model = Qwen3NextForCausalLM(config).eval()
    drafter, rows = random_drafter(target_layer_ids=[0, 1, 2]), prompts(2)
    target = TargetSide(model, drafter.layer_ids)
    assert target.reread
    out = serve(target, drafter, rows, max_new_tokens=10)
    assert [g.tokens for g in out] == greedy_reference(model, rows, max_new_tokens=10, eos=(), batch_size=1)


def test_layers_that_the_target_lacks_are_refused() -> None:
    with pytest.raises(TargetError, match=r"layer 6 does not exist.*0\.\.5"):
        TargetSide(tiny_target(), (0, 6))


def test_empty_prompts_and_impossible_numbers_are_refused() -> None:
    target, drafter = TargetSide(tiny_target(), (0, 2, 4)), random_drafter()
    with pytest.raises(UsageError, match="empty"):
        serve(target, drafter, [[5], []], max_new_tokens=4)
    with pytest.raises(UsageError, match="max_new_tokens 0"):
        serve(target, drafter, [[5]], max_new_tokens=0)
    with pytest.raises(DataError, match="no held-out prompt"):
        evaluate(tiny_target(), drafter, [])


def test_accept_length_is_one_plus_the_sum_of_acceptance_by_position() -> None:
    """C101, and the mean by request beside it: rounds of 3, 0 and 1 accepted drafts in two prompts."""
    report = summarize([Generation([1], accepted=[3, 0]), Generation([2], accepted=[1])], 3)
    assert report.acceptance_by_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert report.accept_length == pytest.approx(1 + sum(report.acceptance_by_position)) == pytest.approx(1 + 4 / 3)
    assert report.accept_length_by_request == pytest.approx((2.5 + 2) / 2)


def test_short_and_long_answers_are_told_apart() -> None:
    """An answer of 64 tokens belongs to the first band, one of 65 to the second; a band without answers is left out."""
    answers = [(64, [3, 0]), (65, [1]), (3, [3]), (600, [])]
    report = summarize([Generation([1], tokens=[7] * n, accepted=accepted) for n, accepted in answers], 3)
    assert [(b["from"], b["to"], b["prompts"], b["rounds"]) for b in report.by_answer_length] == [
        (1, 64, 2, 3),
        (65, 128, 1, 1),
        (513, None, 1, 0),
    ]
    assert [b["accept_length"] for b in report.by_answer_length] == pytest.approx([3, 2, 1])


def test_evaluation_finds_the_output_identical_and_measures_both_speeds() -> None:
    model, drafter = tiny_target(), random_drafter()
    report, _ = evaluate(model, drafter, prompts(4), max_new_tokens=16, speed_model=model, speed_prompts=1)
    assert report.identical_to_target is True and report.near_ties == 0
    assert report.prompts == 4 and report.rounds > 0
    assert report.target_tokens_per_s > 0 and report.speculative_tokens_per_s > 0
    assert eos_ids(model) == (EOS, EOT)
    assert {"accept_length", "acceptance_by_position", "rounds", "prompts", "near_ties"} <= set(report.to_dict())


def test_texts_longer_than_the_drafter_was_trained_on_are_said() -> None:
    """C24's serving half, by the field that carries the trained length."""
    drafter = random_drafter(trained_max_length=12)
    report, _ = evaluate(tiny_target(), drafter, [[5] * 8], max_new_tokens=6)
    assert report.notes == ["texts of up to 14 tokens, but the drafter was trained on at most 12"]
    assert evaluate(tiny_target(), drafter, [[5] * 4], max_new_tokens=6)[0].notes == []


def test_a_drafter_that_an_engine_would_cut_short_is_said() -> None:
    """An older export of ours: the trained length under the name of the positions."""
    old = random_drafter(max_position_embeddings=100, target_fingerprint="0123456789abcdef")
    report, _ = evaluate(tiny_target(), old, [[5] * 8], max_new_tokens=6)
    (note,) = report.notes
    assert "max_position_embeddings is 100, its target's 512: vLLM drafts nothing in contexts beyond 100" in note


def test_speed_counts_the_same_tokens_for_both_ways() -> None:
    slow, fast = measure_speed(tiny_target(), random_drafter(), prompts(2), max_new_tokens=4)
    assert slow > 0 and fast > 0


def test_a_wrong_token_is_no_near_tie_and_an_even_choice_is_one() -> None:
    model, rows = tiny_target(), prompts(2)
    target = TargetSide(model, ())
    expected = greedy_reference(model, rows, max_new_tokens=8, eos=())
    wrong = [Generation(rows[0], tokens=list(expected[0])), Generation(rows[1], tokens=list(expected[1]))]
    wrong[1].tokens[3] = (wrong[1].tokens[3] + 1) % 300
    (found,) = compare(target, wrong, expected)
    assert (found["prompt"], found["position"], found["near_tie"]) == (1, 3, False) and found["gap"] > 1e-3
    # Two tokens with the same head row tie exactly: either is the target's choice.
    best, twin = expected[0][0], 5
    head = model.get_output_embeddings().weight.data
    head[twin] = head[best]
    texts = greedy_reference(model, rows[:1], max_new_tokens=1, eos=())
    ours = [Generation(rows[0], tokens=[best if texts[0][0] == twin else twin])]
    (found,) = compare(target, ours, texts)
    assert found["near_tie"] is True
    texts = greedy_reference(model, rows[:1], max_new_tokens=8, eos=())
    truncated = [Generation(rows[0], tokens=texts[0][:-1])]
    (found,) = compare(target, truncated, texts)
    assert found["near_tie"] is False  # a text that stops early is no tie


def test_sampled_tokens_are_distributed_as_the_targets() -> None:
    """Chi-square over every (first, second) token pair of many rounds, vocabulary 6, 1e-6 at 35 degrees."""
    g = torch.Generator().manual_seed(5)
    size, rounds, temperature = 6, 40_000, 2.0
    p_logits = torch.randn(3, size, generator=g)  # the target's next-token logits do not depend on the draft here
    q_logits = torch.randn(2, size, generator=g)  # a drafter that differs
    p = torch.softmax(p_logits / temperature, -1)
    q = torch.softmax(q_logits / temperature, -1)
    drafts = torch.stack([torch.multinomial(q[j].expand(rounds, -1), 1, generator=g)[:, 0] for j in range(2)], 1)
    accepted, following = judge(
        drafts, q_logits.expand(rounds, -1, -1), p_logits.expand(rounds, -1, -1), temperature, g
    )
    row = torch.arange(rounds)
    text = torch.cat([drafts, torch.zeros(rounds, 1, dtype=torch.long)], 1)
    text[row, accepted] = following
    # A text that ended after its first token goes on with a fresh draw from the target.
    fresh = torch.multinomial(p[1].expand(rounds, -1), 1, generator=g)[:, 0]
    second = torch.where(accepted >= 1, text[:, 1], fresh)
    counts = torch.zeros(size * size).index_add_(0, text[:, 0] * size + second, torch.ones(rounds))
    expected = rounds * (p[0][:, None] * p[1][None, :]).flatten()
    assert expected.min() > 5
    assert float(((counts - expected) ** 2 / expected).sum()) < 90.0
    third = torch.bincount(following[accepted == 2], minlength=size).double()
    expected = third.sum() * p[2].double()
    assert float(((third - expected) ** 2 / expected).sum()) < 36.0  # 5 degrees
    biased = torch.where(accepted >= 1, drafts[:, 0], drafts[:, 0])  # accepting everything must fail the same test
    counts = torch.bincount(biased, minlength=size).double()
    expected = rounds * p[0].double()
    assert float(((counts - expected) ** 2 / expected).sum()) > 36.0


def test_sampling_with_a_drafter_gives_the_targets_distribution_end_to_end() -> None:
    """Second token of 4,000 samples with a real drafter against the target's exact distribution, chi-square, 1e-6."""
    model = tiny_target(vocab_size=12, pad_token_id=None, eos_token_id=None, initializer_range=0.3)
    drafter = random_drafter(vocab_size=12, mask_token_id=11)
    target = TargetSide(model, drafter.layer_ids)
    samples = 4000
    out = serve(target, drafter, [[3, 4, 5]] * samples, max_new_tokens=2, batch_size=1000, temperature=1.0, seed=11)
    with torch.inference_mode():
        first = torch.softmax(model(torch.tensor([[3, 4, 5]])).logits[0, -1], -1)
        texts = torch.tensor([[3, 4, 5, t] for t in range(12)])
        second = first @ torch.softmax(model(texts).logits[:, -1], -1)
    for index, share in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([g.tokens[index] for g in out]), minlength=12).double()
        expected = samples * share.double()
        assert float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()) < 51.0  # 11 degrees
    assert summarize(out, 3, 1.0).accept_length > 1.0


def test_decode_imports_nothing_of_the_trainers_forward() -> None:
    for file in Path(forebay.decode.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                for part in ("drafter", "attention", "loss"):
                    assert not name.startswith(f"forebay.models.{part}"), f"{file.name} imports {name}"
