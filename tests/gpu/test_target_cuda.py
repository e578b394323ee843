"""The target on a GPU: the same states as on the CPU, into device and host memory, and its copies have ended."""

from __future__ import annotations

import pytest
import torch

from forebay.models.checks import Packed, check_states, self_test
from forebay.models.target import Target
from tiny import LAYER_IDS, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(20, 32))]


@pytest.mark.parametrize("where", ["cuda", "cpu", "pinned"])
def test_states_captured_on_a_gpu_equal_those_of_the_cpu(where):
    batch = Packed.of(TEXTS, (1, 2))
    expected = torch.zeros(24, 3 * 32)
    Target(tiny_target(), LAYER_IDS).capture(batch, expected)
    target = Target(tiny_target().cuda(), LAYER_IDS)
    out = torch.zeros(24, 3 * 32, device="cuda" if where == "cuda" else "cpu", pin_memory=where == "pinned")
    check_states(batch, out, target.capture(batch, out), layers=3)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert min(self_test(target).values()) > 0.999
