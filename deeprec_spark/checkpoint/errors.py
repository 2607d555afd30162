"""What can be wrong with a checkpoint; each is a ValueError or an OSError, so callers may catch those too."""

from __future__ import annotations


class CheckpointNotFoundError(FileNotFoundError):
    """There is no committed checkpoint at the path, or the path cannot be read."""


class CheckpointCorruptError(ValueError):
    """A file of the checkpoint is missing or differs from what the manifest says; the message names it."""


class CheckpointMismatchError(ValueError):
    """The checkpoint belongs to another model; the message names both sides."""
