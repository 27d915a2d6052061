"""What index arrays and block tables select, counted for people.

``_core.resolve`` says for every entry which slot of the cache it selects, or why it selects none;
it goes by the same code as the attention kernels (cuda/slot.h). This module counts its answer and
finds, for every fault, the element of the caller's array that is to blame.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _core

if TYPE_CHECKING:
    import numpy

__all__ = ["Fault", "Report", "SourceReport", "check"]

KEPT_FAULTS = 100
PRINTED_FAULTS = 10
MOST_MARKS = 1 << 28  # bytes: a mark for each slot is much faster than sorting, while it fits
EM_SPACE = "\u2003"  # HTML swallows the blanks that indent a label

# enum smla_cause of cuda/params.h: _core.resolve gives -cause for an entry that is not attended.
PADDING = 1
PAST_TOPK_LEN = 2
UNALLOCATED = 6
PADDING_ROW = 7
FAULT_INDEX = 8
FAULT_SLOT = 9
FAULT_LOGICAL = 10
FAULT_BLOCK = 11
FAULT_REQUEST = 12

MASKED = {
    PAST_TOPK_LEN: "past_topk_len",
    3: "past_seq_len",
    4: "after_query",
    5: "other_shard",
    UNALLOCATED: "unallocated",
    PADDING_ROW: "padding_row",
}
FAULTY = {
    FAULT_INDEX: "index",
    FAULT_SLOT: "slot",
    FAULT_LOGICAL: "logical",
    FAULT_BLOCK: "block",
    FAULT_REQUEST: "request",
}
CAUSES = 13  # how many of them resolve can give: lengths are clamped, their faults found here

LABELS = {
    "past_topk_len": "past topk_lens",
    "past_seq_len": "past seq_lens",
    "after_query": "after the query's position",
    "other_shard": "on another shard",
    "unallocated": "in an unallocated block",
    "padding_row": "in a padding row",
}


@dataclass(frozen=True)
class Fault:
    """One element of an argument that no correct caller passes."""

    tensor: str
    """The argument's name."""
    position: tuple[int, ...]
    """The element's place in that argument, in the caller's own shape."""
    value: int
    """What stands there."""
    bound: int
    """The first value that would be too large."""
    cause: str
    """What is wrong, as a phrase that follows the value."""
    count: int = 1
    """Entries that meet the element, or rows where it is a length or a request."""

    def __str__(self) -> str:
        place = ", ".join(str(i) for i in self.position)
        met = f" (met {self.count:,} times)" if self.count > 1 else ""
        return f"{self.tensor}[{place}] = {self.value} {self.cause}{met}"


