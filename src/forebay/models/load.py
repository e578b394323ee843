"""Loads a frozen causal LM and its tokenizer from a folder, as safetensors or as one GGUF file.

Guarantees: what cannot be loaded is one clear message with the fix; weights absent from the files are an error (never
random numbers); a cast touches parameters only, so that rotary frequencies stay fp32; `dtype: auto` is decided by a
short measurement on this machine; fp32 products on a CPU use the faster library. Does not capture anything
(models.target) and downloads nothing. Called by `models.target`, `data.prepare` (tokenizer), `decode` and `api`.
"""

from __future__ import annotations

import copy
import io
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.config import TargetConfig
from forebay.errors import TargetError, UsageError
from forebay.models.matmul import fast

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAST_ROWS = 8  # fewer rows are not worth oneDNN's call
MEASURE_TOKENS = 128
MEASURE_S = 0.4  # per dtype


class Stop(Exception):
    """Raised by a hook when the forward has produced all that is wanted. Never leaves this package."""


class FastLinear(nn.Linear):
    """nn.Linear whose fp32 products on a CPU go through oneDNN where that is faster (models.matmul)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if fast(x) and x.numel() >= FAST_ROWS * x.shape[-1] and not (torch.is_grad_enabled() and x.requires_grad):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return super().forward(x)


def use_fast_products(model: nn.Module) -> None:
    """Make the model's plain linear layers `FastLinear`; same weights, same keys."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as transformers loaded it: the reference of self-test and benchmark."""
    changed = [module for module in model.modules() if type(module) is FastLinear]
    for module in changed:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module in changed:
            module.__class__ = FastLinear


def locate(config: TargetConfig) -> tuple[Path, str | None]:
    """(folder, name of the GGUF file or None) of a target.

    Raises UsageError: no such folder, or neither a config.json nor exactly one .gguf file in it.
    """
    folder = Path(config.model).expanduser()
    if folder.is_file() and folder.suffix == ".gguf" and config.gguf_file is None:
        return folder.parent, folder.name
    if not folder.is_dir():
        raise UsageError(
            f"no model folder at {folder}: download the model first and give the folder that holds its config.json"
        )
    if config.gguf_file is not None:
        if not (folder / config.gguf_file).is_file():
            raise UsageError(f"no file {config.gguf_file} in {folder}: correct target.gguf_file or remove it")
        return folder, config.gguf_file
    if (folder / "config.json").is_file():
        return folder, None
    found = sorted(p.name for p in folder.glob("*.gguf"))
    if len(found) == 1:
        return folder, found[0]
    if found:
        raise UsageError(f"{folder} holds {len(found)} GGUF files: set target.gguf_file to one of {', '.join(found)}")
    raise UsageError(f"{folder} has neither a config.json nor a .gguf file: give the folder of a causal language model")


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer, chat template included.

    Raises UsageError or TargetError: no tokenizer files, or files that transformers cannot read.
    """
    from transformers import AutoTokenizer

    folder, gguf = locate(config)
    try:
        return AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
    except ImportError as error:
        raise _missing_package(error, folder) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{folder} has no tokenizer that transformers can read ({_first_line(error)})") from None


def check_device(device: str | torch.device) -> torch.device:
    """The device, if it is there. Raises UsageError where it is not, or is no device."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"'{device}' is no device: use cpu, cuda or cuda:0, cuda:1, ...") from None
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise UsageError(f"there is no device {device}: this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def load_config(config: TargetConfig) -> Any:
    """The language model's own configuration, without loading weights.

    Raises UsageError (folder) or TargetError (a configuration that transformers cannot read).
    """
    from transformers import AutoConfig

    folder, gguf = locate(config)
    try:
        whole = AutoConfig.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
    except ImportError as error:
        raise _missing_package(error, folder) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{folder} has no configuration that transformers can read ({_first_line(error)})") from None
    return whole.get_text_config(decoder=True)


def load_model(config: TargetConfig, device: str | torch.device = "cpu") -> Any:
    """The target in eval mode, frozen, on `device`, in `config.dtype`.

    Raises UsageError (folder) or TargetError: unsupported architecture, missing weights, unreadable files.
    """
    import transformers

    folder, gguf = locate(config)
    # loaded as stored (a GGUF file gives fp32), so that `auto` can still choose without rounding twice
    options: dict[str, Any] = {"dtype": "auto", "output_loading_info": True, "low_cpu_mem_usage": True}
    if gguf:
        options["gguf_file"] = gguf
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _bars_only_for_people():
        model, info = _from_pretrained(folder, options)
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__} (first: {missing[0]}): "
            "the folder is incomplete, or its config.json belongs to another model"
        )
    model.eval().requires_grad_(False)
    if is_quantised(model):  # its numbers mean nothing without their scales: leave them as they are
        if config.dtype != "auto":
            raise UsageError(f"{folder} is quantised and cannot be cast: remove target.dtype={config.dtype}")
        return model.to(device)
    if torch.device(device).type == "cpu":
        use_fast_products(model)
    cast(model, DTYPES[config.dtype] if config.dtype != "auto" else auto_dtype(model, device))
    return model.to(device)


