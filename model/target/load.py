"""The frozen target: loaded explicitly, compared with its checkpoint, its parts found by structure.

A parameter that the checkpoint did not fill is an error that names it; parameters a checkpoint keeps in float32
beside bfloat16 weights (A_log, dt_bias) stay in float32, as the engines that serve the model keep them.

    target = load_target(TargetSpec(model="Qwen/Qwen3-0.6B", dtype="bfloat16"))
    target.layers, target.layer_types, target.identity
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.target.spec import TargetSpec, source
from parity.reports.words import shorten_list
from parity.tracing.trace import TargetIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHT_SAMPLE = 256
"""Values of each parameter that are compared with the checkpoint's after loading: enough that a random parameter cannot
agree by chance, few enough to cost nothing on a large model."""
PREFIX = re.compile(r"^(?:(?:model|language_model|transformer|text_model)\.)+")


@dataclass(kw_only=True)
class Target:
    """A loaded target and its parts, found by structure."""

    spec: TargetSpec
    model: "PreTrainedModel"
    layers: nn.ModuleList
    norm: nn.Module
    embed: nn.Module
    head: nn.Module | None
    """None where the loader gives no language-model head (AutoModel): then there are no `logits`."""
    config: "PreTrainedConfig"
    """The text model's configuration."""
    kept_float32: tuple[str, ...] = ()
    unchecked: str = ""
    """Why the weights could not be compared with the checkpoint file, or empty where they were."""
    _identity: TargetIdentity | None = field(default=None, repr=False)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each decoder layer, by what it holds rather than by its configuration."""
        declared = getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        return tuple(
            "linear_attention" if index in self.linear else str(kind) for index, kind in enumerate(declared)
        )

    @property
    def linear(self) -> dict[int, nn.Module]:
        """The linear-attention module of each layer that has one: the submodule that owns `A_log`."""
        found = {}
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if "A_log" in module._parameters:
                    found[index] = module
        return found

    @property
    def device(self) -> torch.device:
        """Where the token ids go: the embedding's device."""
        return next(self.embed.parameters()).device

    @property
    def dtype(self) -> str:
        """The dtype that most of the decoder's weights are held in."""
        sizes: dict[torch.dtype, int] = {}
        for parameter in self.layers.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")

    @property
    def identity(self) -> TargetIdentity:
        """Name, configuration and checksums; computed once."""
        if self._identity is None:
            self._identity = _identity(self)
        return self._identity


def load_target(spec: TargetSpec) -> Target:
    """Load a target and check it.

    Raises:
        ParityError: where it cannot be found, where parameters are missing from the checkpoint or differ from it,
            and where its decoder layers or final norm cannot be told apart by structure.
    """
    model, info = _from_pretrained(spec)
    model.eval().requires_grad_(False)
    unfilled = sorted(set(info["missing_keys"]) | {str(key) for key in info["mismatched_keys"]})
    if unfilled:
        raise ParityError(
            f"{spec.loader} of {spec.model}",
            f"{len(unfilled)} parameters not in the checkpoint and left random: {shorten_list(unfilled, 5)}",
            "choose another --loader or transformers version",
        )
    target = _parts(spec, model)
    _check_against_checkpoint(target)
    return target


def _from_pretrained(spec: TargetSpec) -> "tuple[PreTrainedModel, Mapping[str, list[str]]]":
    """The model as transformers loads it, and its loading information."""
    import transformers

    name, found = source(spec.model)
    options: dict[str, Any] = {
        "revision": spec.revision,
        "output_loading_info": True,
        **found,
        "dtype": "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype),
    }
    if spec.device_map is not None:
        options["device_map"] = spec.device_map
    try:
        model, info = getattr(transformers, spec.loader).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ParityError(
            f"{spec.loader} of {spec.model}", first, "check the name, the folder and the loader"
        ) from error
    return model, info


def _parts(spec: TargetSpec, model: "PreTrainedModel") -> Target:
    """Find the decoder layers, final norm, embedding and head of any loaded model."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    # The decoder: the one list of that many layers that lies beside an embedding.
    candidates = [
        (module, parent)
        for parent in model.modules()
        for module in parent.children()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and any(isinstance(child, nn.Embedding) for child in parent.children())
    ]
    if len(candidates) != 1:
        raise ParityError(
            f"decoder layers of {type(model).__name__}",
            f"{len(candidates)} module lists of {count} layers beside an embedding",
            "report the model family; its layers cannot be told apart by structure",
        )
    layers, parent = candidates[0]
    # Its final norm: the one norm of the hidden width beside the layers.
    norms = [
        child
        for child in parent.children()
        if "norm" in type(child).__name__.lower()
        and [tuple(parameter.shape) for parameter in child.parameters()][:1] == [(config.hidden_size,)]
    ]
    if len(norms) != 1:
        raise ParityError(
            f"final norm of {type(model).__name__}",
            f"{len(norms)} norms beside its layers",
            "report the model family; its final norm cannot be told by structure",
        )
    return Target(
        spec=spec,
        model=model,
        layers=layers,
        norm=norms[0],
        embed=model.get_input_embeddings(),
        head=model.get_output_embeddings(),
        config=config,
    )


def canonical(key: str) -> str:
    """A parameter's name without the prefixes that loaders and wrappers add, in any number."""
    return PREFIX.sub("", key)


