"""slime trains on the batches of a policy through three of its import paths, without a change of slime.

`generate_rollout` leases a batch and acks it instead of generating, `convert` hands slime the advantages and loss
weights of the batch, and `DataSource` resumes and reports checkpoints. miles has the same hooks.
`docs/python-slime.md` of the repository has the command.

slime calls all of them in one process, its rollout manager, and one after the other.
"""

from __future__ import annotations

from ._convert import convert
from ._hooks import DataSource, generate_rollout
from ._post import post_sample

__all__ = ["DataSource", "convert", "generate_rollout", "post_sample"]