@dataclass(frozen=True)
class SourceReport:
    """What the entries of one cache are. entries = valid + padding + masked + faulty."""

    name: str
    """``"kv_cache"`` or ``"extra_kv_cache"``."""
    rows: int
    """Query rows."""
    entries: int
    """Entries of all rows."""
    valid: int
    """Entries that are attended."""
    padding: int
    """Entries that are -1."""
    masked: dict[str, int]
    """Other entries that are left out lawfully, by cause (the causes that occur)."""
    faulty: dict[str, int]
    """Entries that are left out because of a fault, by cause (the causes that occur)."""
    empty_rows: int
    """Rows without a valid entry in this cache."""
    duplicates: int
    """Entries beyond the first that select the same slot in the same row; each counts."""
    distinct_slots: int
    """Slots that are read by at least one row."""
    distinct_blocks: int
    """Blocks that hold such a slot."""
    unallocated_blocks: int | None
    """Entries of the block table that are -1 and within seq_lens; None without a table."""
    shared_blocks: int | None
    """Blocks that stand in the tables of two requests or more; None without a table."""
    row_bytes: int
    """Bytes of a cache row."""
    counts: numpy.ndarray = field(repr=False, compare=False)
    """Valid entries of each row, in the shape of the query rows."""

    @property
    def bytes_read(self) -> int:
        """Bytes of cache rows that one attention call gathers, repeats included."""
        return self.valid * self.row_bytes

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the slots in `distinct_slots`."""
        return self.distinct_slots * self.row_bytes


@dataclass(frozen=True, repr=False)
class Report:
    """What `check` found: true where there is no fault. It prints, and shows itself, as a table."""

    rows: int
    """Query rows."""
    empty_rows: int
    """Rows without a valid entry in any cache: their output is 0, their lse -inf."""
    sources: tuple[SourceReport, ...]
    """One for each cache."""
    faults: tuple[Fault, ...]
    """The first faults, in the order of the rows that meet them."""
    fault_count: int
    """How many elements are at fault in all."""
    counts: numpy.ndarray = field(repr=False, compare=False)
    """Valid entries of each row in all caches, in the shape of the query rows."""

    @property
    def ok(self) -> bool:
        """Whether there is no fault: attend(..., validate="raise") would not raise IndexFault."""
        return self.fault_count == 0

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers, strings, lists and dicts, for json.dumps."""
        return {
            "ok": self.ok,
            "rows": self.rows,
            "empty_rows": self.empty_rows,
            "sources": [
                {
                    **{
                        name: getattr(source, name)
                        for name in SourceReport.__dataclass_fields__
                        if name != "counts"
                    },
                    "valid_per_row": _spread(source.counts),
                    "bytes_read": source.bytes_read,
                    "distinct_bytes": source.distinct_bytes,
                }
                for source in self.sources
            ],
            "fault_count": self.fault_count,
            "faults": [
                {
                    "tensor": fault.tensor,
                    "position": list(fault.position),
                    "value": fault.value,
                    "bound": fault.bound,
                    "count": fault.count,
                    "text": str(fault),
                }
                for fault in self.faults
            ],
        }

    def __str__(self) -> str:
        lines = [self._headline()]
        table = list(self._table())
        label_width = max(len(label) for label, _ in table)
        widths = [max(len(cells[i]) for _, cells in table) for i in range(len(self.sources))]
        for label, cells in table:
            columns = "  ".join(
                cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
            )
            lines.append(f"  {label.ljust(label_width)}  {columns}".rstrip())
        printed = self.faults[:PRINTED_FAULTS]
        lines += [f"  ! {fault}" for fault in printed]
        if self.fault_count > len(printed):
            lines.append(f"  ! and {self.fault_count - len(printed):,} more")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        faint = "opacity:.65;font-weight:normal"
        cell = "padding:.1em .8em;border:0;background:none"
        parts = [
            '<div style="font-size:90%">',
            f"<div><b>{html.escape(self._headline())}</b></div>",
            '<table style="border-collapse:collapse;margin:.4em 0;color:inherit">',
        ]
        for label, cells in self._table():
            parts.append(
                f'<tr style="background:none"><th style="{cell};text-align:left;{faint}">'
                f"{html.escape(label.replace('  ', EM_SPACE))}</th>"
            )
            for text in cells:
                parts.append(
                    f'<td style="{cell};text-align:right;font-variant-numeric:tabular-nums">'
                    f"{html.escape(text)}</td>"
                )
            parts.append("</tr>")
        parts.append("</table>")
        if self.faults:
            parts.append(
                '<ul style="margin:.2em 0;padding:0 0 0 .8em;list-style:none;'
                'border-left:3px solid #d33682">'
            )
            printed = self.faults[:PRINTED_FAULTS]
            parts += [f"<li><code>{html.escape(str(fault))}</code></li>" for fault in printed]
            if self.fault_count > len(printed):
                parts.append(f"<li>and {self.fault_count - len(printed):,} more</li>")
            parts.append("</ul>")
        parts.append("</div>")
        return "".join(parts)

    def _headline(self) -> str:
        faults = {0: "no faults", 1: "1 fault"}.get(
            self.fault_count, f"{self.fault_count:,} faults"
        )
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        empty = f", {self.empty_rows:,} without keys" if self.empty_rows else ""
        return f"{rows}{empty}: {faults}"

    def _table(self) -> Iterator[tuple[str, list[str]]]:
        """Lines of (label, one text for each source)."""

        def line(label: str, values: list[int | None]) -> tuple[str, list[str]]:
            return label, ["-" if value is None else f"{value:,}" for value in values]

        sources = self.sources
        if len(sources) > 1:
            yield "", [source.name for source in sources]
        yield line("entries", [source.entries for source in sources])
        yield line("  valid", [source.valid for source in sources])
        yield line("  padding (-1)", [source.padding for source in sources])
        for cause, label in LABELS.items():
            if any(cause in source.masked for source in sources):
                yield line(f"  {label}", [source.masked.get(cause, 0) for source in sources])
        if any(source.faulty for source in sources):
            yield line("  faulty", [sum(source.faulty.values()) for source in sources])
        yield "keys per row", [_span(source.counts) for source in sources]
        yield line("rows without keys", [source.empty_rows for source in sources])
        yield line("duplicates in a row", [source.duplicates for source in sources])
        yield line("distinct slots", [source.distinct_slots for source in sources])
        yield line("distinct blocks", [source.distinct_blocks for source in sources])
        if any(source.shared_blocks is not None for source in sources):
            yield line("shared blocks", [source.shared_blocks for source in sources])
            yield line("unallocated blocks", [source.unallocated_blocks for source in sources])
        yield "bytes read", [_bytes(source.bytes_read) for source in sources]
        yield "  of them distinct", [_bytes(source.distinct_bytes) for source in sources]


