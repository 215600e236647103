"""Where the rows of a captured decode step stand, from their positions: in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Places(NamedTuple):
    """Attributes are of B rows, each of a sequence of its own or of several tokens of one."""

    active: torch.Tensor  # [B] bool: a sequence uses the row
    position: torch.Tensor  # [B] int32: an unused row sees one key, whatever it is
    place: torch.Tensor  # [B] int64: page * page_tokens + offset, where the row's KV goes


def places(
    position: torch.Tensor,  # [B] int64, -1: not in use
    page_table: torch.Tensor,  # [B, M] int32
    page_tokens: int,
    scratch_page: int,  # of rows that are not in use
) -> Places:
    active = position >= 0
    at = position.clamp(min=0)
    page = page_table.gather(1, (at // page_tokens)[:, None])[:, 0].long()
    page = torch.where(active, page, scratch_page)
    return Places(active, at.to(torch.int32), page * page_tokens + at % page_tokens)
