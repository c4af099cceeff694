"""Numbers of a training step that need no further computation of the model: read from tensors that are there anyway.

Everything is reduced on the tensor's own device and copied at once (`StepValues.read`), so that a probed step waits for
the device once. Nothing here makes a tensor require gradients, and no random number is drawn.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from parity.reports.record import Table, Value, declare_columns

VALUE_SAMPLE = 1000
"""Values of a tensor that a histogram is made from, evenly spaced."""
MOMENT_KEYS = ("finite", "mean", "std")
WHOLE = "module"
"""What the watched module itself is called."""


@runtime_checkable
class _Sharded(Protocol):
    """A tensor of which this rank holds a part (torch's DTensor)."""

    def to_local(self) -> Tensor: ...


class StepValues:
    """Numbers of one step by dotted name, still on their device; `read` brings them over."""

    def __init__(self) -> None:
        self.scalars: dict[str, Tensor | Value] = {}
        self.tensors: list[tuple[str, str, str, str]] = []
        """Name, shape, dtype, device of what was described."""
        self.sizes: dict[str, int] = {}
        """Name -> how many values it has here; another rank may have more."""
        self.samples: dict[str, Tensor] = {}
        """For histograms."""

    @torch.no_grad()
    def describe(self, name: str, tensor: object) -> None:
        """Note shape, dtype, share that is finite, and of what is finite mean and std; only of tensors."""
        if not isinstance(tensor, Tensor):
            return
        tensor = local(tensor.detach())
        shape, dtype = str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch.")
        self.tensors.append((name, shape, dtype, str(tensor.device)))
        self.sizes[name] = tensor.numel()
        if not tensor.numel() or tensor.is_complex():
            return
        for moment, value in zip(MOMENT_KEYS, _moments(tensor), strict=True):
            self.scalars[f"{name}.{moment}"] = value
        if tensor.is_floating_point():
            flat = tensor.reshape(-1)
            self.samples[name] = flat[:: max(1, flat.numel() // VALUE_SAMPLE)][:VALUE_SAMPLE].clone()

    def put(self, name: str, value: Tensor | Value) -> None:
        """Note one number, or a tensor of one element."""
        self.scalars[name] = value.detach() if isinstance(value, Tensor) else value

    def read(self) -> tuple[tuple[str, Value], ...]:
        """All numbers as Python's, in the order they were put."""
        held: dict[torch.device, dict[str, Tensor]] = {}
        for name, value in self.scalars.items():
            if isinstance(value, Tensor):
                held.setdefault(value.device, {})[name] = local(value).detach().double().reshape(())
        read: dict[str, float] = {}
        for there in held.values():
            read |= dict(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
        return tuple(
            (name, value if not isinstance(value, Tensor) else read[name])
            for name, value in self.scalars.items()
        )

    def table(self, numbers: Mapping[str, Value]) -> Table:
        """The tensors of the step, a row each."""
        rows = tuple(
            (name, shape, dtype, device, *(numbers.get(f"{name}.{moment}") for moment in MOMENT_KEYS))
            for name, shape, dtype, device in self.tensors
        )
        return Table(
            name="tensors",
            title="Tensors of the step",
            columns=declare_columns(
                "name | shape | dtype | device | finite:float (share) | mean:float | std:float"
            ),
            rows=rows,
            detail=True,
        )


def _moments(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share that is finite, mean and std (over n) of what is, without a copy where the dtype is one of sums."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    count = wide.numel()
    mean = wide.mean()
    std = (torch.linalg.vector_norm(wide).square() / count - mean.square()).clamp(min=0).sqrt()
    # The difference of squares loses digits where the mean is large against the std; a second pass does not.
    if tensor.device.type != "cpu" or not bool(std.isfinite()) or bool(mean.abs() > std):
        finite = wide.isfinite()
        kept, some = wide.masked_fill(~finite, 0), finite.sum()
        mean = kept.sum() / some.clamp(min=1)
        std = ((kept - mean).masked_fill(~finite, 0).square().sum() / some.clamp(min=1)).sqrt()
        return some / count, mean, std
    return torch.ones_like(mean), mean, std


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, _Sharded) else tensor


def norm_of(tensor: Tensor) -> Tensor:
    """Euclidean norm, summed in float32 or wider."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm


@torch.no_grad()
def gradient_norms(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Norm of the gradients of each group of parameters; over all ranks where they are sharded.

    Every rank has to call this where parameters are sharded.

    Args:
        parameters: (name, parameter), as `named_parameters` gives them.

    Returns:
        Group (`parameter_group_of`: fc, layers.0, ..., norm) -> norm, a scalar in float64 on the parameters' device;
        a group without a gradient is left out.
    """
    whole: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    some: dict[str, bool] = {}
    for name, parameter in parameters:
        group, sharded = parameter_group_of(name), hasattr(parameter, "to_local")
        sums = shared if sharded else whole
        if parameter.grad is not None:
            square = norm_of(local(parameter.grad).detach()).double().square()
            sums[group] = sums[group] + square if group in sums else square
        elif sharded:  # the ranks add up the same list, whoever has a gradient
            sums.setdefault(group, torch.zeros((), dtype=torch.float64, device=parameter.device))
        some[group] = some.get(group, False) or parameter.grad is not None
    # The parts of sharded gradients add up over ranks.
    if shared:
        import torch.distributed as dist

        joined = torch.stack(list(shared.values()))
        dist.all_reduce(joined)
        shared = dict(zip(shared, joined, strict=True))
    empty = torch.zeros(())
    return {
        group: (whole.get(group, empty) + shared.get(group, empty).to(whole.get(group, empty).device)).sqrt()
        for group, has in some.items()
        if has
    }


def parameter_group_of(name: str) -> str:
    """The part of a model that a parameter belongs to, by its name.

    That is its numbered layer, else the module that owns it, two names deep at most: `model.layers.3`,
    `model.embed_tokens`, `fc`; a parameter of the model itself is a group of its own name.
    """
    parts = name.replace("_orig_mod.", "").split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1][:2]) or parts[0]


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, which calls it as a module of its own."""
    inner = getattr(module, "module", None)
    if type(module).__name__ == "DistributedDataParallel" and isinstance(inner, nn.Module):
        return inner
    return module


class ModuleTaps:
    """Hooks on a module's parts for the steps that are probed; none between them.

    They read statistics of the output of every part named by `parameter_group_of` at the first forward of the step (a
    checkpointed layer runs twice), and the norm of the gradient at it. A compiled part is hooked from outside only:
    hooks inside it would have it compiled again, with other kernels. What was never called is listed by `unseen`.
    """

    def __init__(self, module: nn.Module, values: StepValues, *, whole: bool = True) -> None:
        """Hook the parts.

        Args:
            values: where the numbers go.
            whole: hook the module itself too, under the name `module`.
        """
        self.values, self.whole = values, whole
        self.seen: set[str] = set()
        self.closed: list[str] = []
        """Names of parts inside compiled ones."""
        self.seconds = 0.0
        """Spent in the hooks."""
        self.parts = self._parts(module)
        self.handles = [part.register_forward_hook(self._hook(name)) for name, part in self.parts.items()]

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """The module itself, and its groups outside compiled parts."""
        found: dict[str, nn.Module] = {}
        behind: list[str] = []
        for name, part in module.named_modules():
            short = name.removeprefix("_orig_mod.").replace("._orig_mod", "")
            group = (
                bool(short)
                and short == parameter_group_of(f"{short}.x")
                and not isinstance(part, nn.ModuleList)
            )
            if any(name.startswith(f"{outer}.") or not outer for outer in behind):
                self.closed += [short] if group and name.rpartition(".")[2] != "_orig_mod" else []
                continue
            # A module after module.compile() runs its own hooks inside what is compiled.
            if getattr(part, "_compiled_call_impl", None) is not None:
                self.closed.append(short or WHOLE)
                behind.append(name)
                continue
            if group or (not name and self.whole):
                found[short or WHOLE] = part
            if type(part).__name__ == "OptimizedModule":
                behind.append(name)
        return found

    @property
    def unseen(self) -> list[str]:
        """Parts whose hooks were never called, and those that have none."""
        return sorted({*self.parts, *self.closed} - self.seen)

    def _hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(_: nn.Module, inputs: object, output: object) -> None:
            if name in self.seen:
                return
            began = time.perf_counter()
            self.seen.add(name)
            tensor = _first_tensor(output)
            if tensor is not None:
                self.values.describe(f"{name}.out", tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(self._at_gradient(name))
            self.seconds += time.perf_counter() - began

        return keep

    def _at_gradient(self, name: str) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            began = time.perf_counter()
            self.values.put(f"{name}.out.gradient", norm_of(local(grad.detach())))
            self.seconds += time.perf_counter() - began

        return keep


def step_facts(
    module: nn.Module | None, values: StepValues, groups: Iterable[str], unseen: Iterable[str]
) -> list[tuple[str, Value]]:
    """What does not change from step to step of one wiring: dtypes, mode, which parts take part and get gradients.

    Args:
        module: the one that is watched; None where the trainer itself exposes its step.
        groups: groups of parameters with a gradient.
        unseen: parts that were never called.
    """
    facts: list[tuple[str, Value]] = []
    if module is not None:
        named = list(module.named_parameters())
        facts += [
            ("step.training", module.training),
            ("step.parameters", sum(p.numel() for _, p in named)),
            ("step.trainable", sum(p.numel() for _, p in named if p.requires_grad)),
        ]
    facts.append(("step.gradients", ", ".join(sorted(groups)) or "none"))
    facts.append(("step.unseen", ", ".join(unseen) or "none"))
    dtypes: dict[str, list[str]] = {}
    for name, _, dtype, _ in values.tensors:
        dtypes.setdefault(dtype, []).append(name)
    return facts + [(f"step.{dtype}", ", ".join(sorted(names))) for dtype, names in sorted(dtypes.items())]


def _first_tensor(output: object) -> Tensor | None:
    """The tensor that a part's output is about: itself, a tuple's first, a transformers output's states or logits."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    for name in ("last_hidden_state", "logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return None
