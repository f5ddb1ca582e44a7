"""Moments of a sharded run on disk: each rank writes its own part, through torch.distributed.checkpoint.

    optimizer-00001-of-00002.safetensors    rank 0's part of every moment, and the step
    optimizer-00002-of-00002.safetensors    rank 1's

What this is: the writing side. The files are safetensors, torch's own form for that (a file says where each of its tensors begins in the
whole one), so that nothing of a checkpoint is a pickle, and any engine reads them (``formats/parts.py``).
What this is not: the rest of a checkpoint, which rank 0 writes alone (``runs/checkpoint.py``).
"""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from posttrainllm.pytorch.distributed_group import Group

_SHARD = re.compile(r"shard-(\d{5})-model-00001-of-00001\.safetensors")


def write_shards(folder: Path, tensors: Mapping[str, DTensor], group: Group) -> None:
    """Write this rank's part of every tensor into a folder that all ranks see; every rank takes part.

    Raises: OSError on every rank when one could not write.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own use of its older names
            save(
                dict(tensors),
                storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
                process_group=group.commands,
            )
    except CheckpointException as error:
        raise _first_failure(error) from None
    if group.ranks.leads:
        for path in sorted(folder.iterdir()):
            if match := _SHARD.fullmatch(path.name):
                number = int(match.group(1))
                path.rename(
                    folder / f"optimizer-{number:05d}-of-{group.ranks.count:05d}.safetensors"
                )


def _first_failure(error: CheckpointException) -> OSError:
    """What the first rank that failed said, as an error of the disk."""
    rank, (reason, _) = min(error.failures.items())
    number = reason.errno if isinstance(reason, OSError) and reason.errno else errno.EIO
    return OSError(number, f"rank {rank}: {reason}")
