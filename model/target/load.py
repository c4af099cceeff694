"""The frozen target: loaded explicitly, its parts found by structure, every tap captured.

`output_hidden_states` is not relied on, since what it means changed between versions of transformers:
each state is taken by a hook on the module that makes it. A parameter that the checkpoint did not fill
is an error that names it; parameters a checkpoint keeps in float32 beside bfloat16 weights (A_log,
dt_bias) stay in float32, as the engines that serve the model keep them.

    target = load(TargetSpec(model="Qwen/Qwen3-0.6B", dtype="bfloat16"))
    taps = forward(target, [1, 2, 3], backend=parse("torch")).taps     # {"layer.0.out": [3, width], ...}
"""

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.target.backends import Backend, CallRecorder, OperatorCall, prove
from parity.model.target.golden import Float64Promotion, promote_to_float64
from parity.model.tiny.embedded import resolve
from parity.reports.words import shorten_list
from parity.tracing.trace import BackendProof, NormState, TapInfo, TargetIdentity

LOADER_NAMES = ("AutoModelForCausalLM", "AutoModel", "AutoModelForImageTextToText")
TORCH_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# How many values of each parameter are compared with the checkpoint's after loading: enough that a
# random parameter cannot agree by chance, few enough to cost nothing on a large model.
WEIGHT_SAMPLE = 256
STATES = "states"
"""Stands for the residual stream: what enters layer 0, every layer's output, before and after the final norm."""
OPERATOR_TAPS = (".conv.out", ".gdn.out")
PREFIX = re.compile(r"^(?:(?:model|language_model|transformer|text_model)\.)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """Which model to load, and how. Nothing is left to a default of the library."""

    model: str
    """Name on the hub, or path of a folder (or of a .gguf file) on this machine; `embedded:NAME` becomes its path."""
    revision: str | None = None
    dtype: str = "auto"
    """One of `TORCH_DTYPES`; `auto` is the dtype the checkpoint is stored in."""
    loader: str = "AutoModelForCausalLM"
    """One of `LOADER_NAMES`."""
    device_map: str | None = None
    round_float32: bool = False
    """Round what a lower-precision checkpoint stores in float32 (A_log, dt_bias) to the precision of the rest, as
    a plain `from_pretrained(dtype=bfloat16)` does. False keeps it, as the engines that serve the model do."""

    def __post_init__(self) -> None:
        if self.loader not in LOADER_NAMES:
            raise ParityError(
                f"loader {self.loader!r}", "no such loader", f"use one of {', '.join(LOADER_NAMES)}"
            )
        if self.dtype not in TORCH_DTYPES:
            raise ParityError(
                f"dtype {self.dtype!r}", "no such dtype", f"use one of {', '.join(TORCH_DTYPES)}"
            )
        object.__setattr__(self, "model", resolve(self.model))


@dataclass(kw_only=True)
class Target:
    """A loaded target and its parts, found by structure."""

    spec: TargetSpec
    model: Any
    layers: nn.ModuleList
    norm: nn.Module
    embed: nn.Module
    head: nn.Module | None
    """None where the loader gives no language-model head (AutoModel): then there are no `logits`."""
    config: Any
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
    def linear(self) -> dict[int, Any]:
        """The linear-attention module of each layer that has one: the submodule that owns `A_log`."""
        found = {}
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if "A_log" in module._parameters:
                    found[index] = module
        return found

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
    """Load and check a target. Raises ParityError where it cannot be found, is not filled, or has no
    decoder layers that can be told apart."""
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


def source(model: str) -> tuple[str, dict[str, str]]:
    """(name or folder, further options) under which transformers finds a model, a .gguf file included.

    Raises ParityError for a path that is not there: as a name on a hub it would only be misunderstood; and where no
    embedded target is called so.
    """
    model = resolve(model)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if (model.startswith((".", "/", "~")) or path.suffix == ".gguf") and not path.is_dir():
        raise ParityError(
            f"model {model}", "no such folder or .gguf file", "give the folder that holds config.json"
        )
    return str(path) if path.is_dir() else model, {}


def _from_pretrained(spec: TargetSpec) -> tuple[Any, Mapping[str, Any]]:
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


def _parts(spec: TargetSpec, model: Any) -> Target:
    """Find the decoder layers, final norm, embedding and head of any loaded model."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    candidates = [
        (name, module, parent)
        for parent_name, parent in model.named_modules()
        for name, module in parent.named_children()
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
    name, layers, parent = candidates[0]
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

    Catches what loading information misses: a parameter that was said to be loaded and holds noise.
    """
    stored = _stored_tensors(target.spec)
    if isinstance(stored, str):
        target.unchecked = stored
        return
    sizes: dict[str, int] = {}
    for reader, key in stored.values():
        part = reader.get_slice(key)
        sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + _numel(part.get_shape())
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
    rows = max(1, min(shape[0], WEIGHT_SAMPLE * shape[0] // max(1, _numel(shape))))
    mine, theirs = parameter.detach()[:rows].cpu(), part[:rows]
    return torch.equal(mine, theirs.to(mine.dtype))


def _stored_tensors(spec: TargetSpec) -> dict[str, tuple[Any, str]] | str:
    """(open file, key) of each tensor of a local or cached safetensors checkpoint by canonical key, or why not."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    if spec.model.endswith(".gguf"):
        return "GGUF weights are converted while loading"
    try:
        files = {}
        for name in ("model.safetensors", "model.safetensors.index.json"):
            found = cached_file(
                spec.model,
                name,
                revision=spec.revision,
                local_files_only=True,
                _raise_exceptions_for_missing_entries=False,
            )
            if found:
                files[name] = Path(found)
        if "model.safetensors" in files:
            paths = [files["model.safetensors"]]
        elif "model.safetensors.index.json" in files:
            index = files["model.safetensors.index.json"]
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [index.parent / Path(name).name for name in names]
        else:
            return "no safetensors checkpoint"
        result = {}
        for path in paths:
            reader = safe_open(path, framework="pt")
            for key in reader.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                result[canonical(key)] = (reader, key)
        return result
    except Exception as error:
        return f"the checkpoint could not be read beside the model ({error})"


def _numel(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _identity(target: Target) -> TargetIdentity:
    """Checksums are taken of each value as float32, so that the same weights loaded in bfloat16, float32
    or float64 agree, and a rounded one does not."""
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


def tap_infos(target: Target) -> dict[str, tuple[str, int | None, NormState, int | None]]:
    """(meaning, layer, norm, index in hidden_states) of every tap this target has, in the order computed."""
    last = len(target.layers)
    taps: dict[str, tuple[str, int | None, NormState, int | None]] = {
        "embed.out": ("what enters decoder layer 0", None, "none", 0)
    }
    for index in range(last):
        if index in target.linear:
            taps[f"layer.{index}.conv.out"] = (
                "output of the short convolution, activation included",
                index,
                "none",
                None,
            )
            taps[f"layer.{index}.gdn.out"] = (
                "output of the gated delta rule, before its gated norm",
                index,
                "none",
                None,
            )
        taps[f"layer.{index}.out"] = (
            f"output of decoder layer {index}, residual included, before any final norm",
            index,
            "none",
            index + 1 if index + 1 < last else None,
        )
    taps["final.prenorm"] = ("what enters the final norm", None, "pre", None)
    taps["final.postnorm"] = (
        "what the final norm returns; transformers' last hidden state",
        None,
        "post",
        last,
    )
    if target.head is not None:
        taps["logits"] = ("the model's own logits, scaling and soft cap included", None, "post", None)
    return taps


def select_taps(target: Target, wanted: Sequence[str] | None) -> list[str]:
    """The taps to record, in the order computed; `None` means all but the logits.

    `layer.*.out` and other patterns are understood. Raises ParityError for one that this target lacks.
    """
    import fnmatch

    known = list(tap_infos(target))
    if wanted is None:
        return [name for name in known if name != "logits"]
    chosen: set[str] = set()
    for pattern in wanted:
        if pattern == STATES:
            chosen.update(name for name in known if name != "logits" and not name.endswith(OPERATOR_TAPS))
            continue
        found = fnmatch.filter(known, pattern)
        if not found:
            raise ParityError(
                f"tap {pattern!r}",
                f"{target.spec.model} has layers 0 to {len(target.layers) - 1}"
                f" and taps such as {shorten_list(known)}",
                "name a tap of those, or a pattern such as layer.*.out",
            )
        chosen.update(found)
    return [name for name in known if name in chosen]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What one request's forward gave."""

    taps: dict[str, Tensor]
    """[tokens, width] for each tap, of the first row, on CPU, in the dtype computed."""
    proof: BackendProof
    calls: list[OperatorCall]
    notes: tuple[str, ...] = ()


def forward(
    target: Target,
    token_ids: Sequence[int],
    *,
    backend: Backend,
    taps: Sequence[str] | None = None,
    mode: str = "prefill",
    local: Mapping[str, Tensor] | None = None,
    rows: int = 1,
    keep_calls: bool = False,
    problems: Iterable[str] = (),
) -> ForwardResult:
    """Run the target on one request and record its taps, with proof of who computed it.

    mode: `prefill` (one pass), `decode` (token by token with a cache), `blocks:N` (N tokens at a time with
    a cache, as verification does). local: taps of another trace; each layer is then fed that trace's input,
    so that it answers for its own error alone. rows: the request is computed in a batch of this many rows
    (the others hold the same tokens, rotated), to measure what the batch size alone changes.
    """
    names = select_taps(target, taps)
    if local is not None and mode != "prefill":
        raise ParityError(
            f"local error computed as {mode}",
            "a layer's input is one tensor of all tokens",
            "use --as prefill with it",
        )
    ids = torch.tensor(
        [[*token_ids[shift:], *token_ids[:shift]] for shift in range(rows)], device=_device(target)
    )
    recorder = _TapRecorder(target, names)
    golden, promotion = backend.delta == "golden", Float64Promotion()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if golden:
            stack.enter_context(_layerwise_double(target, promotion))
        if local is not None:
            stack.enter_context(_feed_inputs(target, local))
        calls = stack.enter_context(
            CallRecorder(target.linear, golden=golden, keep=keep_calls, on_output=recorder.operator)
        )
        stack.enter_context(recorder)
        if golden:
            stack.enter_context(promote_to_float64(promotion))
        _run(target, ids, mode, recorder)
    proof = prove(backend, calls.proofs(), target.linear, [*problems, *_not_golden(promotion)])
    return ForwardResult(taps=recorder.result(), proof=proof, calls=calls.calls)


def _not_golden(promotion: Float64Promotion) -> list[str]:
    if not promotion.lower:
        return []
    return [
        f"golden made {len(promotion.lower)} floating tensors below float64, first in {promotion.lower[0]}"
    ]


def _device(target: Target) -> torch.device:
    return next(target.embed.parameters()).device


def forward_steps(mode: str, tokens: int) -> list[int]:
    """How many tokens each forward of a mode takes. Raises ParityError for an unknown mode."""
    if mode == "prefill":
        return [tokens]
    if mode == "decode":
        return [1] * tokens
    size = mode.removeprefix("blocks:")
    if size == mode or not size.isdigit() or int(size) < 1:
        raise ParityError(f"--as {mode}", "no such way to compute", "use prefill, decode or blocks:N")
    return [min(int(size), tokens - start) for start in range(0, tokens, int(size))]


def _run(target: Target, ids: Tensor, mode: str, recorder: "_TapRecorder") -> None:
    recorder.sizes = forward_steps(mode, ids.shape[1])
    if mode == "prefill":
        recorder.logits(target.model(input_ids=ids, use_cache=False))
        return
    from transformers import DynamicCache

    # 5.24 renamed the argument; the old name still works there, with a warning for every call.
    parameters = inspect.signature(type(target.model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    given, start = {name: DynamicCache(config=target.config)}, 0
    for size in recorder.sizes:
        recorder.logits(target.model(input_ids=ids[:, start : start + size], use_cache=True, **given))
        start += size


class _TapRecorder:
    """Hooks on the modules that make the states. Each state is cloned at once: a later in-place
    operation must not change what was recorded."""

    def __init__(self, target: Target, names: Sequence[str]) -> None:
        self.target, self.names, self.parts = target, names, {name: list[Tensor]() for name in names}
        self.sizes: list[int] = []
        """How many tokens each step computed."""
        self._stack = ExitStack()

    def __enter__(self) -> "_TapRecorder":
        target = self.target
        with ExitStack() as stack:

            def before(module: nn.Module, name: str) -> None:
                stack.callback(
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs: self._keep(
                            name, args[0] if args else kwargs["hidden_states"]
                        ),
                        with_kwargs=True,
                    ).remove
                )

            def after(module: nn.Module, name: str) -> None:
                stack.callback(
                    module.register_forward_hook(
                        lambda _, args, out: self._keep(name, out[0] if isinstance(out, tuple) else out)
                    ).remove
                )

            before(target.layers[0], "embed.out")
            for index, layer in enumerate(target.layers):
                after(layer, f"layer.{index}.out")
            before(target.norm, "final.prenorm")
            after(target.norm, "final.postnorm")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _keep(self, name: str, value: Tensor) -> None:
        if name in self.parts:
            row = value[0].detach()
            self.parts[name].append(torch.empty(row.shape, dtype=row.dtype).copy_(row))

    def operator(self, layer: int, operator: str, output: Tensor) -> None:
        """Record `conv.out` ([rows, channels, tokens]) or `gdn.out` ([rows, tokens, heads, width])."""
        if operator == "conv":
            self._keep(f"layer.{layer}.conv.out", output.transpose(1, 2))
        else:
            self._keep(f"layer.{layer}.gdn.out", output.flatten(2))

    def logits(self, output: Any) -> None:
        if "logits" in self.parts:
            self._keep("logits", output.logits)

    def result(self) -> dict[str, Tensor]:
        """The taps, steps joined. A convolution with a cache returns earlier tokens too; the new ones count."""
        sizes: list[int] = self.sizes
        joined = {}
        for name, parts in self.parts.items():
            if parts:
                new = [part[-size:] for part, size in zip(parts, sizes, strict=True)]
                joined[name] = new[0] if len(new) == 1 else torch.cat(new)  # one step needs no copy
        return joined


def _feed_inputs(target: Target, local: Mapping[str, Tensor]) -> ExitStack:
    """Hooks that give each decoder layer another trace's input: that of the layer before it, or the embedding."""
    stack = ExitStack()
    for index, layer in enumerate(target.layers):
        name = "embed.out" if index == 0 else f"layer.{index - 1}.out"
        if name not in local:
            raise ParityError(
                "local error of every layer", f"no {name} in the other trace", "capture it with that tap"
            )

        def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            fed = local[name].to(given.device, given.dtype)[None].expand_as(given).contiguous()
            return ((fed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": fed})

        stack.callback(layer.register_forward_pre_hook(replace, with_kwargs=True).remove)
    return stack


def _layerwise_double(target: Target, promotion: Float64Promotion) -> ExitStack:
    """Hooks that hold the weights of one part at a time in float64: a golden pass of a large model needs
    the memory of one decoder layer more, not eight bytes for each weight."""
    stack = ExitStack()
    parts: list[nn.Module] = [*target.layers, target.norm, target.embed]
    if target.head is not None and target.head is not target.embed:
        parts.append(target.head)
    for part in parts:
        kept: list[tuple[nn.Parameter | Tensor, Tensor]] = []

        def widen(module: nn.Module, *_: Any, kept: list[Any] = kept) -> None:
            promotion.watching = False
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    kept.append((tensor, tensor.data))
                    tensor.data = tensor.data.double()
            promotion.watching = True

        def restore(*_: Any, kept: list[Any] = kept) -> None:
            promotion.watching = False
            while kept:
                tensor, data = kept.pop()
                tensor.data = data
            promotion.watching = True

        stack.callback(part.register_forward_pre_hook(widen).remove)
        stack.callback(part.register_forward_hook(restore, always_call=True).remove)
    others = {id(tensor) for part in parts for tensor in [*part.parameters(), *part.buffers()]}
    for tensor in [*target.model.parameters(), *target.model.buffers()]:
        if id(tensor) not in others and tensor.is_floating_point():
            stack.callback(setattr, tensor, "data", tensor.data)
            tensor.data = tensor.data.double()
    return stack


def describe_taps(target: Target, taps: Mapping[str, Tensor]) -> tuple[TapInfo, ...]:
    """Manifest entries of recorded taps: dtype, width, layer, norm state and meaning, spelled out."""
    infos = tap_infos(target)
    return tuple(
        TapInfo(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            width=int(tensor.shape[-1]),
            layer=infos[name][1],
            norm=infos[name][2],
            hf_index=infos[name][3],
            meaning=infos[name][0],
        )
        for name, tensor in taps.items()
    )
