"""The target as the serving loop sees it: tokens in, logits and captured features out, a cache that can be cut back.

Guarantees: works on any transformers causal LM whose decoder layers can be found, keeps only the captured layers'
outputs, and takes rejected tokens back exactly. Entries that some rows of a batch reject stay in the cache and are
hidden from those rows by the mask. That is wrong where attention counts columns (sliding windows shorter than the
text), so such targets are served one prompt at a time; where a state cannot be cut back at all (linear attention),
the text is read again each round. Called by `serve` and `guard`.

Shapes: N rows, L new tokens, C cached columns, K captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from forebay.errors import TargetError


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model itself (some wrap it)."""
    return model.config.get_text_config()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The target's decoder layers: the one list of modules as long as its configuration says."""
    count = text_config(model).num_hidden_layers
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    # In a model of one layer other lists may have one entry too; the decoder's list comes first.
    layers = [m for name, m in found if name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")] or [m for _, m in found]
    if not layers:
        raise TargetError(
            f"{type(model).__name__}: no list of {count} decoder layers found, so layers cannot be captured"
        )
    return layers[0]


class TargetSide:
    """One batch of texts in the target. `start` before each batch."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...] | list[int]) -> None:
        self.model = model
        self.layer_ids = tuple(layer_ids)
        config = text_config(model)
        types = set(getattr(config, "layer_types", None) or ["full_attention"])
        self.window: int | None = None
        sliding = {kind for kind in types if "sliding" in kind or "chunked" in kind}
        if sliding or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
            self.window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        plain = {"full_attention"} | sliding
        self.reread = bool(types - plain) or bool(getattr(model, "_is_stateful", False))
        accepts = inspect.signature(model.forward).parameters
        self._last_only = "logits_to_keep" in accepts
        self._cache_name = "cache" if "cache" in accepts else "past_key_values"  # renamed within transformers 5
        self._layers = decoder_layers(model)
        for i in self.layer_ids:
            if not 0 <= i < len(self._layers):
                raise TargetError(
                    f"captured layer {i} does not exist in the target: its layers are 0..{len(self._layers) - 1}"
                )
        self._seen: dict[int, Tensor] = {}
        self._cache: DynamicCache | None = None
        self._text: Tensor | None = None  # [1, C], only where the text is read again
        self.embed_scale = self._probe_scale()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    def rows_at_once(self, columns: int) -> int | None:
        """How many prompts may share a batch that reaches `columns` cached columns; None: any number."""
        short_window = self.window is not None and columns > self.window
        return 1 if self.reread or short_window else None

    def embed(self, tokens: Tensor) -> Tensor:
        """What the target's first layer would read: `[N, L, H]`, embedding scale included."""
        return self.model.get_input_embeddings()(tokens) * self.embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """The target's output head on final hidden states, as fp32 logits."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype)).float()

    def start(self) -> None:
        """Forget the batch before. The cache is a plain one: it keeps every column, so any can be cut back."""
        self._cache = DynamicCache()
        self._text = None

    def forward(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Read `tokens` `[N, L]` at `positions` behind the cached columns; `visible` `[N, C + L]`.

        Returns fp32 logits `[N, L or 1, V]` and captured features `[N, L, K*H]`.
        """
        count = tokens.shape[1]
        self._seen.clear()
        hooks = [self._layers[i].register_forward_hook(self._keep(i)) for i in set(self.layer_ids)]
        try:
            if self.reread:
                self._text = tokens if self._text is None else torch.cat([self._text, tokens], 1)
                logits = self.model(input_ids=self._text, use_cache=False).logits[:, -count:]
            else:
                extra: dict[str, Any] = {self._cache_name: self._cache}
                if last_only and self._last_only:
                    extra["logits_to_keep"] = 1
                logits = self.model(
                    input_ids=tokens,
                    attention_mask=visible.long(),
                    position_ids=positions,
                    use_cache=True,
                    **extra,
                ).logits
        finally:
            for hook in hooks:
                hook.remove()
        features = [self._seen[i][:, -count:] for i in self.layer_ids]
        joined = torch.cat(features, -1) if features else logits.new_empty(*tokens.shape, 0)
        self._seen.clear()
        return (logits[:, -1:] if last_only else logits).float(), joined

    def take_back(self, columns: int) -> None:
        """Remove the last `columns` columns."""
        if columns and self._text is not None:
            self._text = self._text[:, :-columns]
        elif columns and self._cache is not None:
            self._cache.crop(-columns)

    def select(self, rows: Tensor) -> None:
        """Keep only `rows` of the batch."""
        if self._cache is not None and self._text is None:
            self._cache.batch_select_indices(rows)

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._seen[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def _probe_scale(self) -> float:
        """Some targets scale embeddings outside the embedding module: measure what the first layer reads."""
        read: list[Tensor] = []

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            read.append(args[0] if args else kwargs["hidden_states"])
            raise StopIteration

        handle = self._layers[0].register_forward_pre_hook(hook, with_kwargs=True)
        token = torch.ones(1, 1, dtype=torch.long, device=self.device)
        try:
            self.model(input_ids=token, use_cache=False)
        except StopIteration:
            pass
        finally:
            handle.remove()
        plain = self.model.get_input_embeddings()(token).float().flatten()
        seen = read[0].float().flatten()
        scale = float(seen @ plain / (plain @ plain).clamp(min=1e-30))
        # A learned position embedding also changes what the first layer reads: that is no scale.
        return scale if torch.allclose(seen, plain * scale, rtol=1e-2, atol=1e-6) and abs(scale - 1) > 1e-3 else 1.0
