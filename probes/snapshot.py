"""A trainer's state before a probe ran: compared with the state afterwards, and put back.

before = subject.take_snapshot()
...                                  # a probe runs
before.list_changes()                # names of what is no longer bit for bit as it was
before.restore()
"""

import random
from collections.abc import Callable, Mapping
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor


class RandomState(TypedDict, total=False):
    """State of the generators that a step could draw from without an argument that shows it."""

    torch: Tensor
    numpy: dict[str, object]
    python: tuple[object, ...]
    cuda: Tensor
    """Of the current device; absent where CUDA is not in use."""


def read_random_state() -> RandomState:
    """Return the state of torch's, numpy's, Python's and (where it is in use) CUDA's global generators."""
    state = RandomState(
        torch=torch.get_rng_state(),
        numpy=np.random.get_state(legacy=False),
        python=random.getstate(),
    )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: RandomState) -> None:
    """Put the global generators back to what `read_random_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def list_random_changes(before: RandomState) -> list[str]:
    """Return the names of the generators (torch, numpy, python, cuda) that have moved since `before`."""
    now = read_random_state()
    return [name for name, old in before.items() if not _is_bit_equal(old, now.get(name))]


def _is_bit_equal(a: object, b: object) -> bool:
    """Whether two values have the same bits, through mappings and sequences; nan equals itself."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b).to(a.device))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_bit_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and a and isinstance(a[0], int):
        return bool(a == b)  # plain numbers: python's random state has 625 of them
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_bit_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, the tensor itself where it is whole."""
    part: Callable[[], Tensor] | None = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if part is None else part()


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that nan equals itself."""
    own = _local_part(tensor)
    return own.contiguous().view(-1).view(torch.uint8) if own.numel() else own


def _map_tensors(value: object, make: Callable[[Tensor], object]) -> object:
    """The same mappings and sequences, with `make` of every tensor in its place."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, make) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(each, make) for each in value)
    return value


def _clone_tensors(value: object) -> object:
    """A copy in the host's memory that shares none with the original."""
    return _map_tensors(value, lambda tensor: _local_part(tensor).to("cpu", copy=True))


def _digest_tensors(value: object) -> object:
    """A sum of every tensor's bits in its place: a change is seen, and no copy is kept."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def digest(tensor: Tensor) -> int:
        whole = _local_part(tensor).contiguous().view(-1)
        return int(whole.view(kinds.get(whole.element_size(), torch.int8)).sum(dtype=torch.int64))

    return _map_tensors(value, digest)


def _copy_into(live: object, kept: object) -> bool:
    """Copy kept tensors into the live ones, in place; False where the two are not built alike."""
    if isinstance(live, Tensor) and isinstance(kept, Tensor):
        own = _local_part(live)
        return own.shape == kept.shape and own.copy_(kept) is own
    # Lists, not generators: every part is copied, also behind one that does not fit.
    if isinstance(live, Mapping) and isinstance(kept, Mapping):
        return live.keys() == kept.keys() and all([_copy_into(live[key], kept[key]) for key in live])
    if isinstance(live, list | tuple) and isinstance(kept, list | tuple):
        return len(live) == len(kept) and all([_copy_into(a, b) for a, b in zip(live, kept, strict=True)])
    return bool(live == kept)


class Snapshot:
    """What a probe must leave as it found it: parameters, `.grad`, optimizer, hooks, random state."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        *,
        copies: bool = True,
    ) -> None:
        """Read the state.

        Args:
            parameters: name -> the live tensor.
            optimizer: None where the trainer exposes none.
            copies: whether copies are kept in the host's memory, to put back from. Without them what was changed is
                only reported.
        """
        self.copies, self.optimizer = copies, optimizer
        keep = _clone_tensors if copies else _digest_tensors
        self._now: Callable[[object], object] = (lambda value: value) if copies else _digest_tensors
        self.parameters = dict(parameters)
        self.values = {name: keep(tensor) for name, tensor in self.parameters.items()}
        self.flags = {name: tensor.requires_grad for name, tensor in self.parameters.items()}
        self.grads = {name: (tensor.grad, keep(tensor.grad)) for name, tensor in self.parameters.items()}
        self.hooks = {name: _list_hooks(tensor) for name, tensor in self.parameters.items()}
        self.state = None if optimizer is None else keep(optimizer.state_dict())
        self.random = read_random_state()

    def list_changes(self) -> list[str]:
        """Return what is no longer bit for bit as it was: `parameter fc.weight`, `optimizer`, ..."""
        changed = []
        for name, tensor in self.parameters.items():
            held, value = self.grads[name]
            if not _is_bit_equal(self.values[name], self._now(tensor)):
                changed.append(f"parameter {name}")
            if tensor.requires_grad != self.flags[name]:
                changed.append(f"requires_grad of {name}")
            if tensor.grad is not held or not _is_bit_equal(value, self._now(tensor.grad)):
                changed.append(f"grad of {name}")
            if _list_hooks(tensor) != self.hooks[name]:
                changed.append(f"hooks of {name}")
        if self.optimizer is not None:
            if not _is_bit_equal(self.state, self._now(self.optimizer.state_dict())):
                changed.append("optimizer")
        return changed + [f"random state of {name}" for name in list_random_changes(self.random)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place, from the copies."""
        assert self.copies
        for name, tensor in self.parameters.items():
            tensor.requires_grad_(self.flags[name])
            if not _is_bit_equal(self.values[name], tensor):
                _copy_into(tensor, self.values[name])
            held, value = self.grads[name]
            if held is not None:
                _copy_into(held, value)
            tensor.grad = held
        if self.optimizer is not None:
            state = self.optimizer.state_dict()
            if not _copy_into(state, self.state):  # steps were added or taken away: load it whole
                assert isinstance(self.state, dict)
                self.optimizer.load_state_dict(self.state)
        set_random_state(self.random)


def _list_hooks(tensor: Tensor) -> tuple[int, ...]:
    """Numbers of the tensor's backward hooks; torch has no public way to read them."""
    hooks: Mapping[int, object] | None = tensor._backward_hooks
    return tuple(hooks) if hooks else ()