@contextmanager
def _bars_only_for_people() -> Iterator[None]:
    """Transformers' progress bars fill log files; keep them for terminals."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of GGUF files obeys no setting; errors are raised, not printed
            yield
    finally:
        logging.enable_progress_bar()


def _from_pretrained(folder: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        try:
            return AutoModelForCausalLM.from_pretrained(folder, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            return AutoModelForImageTextToText.from_pretrained(folder, **options)
    except ImportError as error:
        raise _missing_package(error, folder) from None
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise TargetError(
            f"{folder} is not a causal language model that this transformers can load ({_first_line(error)})"
        ) from error


def _missing_package(error: ImportError, folder: Path) -> TargetError:
    if "gguf" in str(error).lower():
        return TargetError(f"reading the GGUF file in {folder} needs a package: pip install 'forebay[demo]'")
    return TargetError(f"loading {folder} needs a package that is not installed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def is_quantised(model: nn.Module) -> bool:
    """Whether some parameter is kept in another form than a plain float."""
    return any(p.dtype not in (*DTYPES.values(), torch.float64) for p in model.parameters())


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters in place. Buffers stay: bf16 rotary frequencies would be wrong far out."""
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in keep for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    if hasattr(model, "config"):
        model.config.dtype = dtype


def text_config(model: Any) -> Any:
    """The language model's own configuration (nested in multimodal ones)."""
    return model.config.get_text_config(decoder=True)


def decoder_and_layers(model: Any) -> tuple[Any, nn.ModuleList]:
    """The module that turns token ids into hidden states, and the list of its layers.

    Raises TargetError where no list of `num_hidden_layers` layers is found.
    """
    decoder, count = model.get_decoder(), text_config(model).num_hidden_layers
    for module in (decoder, getattr(decoder, "model", None)):
        for name in ("layers", "h", "blocks"):
            layers = getattr(module, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) >= count:
                return module, layers
    raise TargetError(
        f"{type(model).__name__} is not supported: found no list of {count} layers in its {type(decoder).__name__}"
    )


def auto_dtype(model: Any, device: str | torch.device = "cpu") -> torch.dtype:
    """The faster of fp32 and bf16: on CUDA bf16 where it is native, on CPU by timing the model's first two layers."""
    if torch.device(device).type != "cpu":
        native = torch.device(device).type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    seconds = measure_dtypes(model, (torch.float32, torch.bfloat16))
    return min(seconds, key=lambda d: seconds[d])


@torch.inference_mode()
def measure_dtypes(model: Any, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """Seconds of a forward through the first two layers, per dtype; alternating, the best of each."""
    decoder, layers = decoder_and_layers(model)
    count = min(2, len(layers))
    originals = list(layers[:count])
    copies: dict[torch.dtype, list[nn.Module]] = {}
    for dtype in dtypes:
        copies[dtype] = [copy.deepcopy(layer) for layer in originals]
        for layer in copies[dtype]:
            cast(layer, dtype)
            layer.requires_grad_(False)
    states = torch.randn(1, MEASURE_TOKENS, text_config(model).hidden_size, generator=torch.Generator().manual_seed(0))
    best = dict.fromkeys(dtypes, float("inf"))
    begin, round_ = time.perf_counter(), 0
    try:
        while round_ < 2 or (time.perf_counter() - begin < MEASURE_S * len(dtypes) and round_ < 20):
            for dtype in dtypes:
                for i in range(count):
                    layers[i] = copies[dtype][i]
                hook = layers[count - 1].register_forward_hook(_stop_hook)
                start = time.perf_counter()
                try:
                    decoder(inputs_embeds=states.to(dtype), use_cache=False)
                except Stop:
                    pass
                finally:
                    hook.remove()
                if round_:  # the first is warm-up
                    best[dtype] = min(best[dtype], time.perf_counter() - start)
            round_ += 1
    finally:
        for i, layer in enumerate(originals):
            layers[i] = layer
    return best


def _stop_hook(module: nn.Module, args: Any, output: Any) -> None:
    raise Stop
