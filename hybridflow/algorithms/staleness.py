"""How old the weights are that sampled a batch, counted in versions."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.batch import Ragged

_SHOWN = 5


class StaleSamples(RuntimeError):
    """Samples come from weights that are older than the recipe allows, or unknown."""


def oldest_versions(versions: Ragged, current: int) -> Tensor:
    """``[samples]`` int64: the oldest version that made a token of each response.

    Args:
        versions: the version that sampled each response token, int64.
        current: the trainer's version, which a response without tokens counts as.
    """
    oldest = torch.full((len(versions),), current, dtype=torch.int64)
    rows = torch.repeat_interleave(versions.lengths)
    return oldest.scatter_reduce(0, rows, versions.values.long(), "amin")


def staleness(versions: Ragged, current: int) -> Tensor:
    """``[samples]`` int64: by how many versions the oldest token of each response is behind."""
    return current - oldest_versions(versions, current)


def staleness_metrics(versions: Ragged, current: int) -> dict[str, float]:
    """Mean and maximum over samples, and the share of tokens of older versions."""
    behind = staleness(versions, current).double()
    older_T = (versions.values < current).double()
    return {
        "staleness_mean": behind.mean().item() if len(behind) else 0.0,
        "staleness_max": behind.max().item() if len(behind) else 0.0,
        "stale_tokens": older_T.mean().item() if len(older_T) else 0.0,
    }


def require(versions: Ragged, current: int, staleness_max: int) -> None:
    """StaleSamples unless every token was sampled at most ``staleness_max`` versions ago.

    A version that is newer than ``current`` is refused too: the trainer has not made it.
    """
    behind = staleness(versions, current)
    ahead_T = versions.values > current
    rows = torch.repeat_interleave(versions.lengths)
    wrong = sorted(
        {*torch.nonzero(behind > staleness_max).flatten().tolist()} | {*rows[ahead_T].tolist()}
    )
    if not wrong:
        return
    shown = "; ".join(
        f"sample {sample}: {', '.join(map(str, versions[sample].unique().tolist()))}"
        for sample in wrong[:_SHOWN]
    )
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise StaleSamples(
        f"{len(wrong)} of {len(versions)} samples are of other weight versions than the trainer's "
        f"{current} and at most {staleness_max} before it ({shown}{more}). Raise "
        "roles.rollout.max_staleness, or look for a server that was left behind."
    )
