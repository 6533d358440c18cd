"""What a row on the wire consists of: the hidden state, and side columns next to it.

A row is a number of elements of the row dtype. Side columns carry values of another dtype (the weights and numbers of
the experts that a router chose) bit for bit, so ``k`` values of four bytes take ``2 * k`` columns of a two-byte dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def columns_for(values: int, itemsize: int, row_itemsize: int) -> int:
    """Columns of ``row_itemsize`` bytes that ``values`` values of ``itemsize`` bytes take.

    Raises ``ValueError`` when they do not fill whole columns.
    """
    columns, rest = divmod(values * itemsize, row_itemsize)
    if rest:
        raise ValueError(f"{values} values of {itemsize} bytes fill no whole columns of {row_itemsize} bytes")
    return columns


def width_of(rows: torch.Tensor, side: Sequence[torch.Tensor]) -> int:
    """Columns of ``rows`` ``[tokens, hidden]`` with ``side`` (each ``[tokens, values]``) next to them."""
    itemsize = rows.element_size()
    return rows.shape[1] + sum(columns_for(part.shape[1], part.element_size(), itemsize) for part in side)


def put(area: torch.Tensor, rows: torch.Tensor, side: Sequence[torch.Tensor]) -> None:
    """Write ``rows`` and ``side`` to ``area`` ``[tokens, width_of(rows, side)]`` of the dtype of ``rows``."""
    if not side:
        area.copy_(rows)
        return
    start = rows.shape[1]
    area[:, :start].copy_(rows)
    for part in side:
        end = start + columns_for(part.shape[1], part.element_size(), area.element_size())
        area[:, start:end].view(part.dtype).copy_(part)
        start = end


def joined(rows: torch.Tensor, side: Sequence[torch.Tensor]) -> torch.Tensor:
    """``rows`` with ``side`` next to them as one contiguous tensor; ``rows`` itself where there is no ``side``."""
    if not side:
        return rows.contiguous()
    area = torch.empty((rows.shape[0], width_of(rows, side)), dtype=rows.dtype, device=rows.device)
    put(area, rows, side)
    return area


def split(request: torch.Tensor, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the ``hidden`` first columns of ``request``, and of the side columns behind them as ``dtype``.

    Both have the strides of a new tensor, also where there is one row: kernels and compiled code look at them.
    """
    rows = request[:, :hidden].clone(memory_format=torch.contiguous_format)
    side = request[:, hidden:].clone(memory_format=torch.contiguous_format)
    return rows, side.view(dtype)
