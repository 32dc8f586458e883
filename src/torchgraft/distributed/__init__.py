"""Programs in several processes: cut into stages of a pipeline that torch.distributed runs.
Nothing here talks to another process by itself; torch.distributed and its pipelining do.
"""

from __future__ import annotations

from torchgraft.distributed.pipeline import Pipeline, Stage, pipeline

__all__ = ["Pipeline", "Stage", "pipeline"]
