"""Rows of a left-padded batch and their cache, with slots that are freed and taken again in place.

Keys and values lie in buffers with room to grow: neither a step, nor a row that ends, nor one that joins
copies those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from quanteval.engines.batching import cache_argument
from quanteval.interfaces import Request, Sampling

ROOM = 64
"""Columns by which buffers grow, and unused ones that are worth giving back."""


class Row:
    """A request in work: the tokens it has written, and what it draws them with."""

    def __init__(self, handle: str, request: Request) -> None:
        self.handle = handle
        self.request = request
        self.chooser = _Chooser(request.sampling)
        self.written: list[int] = []
        self.started_s: float | None = None
        """`time.perf_counter()` at which its prompt was first read."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far: what is read when the row joins a batch."""
        return (*self.request.prompt.token_ids, *self.written)


class Batch:
    """Slots computed together: a row or none in each, and their keys and values.

    `mask` is [slots, columns]; the row in a slot owns the columns in which its mask is 1, the last ones.
    `positions` [slots, 1] is the depth of each slot's last column.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._clear()

    def _clear(self) -> None:
        self.slots: list[Row | None] = []
        self.mask: Any = None
        self.positions: Any = None
        self.cache: Any = None

    @property
    def live(self) -> list[Row]:
        """The rows, in the order of their slots."""
        return [row for row in self.slots if row is not None]

    @property
    def columns(self) -> int:
        """Columns of the cache."""
        return 0 if self.mask is None else int(self.mask.shape[1])

    @property
    def plain(self) -> bool:
        """Whether the cache is of the plain sort, so that rows may join and columns be dropped."""
        from transformers.cache_utils import DynamicLayer

        return self.cache is None or all(
            type(layer) is DynamicLayer or hasattr(layer, "room") for layer in self.cache.layers
        )

    def fits(self, new: Sequence[Row], cache_tokens: int) -> bool:
        """Whether rows may join: the cache takes them, with room for a few more tokens of each."""
        if not self.live:
            columns = max(len(row.ids) for row in new) + ROOM
            return len(new) == 1 or len(new) * columns <= cache_tokens
        columns = max(self.columns, *(len(row.ids) for row in new)) + ROOM
        slots = max(len(self.slots), len(self.live) + len(new))
        return self.plain and slots * columns <= cache_tokens

    def give_way(self, cache_tokens: int) -> list[Row]:
        """Take out the rows that joined last until one more column fits; one row may always stay."""
        out: list[Row] = []
        while len(self.live) > 1 and len(self.slots) * (self.columns + 1) > cache_tokens:
            self._drop_columns()
            if len(self.slots) * (self.columns + 1) <= cache_tokens or not self.plain:
                break
            latest = min(self.live, key=lambda row: len(row.written))
            out.append(latest)
            self.drop([latest])
            self._compact()
        return out

    # ---- forwards

    def begin(self, new: list[Row]) -> tuple[Batch, Any]:
        """Read the tokens of new rows; return their batch and their logits [rows, V]."""
        import torch

        texts = [row.ids for row in new]
        longest = max(map(len, texts))
        ids = torch.zeros((len(new), longest), dtype=torch.long)
        mask = torch.zeros((len(new), longest), dtype=torch.long)
        for i, text in enumerate(texts):
            ids[i, longest - len(text) :] = torch.tensor(text)
            mask[i, longest - len(text) :] = 1
        first = Batch(self.model)
        first.slots = list(new)
        first.mask = mask.to(self.model.device)
        positions = (first.mask.cumsum(-1) - 1).clamp(min=0)
        logits = first._forward(ids.to(self.model.device), positions, first.mask)
        first.positions = positions[:, -1:]
        return first, logits

    def advance(self) -> Any:
        """Compute one more column from the rows' last tokens; return logits [live rows, V]."""
        import torch

        last = [row.written[-1] if row is not None else 0 for row in self.slots]
        ids = torch.tensor(last, device=self.model.device)[:, None]
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.slots), 1))], dim=1)
        used = torch.tensor([row is not None for row in self.slots], device=self.model.device)
        self.positions = torch.where(used[:, None], self.positions + 1, 0)
        # Spelled out, the mask spares the library from making one, and keeps it off a slower kernel.
        mask = self.mask[:, None, None, :].bool() if self.plain else self.mask
        logits = self._forward(ids, self.positions, mask)
        return logits if bool(used.all()) else logits[used.cpu()]

    def _forward(self, ids: Any, positions: Any, mask: Any) -> Any:
        import torch

        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self.model.forward): self.cache},
            )
        self.cache = out.past_key_values
        return out.logits[:, -1].float().cpu()

    # ---- rows that leave and join

    def drop(self, rows: Sequence[Row]) -> None:
        """Free the slots of rows."""
        gone = {id(row) for row in rows}
        for i, row in enumerate(self.slots):
            if row is not None and id(row) in gone:
                self.slots[i] = None
                # What is left there sees itself alone: a row that sees nothing at all would be NaN.
                self.mask[i, :-1] = 0
        if rows and not self.live:
            self._clear()
        elif rows and not self.plain:
            self._compact()

    def join(self, other: Batch) -> None:
        """Take the rows of another batch into free slots, or into new ones."""
        if not other.live:
            return
        if not self.live:
            self.slots, self.mask, self.positions, self.cache = (
                other.slots, other.mask, other.positions, other.cache,
            )  # fmt: skip
            self._make_room(0, 0)
            return
        free = [i for i, row in enumerate(self.slots) if row is None]
        more = max(0, len(other.live) - len(free))
        self._make_room(more, max(0, other.columns - self.columns))
        free += range(len(self.slots), len(self.slots) + more)
        self.slots += [None] * more
        end = self.columns
        for i, row in enumerate(other.slots):
            if row is None:
                continue
            slot, length = free.pop(0), len(row.ids) - 1
            self.slots[slot] = row
            self.mask[slot] = 0
            self.mask[slot, end - length :] = 1
            self.positions[slot] = other.positions[i]
            for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
                mine.keys[slot, :, end - length :] = theirs.keys[i, :, -length:]
                mine.values[slot, :, end - length :] = theirs.values[i, :, -length:]

    def tidy(self) -> None:
        """Give back slots and columns that nobody uses, once they are worth a copy."""
        if self.live and self.plain and 4 * len(self.live) <= 3 * len(self.slots):
            self._compact()
        self._drop_columns()

    def _drop_columns(self) -> None:
        import torch

        if not self.live or not self.plain:
            return
        used = torch.tensor([row is not None for row in self.slots], device=self.mask.device)
        empty = int(self.mask[used].any(0).long().argmax())
        if empty >= ROOM:
            self.mask = self.mask[:, empty:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, empty:], layer.values[:, :, empty:]

    def _compact(self) -> None:
        import torch

        keep = [i for i, row in enumerate(self.slots) if row is not None]
        if len(keep) == len(self.slots):
            return
        index = torch.tensor(keep, device=self.mask.device)
        self.slots = [*self.live]
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.cache.batch_select_indices(index)

    def _make_room(self, slots: int, columns: int) -> None:
        """Add empty slots at the end and empty columns at the front, in buffers that can grow."""
        from torch.nn.functional import pad

        self.mask = pad(self.mask, (columns, 0, 0, slots))
        if slots:
            self.mask[-slots:, -1] = 1
        self.positions = pad(self.positions, (0, 0, 0, slots))
        if self.plain:
            layer_class = _growing_layer()
            self.cache.layers = [
                layer_class.padded(layer, slots, columns) for layer in self.cache.layers
            ]

    def cache_use(self) -> tuple[int, int]:
        """Return the tokens that the cache has room for, padding and unused columns included, and its bytes."""
        tokens = size = 0
        for layer in getattr(self.cache, "layers", None) or []:
            for part in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if part is not None:
                    held = int(part.untyped_storage().nbytes())
                    size += held
                    one = part.shape[1] * part.shape[-1] * part.element_size()
                    tokens = max(tokens, held // one)
        return tokens, size


@cache
def _growing_layer() -> Any:
    """Return a cache layer that writes new tokens behind the old ones, where there is room."""
    import torch
    from torch.nn.functional import pad
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[misc]
        """`keys` and `values` are views of buffers that are `room` columns longer."""

        room = 0

        @classmethod
        def padded(cls, layer: Any, slots: int, columns: int) -> GrowingLayer:
            """Return a layer with that many more slots at the end and columns at the front."""
            if type(layer) is cls and not slots and not columns:
                return layer
            made = cls()
            made.is_initialized, made.device, made.dtype = True, layer.device, layer.keys.dtype
            made._grow(layer.keys, layer.values, slots, columns)
            return made

        def _grow(self, keys: Any, values: Any, slots: int = 0, columns: int = 0) -> None:
            # Zeros, not whatever was there: what is masked is still multiplied, by zero.
            around = (0, 0, columns, ROOM, 0, 0, 0, slots)
            self.keys = pad(keys, around)[:, :, :-ROOM]
            self.values = pad(values, around)[:, :, :-ROOM]
            self.room = ROOM

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            new = key_states.shape[-2]
            if self.room < new:
                self._grow(self.keys, self.values)
            self.keys = _longer(self.keys, new)
            self.values = _longer(self.values, new)
            self.keys[:, :, -new:] = key_states
            self.values[:, :, -new:] = value_states
            self.room -= new
            return self.keys, self.values

        def batch_select_indices(self, indices: Any) -> None:
            self._grow(self.keys[indices], self.values[indices])

    def _longer(view: Any, columns: int) -> Any:
        size = (*view.shape[:2], view.shape[2] + columns, view.shape[3])
        return torch.as_strided(view, size, view.stride(), view.storage_offset())

    return GrowingLayer


class _Chooser:
    """Draws a row's next token from its own seeded generator."""

    def __init__(self, sampling: Sampling) -> None:
        import torch

        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Any) -> int:
        import torch

        sampling = self.sampling
        logits = logits / sampling.temperature
        order = torch.argsort(logits, descending=True)
        probabilities = torch.softmax(logits[order].double(), dim=-1)
        keep = torch.ones_like(probabilities, dtype=torch.bool)
        if sampling.top_k > 0:
            keep[sampling.top_k :] = False
        if sampling.top_p < 1:
            # A token stays while the mass before it is below top_p, so the first always stays.
            keep &= (probabilities.cumsum(-1) - probabilities) < sampling.top_p
        probabilities = probabilities * keep
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return int(order[drawn])