def _check_against_checkpoint(target: Target) -> None:
    """Compare a sample of every text parameter with the checkpoint file, and keep its float32 ones.

    Catches what loading information misses: a parameter that was reported as loaded and holds noise.
    """
    stored = _stored_tensors(target.spec)
    if isinstance(stored, str):
        target.unchecked = stored
        return
    # The checkpoint's main dtype, by values: what it holds in float32 beside that is kept in float32.
    sizes: dict[str, int] = {}
    for reader, key in stored.values():
        part = reader.get_slice(key)
        sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + math.prod(part.get_shape())
    main = max(sizes, key=lambda name: sizes[name])
    mixed, low = main != "F32", torch.float16 if main == "F16" else torch.bfloat16
    wrong, kept, converted = [], [], []
    for name, parameter in target.model.named_parameters():
        key = canonical(name)
        if key not in stored or parameter.device.type == "meta":
            converted.append(key)  # fused or renamed while loading, or tied: loading_info answers for it
            continue
        reader, file_key = stored[key]
        part = reader.get_slice(file_key)
        if mixed and part.get_dtype() == "F32":
            kept.append(key)
            if target.spec.round_float32:
                parameter.data = reader.get_tensor(file_key).to(low).to(parameter.device, parameter.dtype)
                continue
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = reader.get_tensor(file_key).to(parameter.device)
        if not _sample_equal(parameter, part):
            wrong.append(name)
    if wrong:
        raise ParityError(
            f"{target.spec.loader} of {target.spec.model}",
            f"{len(wrong)} parameters that differ from the checkpoint's: {shorten_list(wrong, 5)}",
            "choose another --loader or transformers version",
        )
    target.kept_float32 = tuple(kept)
    if converted:
        target.unchecked = (
            f"{len(converted)} parameters have no equal in the checkpoint file: {shorten_list(converted, 2)}"
        )


def _sample_equal(parameter: Tensor, part: Any) -> bool:
    """Whether the first rows of a parameter hold the checkpoint's values, in the parameter's dtype."""
    shape = list(part.get_shape())
    if shape != list(parameter.shape):
        return False
    if not shape:
        return True
    rows = max(1, min(shape[0], WEIGHT_SAMPLE * shape[0] // max(1, math.prod(shape))))
    mine, theirs = parameter.detach()[:rows].cpu(), part[:rows]
    return torch.equal(mine, theirs.to(mine.dtype))


def _stored_tensors(spec: TargetSpec) -> dict[str, tuple[safe_open, str]] | str:
    """(open file, key) of each tensor of a local or cached safetensors checkpoint by canonical key, or why not."""
    from transformers.utils.hub import cached_file

    def locate(name: str) -> Path | None:
        found = cached_file(
            spec.model,
            name,
            revision=spec.revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
        )
        return Path(found) if found else None

    if spec.model.endswith(".gguf"):
        return "GGUF weights are converted while loading"
    try:
        # One file, or the shards that an index names.
        if whole := locate("model.safetensors"):
            paths = [whole]
        elif index := locate("model.safetensors.index.json"):
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [index.parent / Path(name).name for name in names]
        else:
            return "no safetensors checkpoint"
        readers: list[safe_open] = [safe_open(path, framework="pt") for path in paths]
        return {canonical(key): (reader, key) for reader in readers for key in reader.keys()}  # noqa: SIM118
    except Exception as error:
        return f"the checkpoint could not be read beside the model ({error})"


def _identity(target: Target) -> TargetIdentity:
    """Name, configuration and checksums of the weights.

    Checksums are taken of each value as float32, so that the same weights loaded in bfloat16, float32 or float64
    agree, and a rounded one does not.
    """
    config = target.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(volatile, None)
    return TargetIdentity(
        name=target.spec.model,
        revision=getattr(target.model.config, "_commit_hash", None) or target.spec.revision,
        config_sha256=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        model_type=str(target.config.model_type),
        layers=len(target.layers),
        layer_types=target.layer_types,
        weights={
            canonical(name): _checksum(parameter)
            for name, parameter in target.model.named_parameters()
            if parameter.device.type != "meta"
        },
    )


def _checksum(parameter: Tensor) -> str:
    digest = hashlib.sha256(str(tuple(parameter.shape)).encode())
    for block in parameter.detach().reshape(-1).split(1 << 22):
        digest.update(block.to(torch.float32).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
