"""The typed configuration of a run: one YAML file, dotted overrides, checked when it is loaded.

Guarantees: every key is known (an unknown one is an error with the nearest name), every number that can be judged
without data is judged here, and the error names both numbers and the fix. Imports no torch. What needs the data or
the target (the largest item in bytes, the layer ids' range) is checked by `flow.admission` and `models.target`.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from forebay.errors import ConfigError, nearest

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: int | float | str) -> int:
    """`"1.5 GiB"` -> 1610612736. Plain numbers are bytes."""
    if isinstance(value, int | float):
        return int(value)
    text = value.strip()
    for unit, factor in UNITS.items():
        if text.lower().endswith(unit.lower()):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TargetConfig(Section):
    model: str = Field(description="folder of a Hugging Face causal LM (or of one GGUF file)")
    gguf_file: str | None = Field(None, description="name of the GGUF file in `model`, if that is what it holds")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the faster of float32 and bfloat16, by a short measurement at start"
    )
    layer_ids: tuple[int, ...] | None = Field(
        None, description="0-based captured layers; null: evenly spaced (DFLASH.md)"
    )
    captured_layers: int | None = Field(
        None, ge=1, description="how many layers to capture when layer_ids is null; null: 5, or what a small target has"
    )
    allow_last_layer: bool = Field(False, description="allow capturing the last layer (before the final norm)")
    self_test: bool = Field(True, description="compare captured states with a plain forward at start")


class DataConfig(Section):
    store: str = Field(description="token store made by `forebay prepare` (has train/ and heldout/)")


class DrafterConfig(Section):
    layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    mask_token_id: int | None = Field(None, description="null: draft config, tokenizer, then a spare embedding row")
    sample_from_anchor: bool = Field(False, description="slot j predicts a+j+1 and every slot carries loss (DSpark)")
    causal: bool = Field(False, description="causal instead of bidirectional inside the block")
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: int | None = Field(None, ge=1)
    window_from: Literal["query", "anchor"] = "query"
    sliding_causal: bool = Field(True, description="sliding layers are causal inside the block, as engines serve them")
    intermediate_size: int | None = Field(None, ge=1, description="null: the target's (active width for MoE)")
    init: Literal["random", "target"] = Field(
        "random", description="target: draft layers copied from `init_target_layers`, fc as the last captured layer"
    )
    init_target_layers: tuple[int, ...] | None = Field(None, description="null: the target's last `layers` layers")
    init_from: str | None = Field(None, description="warm start: folder of a zlab or speculators drafter")
    draft_vocab_size: int | None = Field(None, description="reduced draft vocabulary; null: the full one")

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        types = self.layer_types or ()
        if types and len(types) != self.layers:
            raise ValueError(
                f"layer_types names {len(types)} layers but layers is {self.layers}: give one type per layer"
            )
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError(
                "layer_types has sliding_attention but sliding_window is not set: set drafter.sliding_window"
            )
        if self.sliding_window is not None:
            if "sliding_attention" not in types:
                raise ValueError(
                    "sliding_window is set but no layer is sliding_attention, so it would be ignored: "
                    "set drafter.layer_types or remove sliding_window"
                )
            if self.sliding_window < self.block_size:
                raise ValueError(
                    f"sliding_window {self.sliding_window} is below block_size {self.block_size}: "
                    f"raise sliding_window to at least {self.block_size}"
                )
        if self.init_target_layers is not None:
            if self.init != "target":
                raise ValueError("init_target_layers is set but init is not 'target', so it would be ignored")
            if len(self.init_target_layers) != self.layers:
                raise ValueError(
                    f"init_target_layers names {len(self.init_target_layers)} layers but layers is {self.layers}"
                )
        if self.init_from is not None and self.init == "target":
            raise ValueError("init: target and init_from are both set: a drafter starts from one of them")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} must be at least 1 (null: the full vocabulary)")
        return self


class LossConfig(Section):
    weights: dict[Literal["ce", "kl", "tv"], float] = Field({"ce": 1.0}, description="weighted sum of losses")
    labels: Literal["data", "target"] = Field("data", description="ce labels: the data's token or the target's argmax")
    decay: Literal["exp", "dpace", "none"] = "exp"
    gamma: float | None = Field(None, gt=0, description="null: 7 for block 16, 5 for 10, 4 for 8, in between by line")
    dpace_alpha: float | None = Field(None, gt=0, le=1)
    shortlist: int | None = Field(None, ge=1, description="training softmax over the tokens seen and ids below this")
    chunk_slots: int = Field(512, ge=1, description="slots per head chunk")

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if not self.weights or any(w < 0 for w in self.weights.values()) or sum(self.weights.values()) <= 0:
            raise ValueError(f"loss.weights {self.weights} needs at least one positive weight and no negative one")
        if self.gamma is not None and self.decay != "exp":
            raise ValueError(f"gamma {self.gamma} is ignored with decay '{self.decay}': remove gamma or set decay: exp")
        if self.dpace_alpha is not None and self.decay != "dpace":
            raise ValueError(f"dpace_alpha {self.dpace_alpha} is ignored with decay '{self.decay}': remove it")
        if self.labels == "target" and not self.weights.get("ce"):
            raise ValueError("labels: target is ignored without a ce loss: remove it or add ce to loss.weights")
        return self

    @property
    def needs_last_hidden(self) -> bool:
        """Whether items must carry the target's last hidden state (before the final norm)."""
        return self.labels == "target" or any(self.weights.get(k, 0) > 0 for k in ("kl", "tv"))

    def gamma_for(self, block_size: int) -> float:
        """Decay constant for `block_size` (paper: 7 at 16, 5 at 10, 4 at 8)."""
        if self.gamma is not None:
            return self.gamma
        known = [(2, 1.0), (4, 2.0), (8, 4.0), (10, 5.0), (16, 7.0)]
        for (b0, g0), (b1, g1) in itertools.pairwise(known):
            if block_size <= b1:
                return g0 + (g1 - g0) * (block_size - b0) / (b1 - b0)
        return 7.0 * block_size / 16