def check(
    kv_cache: Any,
    indices: Any,
    *,
    block_table: Any = None,
    request_ids: Any = None,
    seq_lens: Any = None,
    query_positions: Any = None,
    shard: tuple[int, int, int] | None = None,
    max_seq_len: int | None = None,
    topk_lens: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_lens: Any = None,
    extra_block_table: Any = None,
    extra_seq_lens: Any = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
) -> Report:
    """Look at every entry that `attend` would gather, and report what it is.

    The arguments are those of `attend`, with the same shapes and dtypes; the contents of the caches
    are not read. Nothing is written, and no fault is raised: they are in the report.

    Returns a `Report`: entries by what became of them, faults with the element to blame, rows
    without keys, duplicates, distinct slots and blocks, bytes that a call reads. ``print(report)``
    writes it as a table, a notebook shows it as one, and ``bool(report)`` is whether it has no
    fault.

    Raises TypeError and ValueError for arguments of the wrong kind, dtype or shape, as `attend`
    does, and ImportError where NumPy is not installed.
    """
    np = _numpy()
    resolved = _core.resolve(
        kv_cache,
        indices,
        block_table=block_table,
        request_ids=request_ids,
        seq_lens=seq_lens,
        query_positions=query_positions,
        shard=shard,
        max_seq_len=max_seq_len,
        topk_lens=topk_lens,
        extra_kv_cache=extra_kv_cache,
        extra_indices=extra_indices,
        extra_topk_lens=extra_topk_lens,
        extra_block_table=extra_block_table,
        extra_seq_lens=extra_seq_lens,
        cache_format=cache_format,
        extra_cache_format=extra_cache_format,
    )
    sources = [
        _Source(
            prefix="",
            slots=resolved[0],
            geometry=_geometry(kv_cache),
            indices=_integers(indices),
            topk_lens=_integers(topk_lens),
            block_table=_integers(block_table),
            seq_lens=_integers(seq_lens),
            shard=tuple(shard) if shard is not None else (0, 1, 1),
            max_seq_len=max_seq_len,
        )
    ]
    if len(resolved) > 1:
        sources.append(
            _Source(
                prefix="extra_",
                slots=resolved[1],
                geometry=_geometry(extra_kv_cache),
                indices=_integers(extra_indices),
                topk_lens=_integers(extra_topk_lens),
                block_table=_integers(extra_block_table),
                seq_lens=_integers(extra_seq_lens),
                shard=(0, 1, 1),
                max_seq_len=None,
            )
        )
    shape = resolved[0].shape[:-1]
    requests = _integers(request_ids)
    counts = [np.count_nonzero(source.slots >= 0, axis=-1) for source in sources]
    faults, fault_count = _faults(sources, requests, shape)
    total = sum(counts)
    return Report(
        rows=total.size,
        empty_rows=int(np.count_nonzero(total == 0)),
        sources=tuple(_count(source, each) for source, each in zip(sources, counts, strict=True)),
        faults=faults,
        fault_count=fault_count,
        counts=total,
    )


@dataclass(frozen=True)
class _Source:
    """The arguments of one cache as NumPy arrays, and what its entries became."""

    prefix: str  # of the arguments' names
    slots: numpy.ndarray  # rows' shape + (entries,): slot, or -cause
    geometry: tuple[int, int, int]  # num_blocks, block_size, bytes of a row
    indices: numpy.ndarray | None
    topk_lens: numpy.ndarray | None
    block_table: numpy.ndarray | None
    seq_lens: numpy.ndarray | None
    shard: tuple[int, int, int]  # rank, size, interleave
    max_seq_len: int | None

    def owned(self, length: Any) -> Any:
        """How many of the positions [0, length) stand on this shard."""
        rank, size, interleave = self.shard
        rounds, rest = divmod(length, size * interleave)
        return rounds * interleave + (rest - rank * interleave).clip(0, interleave)

    def local(self, position: Any) -> Any:
        """Where a position of this shard stands in its own block table."""
        _, size, interleave = self.shard
        return position // (interleave * size) * interleave + position % interleave

    def longest(self) -> int:
        """The largest lawful seq_lens: one more position would not fit in the block table."""
        rank, size, interleave = self.shard
        rounds, rest = divmod(self.block_table.shape[1] * self.geometry[1], interleave)
        length = (rounds * size + rank) * interleave + rest
        return length if self.max_seq_len is None else min(length, self.max_seq_len)


