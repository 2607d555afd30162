"""Chains: a full checkpoint and the incremental ones that build on it; found, verified, copied and pruned together."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

from pyarrow import fs

from deeprec_spark.checkpoint.directory import (
    FOLDER,
    MANIFEST,
    Listing,
    check_files,
    commit,
    cut_short,
    delete,
    find,
    model_dir_of,
    read_manifest,
    scan,
)
from deeprec_spark.checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from deeprec_spark.checkpoint.manifest import Manifest
from deeprec_spark.embedding.filesystem import (
    join,
    list_folders,
    make_directory,
    parent,
    redacted,
    renames,
    resolve,
)
from deeprec_spark.embedding.table_chain import TableChain

logger = logging.getLogger(__name__)

BASES = "bases"
"""Below the copy of an incremental checkpoint: what it builds on."""

_BROKEN = (CheckpointCorruptError, CheckpointNotFoundError)


def chain(path: str, *, verify: bool = True, fallback: bool = False) -> list[str]:
    """The directories to restore from: a full checkpoint, then incremental ones in order, the newest last.

    Args:
        path: A checkpoint's directory, or a model directory, whose newest checkpoint is taken.
        verify: Read all files and compare checksums; without it only their sizes are compared.
        fallback: Where the newest state cannot be had, take the last one that can, and warn which that is.

    Raises:
        CheckpointNotFoundError: No committed checkpoint.
        CheckpointCorruptError: A file of the chain is damaged or missing; names it. With `fallback`: of every chain.

    Example:
        >>> chain("/models/ctr")  # doctest: +SKIP
        ['/models/ctr/checkpoints/000000002000', '/models/ctr/checkpoints/000000002500']
    """
    checked: dict[str, Manifest] = {}
    newest = path
    broken: CheckpointCorruptError | CheckpointNotFoundError
    try:
        newest = find(path)
        return _verified(newest, verify, checked)
    except CheckpointCorruptError as error:
        if not fallback:
            raise
        broken = error
    except CheckpointNotFoundError as error:
        if not fallback:
            raise
        broken = error
    for directory in _earlier(newest):
        try:
            good = _verified(directory, verify, checked)
        except _BROKEN as error:
            logger.warning("Not restorable either: %s", error)
            continue
        logger.warning(
            "The newest checkpoint of %s cannot be restored (%s): going back to %s",
            redacted(path),
            broken,
            redacted(directory),
        )
        return good
    raise broken


def load_chain(path: str, *, verify: bool = False) -> list[tuple[str, Manifest]]:
    """The directories of `chain` with their manifests."""
    return [(directory, read_manifest(directory)) for directory in chain(path, verify=verify)]


def table_chain(found: Sequence[tuple[str, Manifest]], table: str) -> TableChain:
    """A table out of what `load_chain` found: the files that the manifests name, and no others."""
    files = [[file.path for file in manifest.files] for _, manifest in found]
    return TableChain([directory for directory, _ in found], table, files)


def base_of(directory: str, manifest: Manifest) -> str | None:
    """The directory that an incremental checkpoint builds on; None for a full one.

    Raises:
        CheckpointCorruptError: It is not there, or another one took its place.
    """
    if manifest.base is None:
        return None
    candidates = [join(directory, BASES, manifest.base), join(parent(directory)[0], manifest.base)]
    for candidate in candidates:
        filesystem, root = resolve(candidate)
        if filesystem.get_file_info(f"{root}/{MANIFEST}").type != fs.FileType.File:
            continue
        found = read_manifest(candidate)
        if found.save_id != manifest.base_id:
            raise CheckpointCorruptError(
                "An incremental checkpoint builds on one that another has replaced: "
                f"{manifest.base_id!r} is gone. Received: {redacted(directory)} on {redacted(candidate)} "
                f"({found.save_id!r})"
            )
        return candidate
    raise CheckpointCorruptError(
        "A checkpoint that an incremental one builds on is missing. "
        f"Received: {redacted(join(candidates[-1], MANIFEST))}, needed by {redacted(directory)}"
    )


def prune(model_dir: str, keep_max: int, *, keep: str | None = None) -> list[int]:
    """Delete all but the last `keep_max` full checkpoints that were committed, and the incremental ones built on those.

    Saves cut short below the last one go too. One whose manifest is damaged, or that of what it builds on, stays and
    does not count: a warning names it. Where one cannot be read, nothing is deleted.

    Args:
        model_dir: Where they lie below.
        keep_max: How many stay.
        keep: The directory of one that stays, with what it builds on, wherever it is in the order.

    Returns:
        The steps deleted.
    """
    if keep_max < 1:
        raise ValueError(f"keep_max must be at least 1. Received: keep_max={keep_max}")
    found = scan(model_dir)
    committed = found.entries
    for error in found.damaged.values():
        logger.warning("A damaged checkpoint is not deleted: %s", error)
    if not committed:
        return []
    roots: dict[str, str | None] = {}
    for entry in committed:
        try:
            roots[entry.name] = parent(walk(entry.directory)[-1][0])[1]
        except CheckpointCorruptError as error:  # noqa: PERF203  # each is looked at
            logger.warning("A broken checkpoint is not deleted: %s", error)
            roots[entry.name] = None
        except CheckpointNotFoundError as error:
            logger.warning("Nothing is deleted, for a checkpoint cannot be read: %s", error)
            return []
    # By their newest members, not their first: who goes on from an older one has that as the last chain.
    order = list(dict.fromkeys(roots[entry.name] for entry in reversed(committed)))
    kept = [root for root in order if root is not None][:keep_max]
    if keep is not None and (own := roots.get(parent(keep)[1])) is not None:
        kept.append(own)
    needed = {name for name, root in roots.items() if root is None or root in kept}
    filesystem, root = resolve(join(model_dir, FOLDER))
    # Newest first: what is left of a deletion cut short still has all that it builds on.
    doomed = [entry.name for entry in reversed(committed) if entry.name not in needed]
    # What is uncommitted and above the last commit may be a save in progress.
    doomed += [name for name in cut_short(model_dir) if int(name[:12]) < committed[-1].step]
    for name in doomed:
        delete(filesystem, f"{root}/{name}")
        logger.info("Deleted checkpoint %s of %s", name, redacted(model_dir))
    return sorted(int(name[:12]) for name in doomed)


def copy(source: str, target: str, *, overwrite: bool = False) -> str:
    """Copy a checkpoint with what it builds on, its manifest last, to another directory; both may be paths or URIs.

    With `overwrite` the checkpoint at `target` goes once the copy is whole; a copy onto itself does nothing.

    Raises:
        CheckpointNotFoundError: `source` is no checkpoint.
        CheckpointCorruptError: A file of it, or of what it builds on, is missing or has another size.
        FileExistsError: Something is at `target`, and it is no checkpoint or `overwrite` is not set.
        ValueError: `source` builds on, or lies in, what it would replace.
    """
    directories = chain(source, verify=False)
    filesystem, path = resolve(target)
    if filesystem.get_file_info(path).type == fs.FileType.NotFound:
        _copy_chain(directories, target)
        return target
    committed = filesystem.get_file_info(f"{path}/{MANIFEST}").type == fs.FileType.File
    if not overwrite or not committed:
        reason = "set overwrite" if committed else "it is no checkpoint, and is left alone"
        raise FileExistsError(f"The target of the copy exists: {reason}. Received: {redacted(target)!r}")
    if _inside(directories[-1], target) == "":
        return target
    for directory in directories:
        if _inside(directory, target) is not None:
            raise ValueError(
                "A copy would replace what it is a copy of. "
                f"Received: {redacted(source)!r}, which needs {redacted(directory)!r}, and {redacted(target)!r}"
            )
    _replace(directories, target)
    return target


def _replace(directories: Sequence[str], target: str) -> None:
    """Copy over a checkpoint, which lies at its place or, whole, beside it until the new one is there.

    The copy is made beside it first. Where renames are one step two of them swap the two; object stores copy.
    """
    folder, name = parent(target)
    token = uuid.uuid4().hex[:16]
    new, old = (join(folder, f".{name}.{token}.{kind}") for kind in ("new", "old"))
    filesystem, path = resolve(target)
    (_, new_path), (_, old_path) = resolve(new), resolve(old)
    try:
        _copy_chain(directories, new)
    except BaseException:
        _discard(filesystem, new_path)
        raise
    if renames(filesystem):
        filesystem.move(path, old_path)
        try:
            filesystem.move(new_path, path)
        except BaseException:
            filesystem.move(old_path, path)
            raise
    else:
        try:
            _copy_tree(filesystem, path, old_path)
        except BaseException:
            _discard(filesystem, new_path)
            _discard(filesystem, old_path)
            raise
        try:
            delete(filesystem, path)
            _copy_tree(filesystem, new_path, path)
        except BaseException:
            logger.exception(
                "A copy broke off. The checkpoint that it was to replace is %s, the new one %s",
                redacted(old),
                redacted(new),
            )
            raise
        _discard(filesystem, new_path)
    _discard(filesystem, old_path)


def _discard(filesystem: Any, path: str) -> None:
    """Delete what a copy needs no more; it is only in the way if that fails."""
    try:
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            delete(filesystem, path)
    except OSError as error:
        logger.warning("What a copy has left cannot be deleted: %s: %s", path, error)


def _copy_tree(filesystem: Any, source: str, target: str) -> None:
    """Copy all files below a folder, the manifest at its top last."""
    found = filesystem.get_file_info(fs.FileSelector(source, recursive=True))
    names = [info.path[len(source) + 1 :] for info in found if info.type == fs.FileType.File]
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        filesystem.copy_file(f"{source}/{name}", f"{target}/{name}")


def _inside(directory: str, folder: str) -> str | None:
    """The path below a folder: empty for itself, None where it is elsewhere."""
    (one, path), (other, above) = resolve(directory), resolve(folder)
    if one.type_name != other.type_name or not one.equals(other):
        return None
    if isinstance(one, fs.LocalFileSystem):
        path, above = os.path.realpath(path), os.path.realpath(above)
    return path[len(above) + 1 :] if f"{path}/".startswith(f"{above}/") else None


def _copy_chain(directories: Sequence[str], target: str) -> None:
    for directory in directories[:-1]:
        _copy_one(directory, join(target, BASES, parent(directory)[1]))
    _copy_one(directories[-1], target)


def _copy_one(source: str, target: str) -> None:
    manifest = read_manifest(source)
    origin, root = resolve(source)
    filesystem, path = resolve(target)
    for file in manifest.files:
        place = f"{path}/{file.path}"
        make_directory(filesystem, place.rpartition("/")[0])
        fs.copy_files(
            f"{root}/{file.path}", place, source_filesystem=origin, destination_filesystem=filesystem
        )
    commit(target, manifest)


def walk(directory: str) -> list[tuple[str, Manifest]]:
    """The chain of a checkpoint by its manifests, newest first."""
    found: list[tuple[str, Manifest]] = []
    place: str | None = directory
    while place is not None:
        manifest = read_manifest(place)
        if any(place == seen for seen, _ in found):
            raise CheckpointCorruptError(
                f"Checkpoints build on each other in a circle. Received: {redacted(place)}"
            )
        found.append((place, manifest))
        place = base_of(place, manifest)
    return found


def _verified(directory: str, verify: bool, checked: dict[str, Manifest]) -> list[str]:
    found = walk(directory)[::-1]
    for place, manifest in found:
        if checked.get(place) != manifest:
            check_files(place, manifest.files, checksums=verify)
            checked[place] = manifest
    return [place for place, _ in found]


def _earlier(directory: str) -> Sequence[str]:
    """Checkpoints committed before one, newest first; for a copy elsewhere, those it was built on."""
    model_dir = model_dir_of(directory)
    if model_dir is None:
        listing = scan(directory)
        if listing.entries or listing.damaged:
            return _whole(listing)
        folder = join(directory, BASES)
        filesystem, root = resolve(folder)
        return sorted((join(folder, name) for name in list_folders(filesystem, root)), reverse=True)
    return _whole(scan(model_dir), parent(directory)[1])


def _whole(found: Listing, before: str | None = None) -> list[str]:
    """Those of a listing that are older than one, newest first; all where its place in the order is unknown."""
    for error in found.damaged.values():
        logger.warning("A damaged checkpoint is passed over: %s", error)
    names = [entry.name for entry in found.entries]
    position = names.index(before) if before in names else len(names)
    return [entry.directory for entry in reversed(found.entries[:position])]