class PlanConfig(Section):
    token_budget: int = Field(2048, ge=8, description="tokens of one item (one packed row)")
    bucket_edges: tuple[int, ...] | None = Field(None, description="upper edges of the length buckets; null: chosen")
    order: Literal["filled", "shuffled", "sorted"] = "filled"
    anchor_rate: float = Field(0.25, gt=0, le=1, description="anchors per legal anchor position")
    anchors_per_row: int = Field(512, ge=1, description="most anchors of one sequence")
    anchors_per_item: int | None = Field(None, ge=1, description="null: from the data, so that the items fill")
    slots_per_item: int | None = Field(None, ge=1, description="null: anchors_per_item x scored slots of a block")

    @field_validator("bucket_edges")
    @classmethod
    def _rising(cls, edges: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if edges is not None and (list(edges) != sorted(set(edges)) or edges[0] < 1):
            raise ValueError(f"bucket_edges {list(edges)} must rise and be positive")
        return edges


class BufferConfig(Section):
    dispatch: Literal["shared", "per_target"] = "shared"
    queue: Literal["buffered", "bucketed", "per_drafter"] = "buffered"
    draw: Literal["live", "planned"] = "live"
    min_fill: int = Field(10, ge=1, description="fewest buffered items at which a draw is allowed")
    bytes: int = Field(2**31, gt=0, description="most bytes charged at once; '2 GiB' works")
    reuse: int = Field(
        1, ge=1, le=64, description="how often an item is drawn, with other anchors each time, before its room is freed"
    )
    max_age: int | None = Field(None, ge=1, description="draws an item may wait at most (off by default)")

    @field_validator("bytes", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> int:
        try:
            return parse_bytes(value)
        except (ValueError, TypeError):
            raise ValueError(f"'{value}' is no size: write bytes or e.g. '2 GiB'") from None

    @model_validator(mode="after")
    def _check(self) -> BufferConfig:
        if self.draw == "planned" and (self.dispatch != "shared" or self.queue != "buffered"):
            raise ValueError(
                f"draw: planned needs dispatch: shared and queue: buffered, not {self.dispatch} and {self.queue}"
            )
        return self


class OptimConfig(Section):
    lr: float = Field(6e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    warmup_share: float = Field(0.04, ge=0, lt=1)
    min_lr_share: float = Field(0.0, ge=0, le=1, description="lr at the last step, as a share of lr")
    clip: float = Field(1.0, gt=0)
    epochs: int = Field(6, ge=1)
    window: int = Field(8, ge=1, description="items of one optimizer step, over all replicas and accumulation steps")
    max_bad_steps: int = Field(3, ge=1, description="non-finite steps in a row before the run stops")


class RuntimeConfig(Section):
    kind: Literal["local"] = "local"
    targets: tuple[str, ...] = ("cpu",)
    drafters: tuple[str, ...] = ("cpu",)
    device_sharing: Literal["auto", "alternate", "split"] = Field(
        "auto",
        description="one device, both roles: alternate (one computes at a time, all cores) or split (both at once, "
        "half of the cores each); auto: split, but alternate on one core; forebay bench pipeline measures both",
    )
    threads: int | None = Field(None, ge=1, description="cores to use; null: all")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="drafter compute dtype")
    compile: bool = Field(False, description="compile the drafter's step once at start-up; a CUDA graph where it can")
    log_every: int | None = Field(
        None, ge=1, description="steps between reads of their losses from the device; null: 1 on a CPU, else 10"
    )
    prefetch_threads: int = Field(1, ge=1)
    prefetch_jobs: int = Field(4, ge=1, description="host batches prepared ahead")
    max_attempts: int = Field(3, ge=1, description="attempts of a job before it is quarantined")
    on_poison: Literal["continue", "stop"] = "stop"
    lease_s: float = Field(600.0, gt=0, description="a worker silent for longer loses its job")
    stall_s: float = Field(900.0, gt=0, description="dump all stacks when nothing moved for so long")

    @field_validator("targets", "drafters")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one device is needed, e.g. [cpu] or [cuda:0]")
        return value


class ProfileConfig(Section):
    start: int = Field(ge=1, description="the first step that is traced; a few after the first are warm")
    steps: int = Field(4, ge=1, le=100, description="how many")


class EvalConfig(Section):
    every_steps: int | None = Field(None, ge=1, description="null: at the end of each epoch only")
    at_start: bool = Field(True, description="measure the untrained drafter too")
    prompts: int = Field(32, ge=1, description="held-out prompts")
    dtype: Literal["auto", "float32"] = Field("auto", description="auto: the target's; float32: exact, slower")
    max_new_tokens: int = Field(64, ge=1)
    batch_size: int = Field(16, ge=1)
    guard: bool = Field(True, description="compare the trainer's forward with the serving loop (G8)")
    guard_prompts: int = Field(8, ge=1, description="prompts the guard compares, in fp32")
    guard_step: int = Field(100, ge=1, description="the first guard check")


class CheckpointConfig(Section):
    every_steps: int = Field(200, ge=1)
    keep_last: int = Field(2, ge=1)
    background: bool = Field(True, description="write in a thread while training goes on")


#: Where a kind of fault strikes: the first is meant where `where` is not given.
FAULT_PLACES = {
    "nan": ("extract", "train"),
    "zeros": ("extract",),
    "swap": ("extract",),
    "repeat": ("extract",),
    "short": ("extract",),
    "disk_full": ("checkpoint",),
    "truncate_shard": ("prefetch",),
}


class Fault(Section):
    """One planted fault, for tests and for trying what the run does. See docs/operations.md."""

    kind: Literal[
        "raise",
        "hang",
        "nan",
        "zeros",
        "swap",
        "repeat",
        "short",
        "exit",
        "disk_full",
        "truncate_shard",
        "sigterm",
        "sigkill",
    ]
    where: Literal["extract", "train", "checkpoint", "prefetch", "eval"] | None = Field(
        None, description="null: the first place where the kind can strike"
    )
    step: int | None = Field(None, description="how many optimizer steps have been taken when it strikes; null: any")
    epoch: int | None = Field(None, description="the epoch of the job it strikes; null: any")
    job: int | None = Field(None, description="the job it strikes; null: any")
    worker: int | None = Field(None, description="the target it strikes; null: any")
    file: str | None = Field(None, description="the file of a checkpoint before which it strikes; null: the first")
    times: int = Field(1, ge=-1, description="how often, over all lives of the run (-1: always)")
    seconds: float = Field(1.0, ge=0, description="length of a hang")

    @model_validator(mode="after")
    def _check(self) -> Fault:
        places = FAULT_PLACES.get(self.kind)
        if self.where is not None and places is not None and self.where not in places:
            raise ValueError(f"a fault of kind '{self.kind}' strikes in {' or '.join(places)}, not in {self.where}")
        return self

    @property
    def place(self) -> str:
        return self.where or FAULT_PLACES.get(self.kind, ("extract",))[0]


class RunConfig(Section):
    run_dir: str = Field(description="folder of the run: plans, checkpoints, logs, resolved configuration")
    seed: int = Field(0, ge=0)
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    loss: LossConfig = LossConfig()
    plan: PlanConfig = PlanConfig()
    buffer: BufferConfig = BufferConfig()
    optim: OptimConfig = OptimConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"], ...] = Field(
        (), description="trackers that get the metrics too, each with its own package"
    )
    prometheus_port: int = Field(9464, ge=0, le=65535, description="on loopback; 0: any that is free, which is said")
    profile: ProfileConfig | None = Field(None, description="trace some steps into RUN/profile")
    faults: tuple[Fault, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _older(cls, values: Any) -> Any:
        """`runtime.tensorboard` of runs that began before there were other loggers."""
        runtime = values.get("runtime") if isinstance(values, dict) else None
        if isinstance(runtime, dict) and isinstance(runtime.get("tensorboard"), bool):
            runtime = dict(runtime)
            loggers = ["tensorboard"] if runtime.pop("tensorboard") else []
            values = {**values, "runtime": runtime, "loggers": [*values.get("loggers", ()), *loggers]}
        return values

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.drafter.block_size > self.plan.token_budget:
            raise ValueError(
                f"block_size {self.drafter.block_size} exceeds token_budget {self.plan.token_budget}: lower the one"
            )
        if self.loss.shortlist is not None and self.drafter.draft_vocab_size is not None:
            raise ValueError(
                f"loss.shortlist {self.loss.shortlist} is ignored beside drafter.draft_vocab_size "
                f"{self.drafter.draft_vocab_size}, which narrows the head already: remove one of them"
            )
        return self


#: What may differ between a run and its resumption without changing what is trained. Everything else is compared.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "run_dir",
        "runtime",
        "checkpoint",
        "eval",
        "faults",
        "loggers",
        "prometheus_port",
        "profile",
        "buffer.bytes",
        "target.model",
        "target.self_test",
        "data.store",
        "loss.chunk_slots",
    }
)


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration model."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, prefix + name + ".")
    return keys