def _count(source: _Source, counts: Any) -> SourceReport:
    np = _numpy()
    slots = source.slots.reshape(counts.size, source.slots.shape[-1])
    num_blocks, block_size, row_bytes = source.geometry
    by_cause = np.bincount(-np.minimum(slots, 0).ravel(), minlength=CAUSES)
    by_cause[0] = int(counts.sum())
    if source.indices is None:  # what fills a short row up, or an empty one, is no entry
        by_cause[[PAST_TOPK_LEN, PADDING_ROW, FAULT_REQUEST]] = 0
    ordered = np.sort(slots, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    distinct = _distinct(slots[slots >= 0], num_blocks * block_size)
    unallocated, shared = _table_blocks(source)
    return SourceReport(
        name=f"{source.prefix}kv_cache",
        rows=counts.size,
        entries=int(by_cause.sum()),
        valid=int(by_cause[0]),
        padding=int(by_cause[PADDING]),
        masked={name: int(by_cause[cause]) for cause, name in MASKED.items() if by_cause[cause]},
        faulty={name: int(by_cause[cause]) for cause, name in FAULTY.items() if by_cause[cause]},
        empty_rows=int(np.count_nonzero(counts == 0)),
        duplicates=int(np.count_nonzero(repeats)),
        distinct_slots=distinct.size,
        distinct_blocks=int(np.unique(distinct // block_size).size),
        unallocated_blocks=unallocated,
        shared_blocks=shared,
        row_bytes=row_bytes,
        counts=counts,
    )


def _distinct(slots: Any, capacity: int) -> Any:
    np = _numpy()
    if capacity > MOST_MARKS:
        return np.unique(slots)
    marks = np.zeros(capacity, bool)
    marks[slots] = True
    return np.nonzero(marks)[0]


def _table_blocks(source: _Source) -> tuple[int | None, int | None]:
    """Unallocated and shared blocks of the part of the block table that seq_lens covers."""
    np = _numpy()
    table = source.block_table
    if table is None:
        return None, None
    used = np.full(table.shape[0], table.shape[1])
    if source.seq_lens is not None:
        lengths = source.owned(source.seq_lens.clip(0, source.longest()))
        used = -(-lengths // source.geometry[1])
    within = np.arange(table.shape[1]) < used[:, None]
    held = within & (table >= 0) & (table < source.geometry[0])
    pairs = np.unique(np.stack([table[held], np.nonzero(held)[0]]), axis=1)
    _, requests = np.unique(pairs[0], return_counts=True)
    return int(np.count_nonzero(within & (table == -1))), int(np.count_nonzero(requests > 1))


@dataclass(frozen=True)
class _Meetings:
    """Elements of one array that are at fault, once for each time that a row meets one."""

    tensor: str
    array: numpy.ndarray
    elements: numpy.ndarray  # flat, in `array`
    rows: numpy.ndarray  # ascending
    entries: numpy.ndarray | int  # below 0: before the row's entries
    bound: int
    cause: str


def _faults(
    sources: list[_Source], requests: Any, shape: tuple[int, ...]
) -> tuple[tuple[Fault, ...], int]:
    """The first faults and the number of all, ordered as attend meets them: by row, then by source,
    what the row's own arrays say before its entries, then by entry."""
    np = _numpy()
    found: list[tuple[tuple[int, int, int], Fault]] = []
    total = 0
    for which in range(len(sources)):
        for met in _meetings(which, sources, requests, shape):
            elements, first, counts = np.unique(met.elements, return_index=True, return_counts=True)
            total += elements.size
            rows = met.rows[first]
            entries = np.broadcast_to(met.entries, met.rows.shape)[first]
            for k in np.lexsort((entries, rows))[:KEPT_FAULTS]:
                position = np.unravel_index(elements[k], met.array.shape)
                fault = Fault(
                    tensor=met.tensor,
                    position=tuple(int(i) for i in position),
                    value=int(met.array.flat[elements[k]]),
                    bound=met.bound,
                    cause=met.cause,
                    count=int(counts[k]),
                )
                found.append(((int(rows[k]), which, int(entries[k])), fault))
    found.sort(key=lambda item: item[0])
    return tuple(fault for _, fault in found[:KEPT_FAULTS]), total


def _meetings(
    which: int, sources: list[_Source], requests: Any, shape: tuple[int, ...]
) -> Iterator[_Meetings]:
    np = _numpy()
    source = sources[which]
    prefix = source.prefix
    cache = "extra cache" if prefix else "cache"
    num_blocks, block_size, _ = source.geometry
    rows = math.prod(shape)
    slots = source.slots.reshape(rows, source.slots.shape[-1])
    topk = slots.shape[1]

    request = np.arange(rows) // (shape[1] if len(shape) == 2 else 1)
    alive = np.arange(rows)  # rows of a lawful request
    if requests is not None:
        request = requests.ravel()
        bound = next(each.block_table.shape[0] for each in sources if each.block_table is not None)
        alive = np.nonzero((request >= 0) & (request < bound))[0]
        bad = np.nonzero((request < -1) | (request >= bound))[0]
        if which == 0:
            cause = f"is outside the {bound} requests of block_table"
            yield _Meetings("request_ids", requests, bad, bad, -3, bound, cause)

    if source.topk_lens is not None and rows:
        lengths = source.topk_lens
        per_length = rows // lengths.size  # one for each row, or one for each batch
        value = lengths.flat[alive // per_length]
        bad = alive[(value < 0) | (value > topk)]
        yield _Meetings(
            f"{prefix}topk_lens",
            lengths,
            elements=bad // per_length,
            rows=bad,
            entries=-2,
            bound=topk + 1,
            cause=f"is outside [0, {topk}]",
        )
    if source.seq_lens is not None:
        longest = source.longest()
        value = source.seq_lens[request[alive]]
        bad = alive[(value < 0) | (value > longest)]
        yield _Meetings(
            f"{prefix}seq_lens",
            source.seq_lens,
            elements=request[bad],
            rows=bad,
            entries=-1,
            bound=longest + 1,
            cause=f"is outside [0, {longest}]",
        )

    if source.indices is not None:
        capacity = num_blocks * block_size
        most = capacity if source.block_table is None else source.longest()
        outside = f"is past the {most} positions of {prefix}block_table"
        for number, bound, cause in (
            (FAULT_INDEX, most, "is negative and not the padding -1"),
            (FAULT_SLOT, capacity, f"is outside the {cache} of {capacity} slots"),
            (FAULT_LOGICAL, most, outside),
        ):
            row, entry = np.nonzero(slots == -number)
            yield _Meetings(
                f"{prefix}indices", source.indices, row * topk + entry, row, entry, bound, cause
            )
    if source.block_table is not None:
        row, entry = np.nonzero(slots == -FAULT_BLOCK)
        position = entry
        if source.indices is not None:
            position = source.local(source.indices.reshape(slots.shape)[row, entry])
        yield _Meetings(
            f"{prefix}block_table",
            source.block_table,
            elements=request[row] * source.block_table.shape[1] + position // block_size,
            rows=row,
            entries=entry,
            bound=num_blocks,
            cause=f"is outside the {cache} of {num_blocks} blocks",
        )


def _geometry(cache: Any) -> tuple[int, int, int]:
    """(num_blocks, block_size, bytes of a row) of a cache that resolve has accepted."""
    if not hasattr(cache, "shape") or not hasattr(cache, "itemsize"):
        cache = _numpy().from_dlpack(cache)
    shape = tuple(cache.shape)
    block_size = shape[1] if len(shape) > 2 else 1
    return int(shape[0]), int(block_size), int(shape[-1]) * int(cache.itemsize)


def _integers(array: Any) -> Any:
    """An integer array of any framework as a NumPy int64 array; None stays None."""
    np = _numpy()
    if array is None:
        return None
    if hasattr(array, "cpu"):  # PyTorch
        array = array.cpu()
    elif hasattr(array, "get"):  # CuPy
        array = array.get()
    if not hasattr(array, "__array__"):
        array = np.from_dlpack(array)
    return np.asarray(array).astype(np.int64, copy=False)


def _spread(counts: Any) -> dict[str, int | float]:
    if not counts.size:
        return {"min": 0, "median": 0, "max": 0}
    median = float(_numpy().median(counts))
    return {"min": int(counts.min()), "median": median, "max": int(counts.max())}


def _span(counts: Any) -> str:
    spread = _spread(counts)
    if spread["min"] == spread["max"]:
        return f"{spread['min']:,}"
    return "{min:,} to {max:,}, median {median:,.10g}".format(**spread)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        message = "check needs NumPy: pip install 'sparse-mla[numpy]'"
        raise ImportError(message, name="numpy") from error
    return numpy
