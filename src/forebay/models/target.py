"""The frozen target: runs a job's rows up to the last captured layer and packs the states into the item's slot.

Guarantees: the features of a token are HF `hidden_states[i + 1]` of each layer i of `layer_ids`, side by side; no
later layer, no final norm and no head is run (the last layer's output only where asked for); padding is on the right,
so a causal target never reads it; what a slot has beyond the item's tokens becomes zero. Sub-batches follow
`job.splits`. Hooks act only in the thread that is capturing, so the same model may generate in another. Whether the
states are right: `models.checks`.
Called by `stages.extract`, `decode` (facts and model), `bench.target`.

Shapes: T token budget, K captured layers, H hidden, V head rows, n rows of a sub-batch, t its longest row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from forebay.config import TargetConfig
from forebay.errors import TargetError
from forebay.models.facts import TargetFacts, apply_head, check_layer_ids, default_layer_ids, final_norm, read_facts
from forebay.models.load import Stop, decoder_and_layers, load_model, locate
from forebay.models.mask_token import check_token_ids


class Splits(Protocol):
    """What capturing needs of a job."""

    @property
    def splits(self) -> Sequence[int]: ...


class Rows(Protocol):
    """What capturing needs of a host batch: tokens [T], packed; document i is doc_offsets[i]:doc_offsets[i + 1]."""

    @property
    def job(self) -> Splits: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def doc_offsets(self) -> np.ndarray: ...


@dataclass
class _Sink:
    """Where the hooks of one sub-batch write. `index` picks the real positions of [n * t] (None: all are real)."""

    stop: int
    columns: dict[int, int]
    features: torch.Tensor | None  # [tokens, K * H]
    last: torch.Tensor | None  # [tokens, H]
    last_layer: int
    index: torch.Tensor | None

    def take(self, layer: int, states: torch.Tensor) -> None:
        """states [n, t, H]."""
        hidden = states.shape[-1]
        rows = states.reshape(-1, hidden)
        if self.index is not None:
            rows = rows.index_select(0, self.index.to(rows.device))
        if self.features is not None and layer in self.columns:
            column = self.columns[layer] * hidden
            self.features[:, column : column + hidden].copy_(rows)
        if self.last is not None and layer == self.last_layer:
            self.last.copy_(rows)


class Target:
    """A frozen causal LM with facts, embedding, head and capture."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, name: str = "target", allow_last_layer: bool = False):
        self.model = model
        self.facts: TargetFacts = read_facts(model, name)
        self.layer_ids = check_layer_ids(layer_ids, self.facts.num_layers, allow_last_layer)
        self.decoder, layers = decoder_and_layers(model)
        self._local = threading.local()
        wanted = sorted({*self.layer_ids, self.facts.num_layers - 1})
        self._hooks = [layers[i].register_forward_hook(self._hook(i)) for i in wanted]

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        device: str | torch.device = "cpu",
        *,
        layer_ids: Sequence[int] | None = None,
    ) -> Target:
        """Load `config.model`. `layer_ids` (of a checkpoint) go before the configuration's.

        Raises UsageError, ConfigError or TargetError: each names what is wrong and the fix.
        """
        model = load_model(config, device)
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        ids = layer_ids if layer_ids is not None else config.layer_ids
        if ids is None:
            ids = default_layer_ids(count, config.captured_layers)
        check_layer_ids(ids, count, config.allow_last_layer)
        folder, gguf = locate(config)
        name = Path(gguf).stem if gguf else folder.resolve().name
        return cls(model, ids, name=name, allow_last_layer=config.allow_last_layer)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def feature_width(self) -> int:
        """K * H."""
        return len(self.layer_ids) * self.facts.hidden_size

    @property
    def embed_weight(self) -> torch.Tensor:
        """[rows, H], without `facts.embed_scale`."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H], without scale and soft-cap."""
        return self.model.get_output_embeddings().weight

    @property
    def head_bias(self) -> torch.Tensor | None:
        return getattr(self.model.get_output_embeddings(), "bias", None)

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the head."""
        return final_norm(self.decoder)

    @property
    def layers(self) -> nn.ModuleList:
        """The target's layers, e.g. to start a drafter from."""
        return decoder_and_layers(self.model)[1]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] ids -> [..., H] what the target's first layer would read."""
        return torch.nn.functional.embedding(ids, self.embed_weight) * self.facts.embed_scale

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H] last layer's output (`out_last`) -> fp32 logits [..., V]: final norm, head, scale, soft-cap."""
        return apply_head(self.model, self.facts, last)

    def capture(self, batch: Rows, out: torch.Tensor, out_last: torch.Tensor | None = None) -> np.ndarray:
        """Write the batch's states into `out` [T, K * H] (and the last layer's into `out_last` [T, H]).

        Returns the echo that `check_states` compares: the token ids that were run, in packed order, int32 [real].
        Rows beyond the batch's tokens are made zero: steps of fixed shape read them. Where `out` is the host's and the
        target is not, the copies have ended when this returns; where both are on a device, they are enqueued on the
        current stream.
        """
        assert out.shape[-1] == self.feature_width, f"slot of width {out.shape[-1]} for {self.feature_width} features"
        offsets = batch.doc_offsets
        assert sum(batch.job.splits) == len(offsets) - 1, "splits do not cover the job's rows"
        echo, row = [], 0
        for count in batch.job.splits:
            here = slice(int(offsets[row]), int(offsets[row + count]))
            lengths = np.diff(offsets[row : row + count + 1])
            last = None if out_last is None else out_last[here]
            echo.append(self._capture_rows(batch.tokens[here], lengths, out[here], last))
            row += count
        for padded in (out, out_last):
            if padded is not None:
                padded[int(offsets[-1]) :].zero_()
        if self.device.type == "cuda" and out.device.type == "cpu":
            torch.cuda.current_stream(self.device).synchronize()
        return np.concatenate(echo) if echo else np.zeros(0, np.int32)

    def run(self, ids: torch.Tensor, stop: int | None = None) -> None:
        """Forward [n, t] up to layer `stop` (default: the last captured one) and keep nothing."""
        layer = self.layer_ids[-1] if stop is None else stop
        self._forward(ids, _Sink(layer, {}, None, None, -1, None))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _capture_rows(
        self, tokens: np.ndarray, lengths: np.ndarray, out: torch.Tensor, out_last: torch.Tensor | None
    ) -> np.ndarray:
        check_token_ids(tokens, self.facts.embedding_rows)
        real = np.arange(int(lengths.max()))[None, :] < lengths[:, None]  # [n, t]
        padded = np.zeros(real.shape, np.int64)
        padded[real] = tokens
        index = None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(self.device)
        # column by column into another device's memory would be many small copies: gather here, copy once
        features = out if out.device == self.device else torch.empty_like(out, device=self.device)
        top = self.facts.num_layers - 1
        sink = _Sink(
            stop=self.layer_ids[-1] if out_last is None else top,
            columns={layer: k for k, layer in enumerate(self.layer_ids)},
            features=features,
            last=out_last,
            last_layer=top,
            index=index,
        )
        self._forward(torch.from_numpy(padded).to(self.device), sink)
        if features is not out:
            out.copy_(features, non_blocking=True)
        return padded[real].astype(np.int32)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, sink: _Sink) -> None:
        # No mask: padding is on the right and attention is causal, and without one SDPA takes its fast path.
        self._local.sink = sink
        try:
            self.decoder(input_ids=ids, use_cache=False)
        except Stop:
            return
        finally:
            self._local.sink = None
        raise TargetError(f"{self.facts.architecture} did not run its layer {sink.stop}")

    def _hook(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            sink: _Sink | None = getattr(self._local, "sink", None)
            if sink is None:
                return
            sink.take(layer, output[0] if isinstance(output, tuple) else output)
            if layer == sink.stop:
                raise Stop

        return hook
