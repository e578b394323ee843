"""The micro-step over buffers of one fixed shape: compiled once, and on CUDA replayed as one graph.

Guarantees: the sums and the gradients added are those of `models.step.micro_step`, padding included. After `build`
nothing is compiled or captured again, whatever the items hold: a step that would be is an error. Where the step cannot
be compiled, `build` raises with the reason and the caller goes on with `micro_step`; where only the capture fails, the
compiled step is launched kernel by kernel. From `build` on the gradients live in fixed memory: set them to zero, never
to None. `build` is called before other threads use the device. Called by `stages.train`.

Legend: T context tokens, H hidden size, A anchors, B slots of a block, S supervised slots.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from forebay.config import LossConfig
from forebay.errors import ForebayError
from forebay.models import fixed
from forebay.models.drafter import Drafter
from forebay.models.loss import BlockSums, block_loss
from forebay.models.step import Batch, Borrowed

BACKEND = "inductor"  # of torch.compile
WARM_UPS = 3  # steps before a capture: libraries choose and allocate in their first ones


def compilations() -> int:
    """Graphs compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


class FixedStep:
    """One drafter's micro-step on one device: `build()`, then call it with each item."""

    def __init__(
        self,
        drafter: Drafter,
        borrowed: Borrowed,
        loss: LossConfig,
        dtype: torch.dtype,
        *,
        tokens: int,
        anchors: int,
        slots: int,
        use_flex: bool | None = None,
    ) -> None:
        """tokens T, anchors A and slots S: what every item is padded to. use_flex: null for where it has a backward."""
        self.drafter, self.borrowed, self.loss, self.dtype = drafter, borrowed, loss, dtype
        self.device, spec = borrowed.embed.device, drafter.spec
        can = self.device.type == "cuda" and spec.head_dim >= fixed.SMALLEST_HEAD
        self.use_flex = can if use_flex is None else use_flex

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=self.device)

        self.features = zeros(tokens, spec.feature_size)
        self.last_hidden = zeros(tokens, borrowed.head.weight.shape[1]) if loss.needs_last_hidden else None
        self.scale, self.weights = zeros(kind=torch.float32), zeros(slots, kind=torch.float32)
        none = {"positions": tokens, "tokens": tokens, "anchors": anchors, "anchor_start": anchors}
        none |= {"slot_index": slots, "slot_label": slots, "slot_source": slots}
        empty = self._arrays(**{name: np.zeros(size, np.int64) for name, size in none.items()})
        self.arrays = {name: torch.from_numpy(values).to(self.device) for name, values in empty.items()}
        self.view = fixed.FixedView(spec, self.arrays["anchors"], self.arrays["first"], self._masks(tokens))
        self._made_states = self._states
        self._graph: torch.cuda.CUDAGraph | None = None
        self._sums = BlockSums.zeros(spec.block_size, self.device)

    # -- an item into the buffers ------------------------------------------------------------------------------------

    def _arrays(self, **of: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """A host batch's integers as the graph reads them."""
        spec, anchors, rows = self.drafter.spec, of["anchors"].astype(np.int64), len(of["tokens"])
        first = fixed.first_rows(anchors, of["anchor_start"].astype(np.int64), spec)
        out = {name: of[name].astype(np.int64) for name in ("positions", "slot_index", "slot_label", "slot_source")}
        out |= {"anchors": anchors, "first": first, "anchor_tokens": of["tokens"][anchors].astype(np.int64)}
        out["anchor_positions"] = out["positions"][anchors]
        for kind in range(len(first)) if self.use_flex else ():
            named = fixed.tile_arrays(anchors, first[kind], rows)
            out |= {f"{kind}.{name}": values for name, values in named.items()}
        return out

    def _masks(self, tokens: int) -> tuple[Any, ...]:
        spec, made = self.drafter.spec, []
        for kind, layer in enumerate(fixed.kinds_of(spec)) if self.use_flex else ():
            named = {k.removeprefix(f"{kind}."): v for k, v in self.arrays.items() if k.startswith(f"{kind}.")}
            seen = self.arrays["anchors"], self.arrays["first"][kind]
            made.append(fixed.block_mask(named, *seen, tokens, spec.is_causal(layer)))
        return tuple(made)

    def _load(self, batch: Batch, features: Tensor, scale: float, last_hidden: Tensor | None) -> None:
        values = self._arrays(**{name: getattr(batch, name) for name in ARRAYS})
        for name, buffer in self.arrays.items():
            self._fill(buffer, values[name])
        self._fill(self.weights, batch.slot_weight)
        self.scale.fill_(scale)
        self.features.copy_(features, non_blocking=True)
        if self.last_hidden is not None and last_hidden is not None:
            self.last_hidden.copy_(last_hidden, non_blocking=True)

    def _fill(self, buffer: Tensor, values: np.ndarray[Any, Any]) -> None:
        host = torch.from_numpy(values)
        buffer.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _states(self) -> Tensor:
        """The drafter's hidden states of the slots in the buffers: [S, H]. This is what is compiled."""
        arrays, spec = self.arrays, self.drafter.spec
        context = self.drafter.context(self.features, arrays["positions"])
        embeds, mask = self.borrowed.inputs(arrays["anchor_tokens"], spec.mask_token_id, self.dtype)
        return self.drafter.blocks(context, arrays["anchor_positions"], embeds, mask, self.view, arrays["slot_index"])

    def _forward(self) -> tuple[Tensor, BlockSums]:
        """Scaled loss and sums. The head's chunks stay out of the compiled graph, which would unroll each of them."""
        arrays, spec = self.arrays, self.drafter.spec
        return block_loss(
            self._made_states(),
            arrays["slot_index"],
            arrays["slot_label"],
            self.weights,
            self.borrowed.head,
            self.loss,
            (len(arrays["anchors"]), spec.block_size, spec.first_slot),
            self.scale,
            None if self.last_hidden is None else self.last_hidden[arrays["slot_source"]],
        )

    def _run(self) -> BlockSums:
        total, sums = self._forward()
        total.backward()
        return sums

    def __call__(self, batch: Batch, features: Tensor, scale: float, last_hidden: Tensor | None = None) -> BlockSums:
        """Forward, loss and backward of one item; see `models.step.micro_step`."""
        self._load(batch, features, scale, last_hidden)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return BlockSums(*(getattr(self._sums, f).clone() for f in vars(self._sums)))

    # -- at start-up -------------------------------------------------------------------------------------------------

    def build(self) -> str:
        """Compile, and on CUDA capture, over empty buffers. Returns what was made; raises where compiling fails."""
        for parameter in self.drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if BACKEND == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise ForebayError("no C++ compiler (c++, g++ or clang++) is on the PATH")
        self._made_states = torch.compile(self._states, backend=BACKEND, fullgraph=True, dynamic=False)
        self._run()
        self._made_states = torch.compiler.set_stance("fail_on_recompile")(self._made_states)
        return "compiled" if self.device.type != "cuda" else self._capture()

    def _capture(self) -> str:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._run()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._sums = self._run()
        except RuntimeError as error:
            return f"compiled, but not captured as a CUDA graph: {str(error).splitlines()[0]}"
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._graph = graph
        return "compiled and captured as a CUDA graph"


ARRAYS = ("positions", "tokens", "anchors", "anchor_start", "slot_index", "slot_label", "slot_source")
