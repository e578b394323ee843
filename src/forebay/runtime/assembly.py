"""The models of a run: targets, the drafter and its replicas, what they borrow, and the contract they make together.

Guarantees: nothing is written; what cannot work is refused with the fix; every choice made for the user is said once.
The contract names all that must be unchanged when a run is resumed. Called by the runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forebay import config as configuration
from forebay.config import RunConfig
from forebay.cost.flops import DrafterShape, TargetShape
from forebay.cost.memory import MemoryEstimate, estimate_memory
from forebay.errors import ConfigError
from forebay.io.checkpoint import Snapshot, check_contract
from forebay.io.formats import read_drafter
from forebay.io.formats.folder import StoredDrafter
from forebay.models.checks import self_test
from forebay.models.drafter import Drafter
from forebay.models.facts import layers_notice
from forebay.models.init import init_from_target, init_random
from forebay.models.load import DTYPES, auto_dtype, check_device, load_tokenizer
from forebay.models.mask_token import choose_mask_token, token_counts
from forebay.models.spec import drafter_spec
from forebay.models.step import Borrowed
from forebay.models.target import Target
from forebay.models.vocabulary import draft_vocabulary, shortlist
from forebay.runtime.preparation import Preparation, open_data
from forebay.stages.train import DrafterReplica


class Assembly:
    """See the module's docstring. Built in order: targets, preparation, drafter."""

    def __init__(
        self,
        config: RunConfig,
        saved: Snapshot | None,
        say: Callable[[str], None],
        store_config: RunConfig,
        allow_change: frozenset[str],
    ) -> None:
        """`saved`: the checkpoint to go on from; its contract is compared before any of its tensors is used.

        `store_config`: where the data is read (a fault may plant a copy).
        """
        self.config, self.say = config, say
        if not open_data(store_config)[1]:
            say(f"{config.data.store} has no held-out row: accept length will not be measured")
        self._load_target(None if saved is None else saved.state["dtypes"])
        self._prepare(store_config)
        mask = self._choose_spec()
        if saved is not None:
            check_contract(saved.contract, self.contract, allow_change)
        self._build_drafter(saved, [mask])

    def _load_target(self, dtypes: dict[str, str] | None) -> None:
        """`dtypes`: those that a resumed run chose at its start, which `auto` must not choose anew."""
        runtime, config = self.config.runtime, self.config.target
        if runtime.threads:
            torch.set_num_threads(runtime.threads)
        self.cores = torch.get_num_threads()
        for device in runtime.drafters:
            check_device(device)
        if dtypes is not None and config.dtype == "auto":
            config = config.model_copy(update={"dtype": dtypes["target"].removeprefix("torch.")})
        self.target = Target.load(config, runtime.targets[0])
        same = config.model_copy(update={"dtype": str(self.target.dtype).removeprefix("torch.")})
        if notice := layers_notice(config, self.target.layer_ids, self.target.facts.num_layers):
            self.say(notice)
        self.targets = [self.target, *(Target.load(same, device) for device in runtime.targets[1:])]
        if self.config.target.self_test:
            cosine = min(self_test(self.target).values())
            self.say(f"target {self.target.facts.name}: {self.target.dtype}, self-test cosine {cosine:.4f}")
        if runtime.dtype != "auto":
            self.dtype = DTYPES[runtime.dtype]
        elif dtypes is not None:
            self.dtype = DTYPES[dtypes["drafter"].removeprefix("torch.")]
        elif self.target.device.type == "cpu":  # the target's own was measured, or chosen
            self.dtype = self.target.dtype
        else:
            self.dtype = auto_dtype(self.target.model, runtime.drafters[0])
        if self.dtype == torch.float16:  # gradients underflow there
            self.dtype = torch.float32

    def _prepare(self, store_config: RunConfig) -> None:
        facts = self.target.facts
        self.prepared = Preparation.of(
            store_config,
            feature_width=self.target.feature_width,
            hidden_size=facts.hidden_size,
            state_bytes=self.target.dtype.itemsize,
        )
        self.prepared.check(jobs=len(self.prepared.train))  # refused before anything is written
        self.counts = token_counts(self.prepared.train, facts.embedding_rows)

    def _choose_spec(self) -> str:
        """What the drafter is; returns what to say of its mask token."""
        config, facts, notices = self.config, self.target.facts, []
        mask = choose_mask_token(
            load_tokenizer(config.target),
            embedding_rows=facts.embedding_rows,
            requested=config.drafter.mask_token_id,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            bos_token_id=facts.bos_token_id,
            counts=self.counts,
            store=self.prepared.train,
        )
        self.spec = drafter_spec(
            config.drafter,
            facts.config,
            target_layer_ids=self.target.layer_ids,
            num_target_layers=facts.num_layers,
            vocab_size=facts.vocab_size,
            mask_token_id=mask.id,
            trained_max_length=int(np.asarray(self.prepared.train.lengths).max()),
            dtype=str(self.dtype).removeprefix("torch."),
            notices=notices,
        )
        return "\n".join([str(mask), *notices])

    def _build_drafter(self, saved: Snapshot | None, notices: list[str]) -> None:
        config, facts = self.config, self.target.facts
        devices = config.runtime.drafters
        lead = Drafter(self.spec)
        init_random(lead, config.seed)
        if saved is not None:
            lead.load_state_dict(saved.drafter)
        elif config.drafter.init_from is not None:
            lead.load_state_dict({k: v.float() for k, v in self._warm_start().items()})
        elif config.drafter.init == "target":
            layers = {i: layer.state_dict() for i, layer in enumerate(self.target.layers)}
            offset = 1.0 if facts.model_type.startswith("gemma") else 0.0
            notices += init_from_target(
                lead,
                layers,
                config.drafter.init_target_layers,
                final_norm=self.target.final_norm.weight,
                norm_offset=offset,
            )
        if self.spec.draft_vocab_size is not None and not lead.t2d.any():
            lead.set_vocabulary(draft_vocabulary(self.counts, self.spec.draft_vocab_size, facts.vocab_size))
        kept = lead.kept
        if config.loss.shortlist is not None:
            kept = shortlist(self.counts, config.loss.shortlist, facts.vocab_size)
        for notice in notices:
            self.say(notice)
        replicas = []
        for device in devices:
            module = Drafter(self.spec)
            module.load_state_dict(lead.state_dict())
            borrowed = Borrowed.of(self.target, self.dtype, kept, device)
            replicas.append(DrafterReplica(module.to(device), borrowed, config.loss, self.dtype))
        self.replicas = replicas

    def _warm_start(self) -> dict[str, torch.Tensor]:
        """The weights of the drafter at `drafter.init_from`, which must be the drafter that this run trains."""
        folder = str(self.config.drafter.init_from)
        stored = read_drafter(folder, self.target.facts.num_layers)
        mine, theirs = self.spec.to_dict(), stored.spec.to_dict()
        passed = {"dtype", "trained_max_length", "max_positions"}
        differing = {k: (theirs[k], mine[k]) for k in mine if k not in passed and theirs[k] != mine[k]}
        if differing:
            lines = "\n  ".join(f"{k}: there {a}, here {b}" for k, (a, b) in differing.items())
            raise ConfigError(f"drafter.init_from {folder} is another drafter:\n  {lines}\nset the fields alike")
        return stored.tensors

    @property
    def contract(self) -> dict[str, Any]:
        """What a resume must find unchanged."""
        skip = configuration.MAY_CHANGE_ON_RESUME
        out: dict[str, Any] = {}
        for section, values in self.config.model_dump(mode="json").items():
            if section in skip:
                continue
            if not isinstance(values, dict):
                out[section] = values
                continue
            out.update({f"{section}.{k}": v for k, v in values.items() if f"{section}.{k}" not in skip})
        out.update({f"target.{k}": v for k, v in self.target.facts.identity.items()})
        told = ("dtype", "max_positions")  # chosen at the start, and the target's
        out.update({f"drafter.{k}": v for k, v in self.spec.to_dict().items() if k not in told})
        out["data"] = self.prepared.train.fingerprint
        out["data.template"] = self.prepared.train.manifest.get("template_hash")
        out.update({f"plan.{k}": v for k, v in self.prepared.params.as_dict().items() if k != "item_bytes"})
        return out

    def memory(self) -> MemoryEstimate:
        """What the run will hold at most, one target and one drafter; every step has the largest item's shape."""
        facts, shape, config = self.target.facts, self.prepared.shape, self.config
        return estimate_memory(
            TargetShape.of(facts, self.target.layer_ids[-1] + 1),
            DrafterShape.of(self.spec, len(self.replicas[0].borrowed.head.rows)),
            tokens=shape.token_budget,
            anchors=shape.anchors,
            slots=shape.slots,
            longest=int(np.asarray(self.prepared.train.lengths).max()),
            buffer_bytes=config.buffer.bytes,
            target_dtype=str(self.target.dtype).removeprefix("torch."),
            drafter_dtype=str(self.dtype).removeprefix("torch."),
            total_layers=facts.num_layers,
            tied=facts.tied,
            shared_head=self.replicas[0].borrowed.head.weight.data_ptr() == self.target.head_weight.data_ptr(),
            chunk_slots=config.loss.chunk_slots,
        )

    @property
    def lead(self) -> Drafter:
        """The first replica's drafter: its weights are the run's."""
        return self.replicas[0].module

    def stored(self) -> StoredDrafter:
        """The drafter as it is written to a folder."""
        return StoredDrafter(self.spec, dict(self.lead.named_parameters()), self.lead.kept)

    @property
    def extras(self) -> dict[str, Any]:
        """Facts about the target that travel with the drafter."""
        facts = self.target.facts
        return {
            "input_embedding_scale": facts.embed_scale,
            "target_name": facts.name,
            "target_fingerprint": facts.fingerprint,
        }
