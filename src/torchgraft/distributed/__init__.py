"""Programs in several processes: cut into stages of a pipeline that torch.distributed runs.
Nothing here talks to another process by itself; torch.distributed and its pipelining do.
"""

from __future__ import annotations

from torchgraft.distributed.local import Trial, try_pipeline
from torchgraft.distributed.pipeline import Pipeline, pipeline
from torchgraft.distributed.running import Run
from torchgraft.distributed.stage import Stage

__all__ = ["Pipeline", "Run", "Stage", "Trial", "pipeline", "try_pipeline"]