def _explain(error: ValidationError) -> str:
    lines = []
    keys = known_keys(RunConfig)
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key '{where}'{nearest(where, keys)}")
        elif item["type"] == "missing":
            lines.append(f"'{where}' is missing: set it in the file or as {where}=... on the command line")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
            lines.append(f"{where + ': ' if where else ''}{message}{shown}")
    return "\n".join(lines)


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Validate a nested mapping. Raises ConfigError with one line per fault."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Set `a.b=value` items (values are YAML) in a copy of `values`."""
    out: dict[str, Any] = yaml.safe_load(yaml.safe_dump(values))
    for item in overrides:
        key, sep, text = item.partition("=")
        if not sep or not key:
            raise ConfigError(f"override '{item}' is not of the form key.subkey=value, e.g. optim.lr=3e-4")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"override '{item}': '{text}' is no YAML value") from None
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value):
            value = float(value)  # YAML 1.1 reads 3e-4 as a string
        node = out
        *path, last = key.split(".")
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override '{item}': '{part}' is a value, not a section")
            node = child
        node[last] = value
    return out


def load(path: str | os.PathLike[str], overrides: list[str] | None = None) -> RunConfig:
    """Read a run's YAML file, apply overrides, validate.

    Raises ConfigError: file missing or not a YAML mapping, unknown key (with the nearest name), impossible value.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no configuration file at {file}: give the path of a run's YAML file")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} must hold a mapping of sections (target:, data:, ...), found {type(values).__name__}"
        )
    return from_dict(apply_overrides(values, overrides or []))


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
