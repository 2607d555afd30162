"""OutputFolder: files that are written locally and appear in a folder anywhere."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from deeprec_spark.embedding.filesystem import is_local, join, make_directory, open_output, resolve


class OutputFolder:
    """A folder by path or URI, and the local one where its files are written.

    Where the folder is not local, `publish` copies what has changed since the last time.

    Example:
        >>> output = OutputFolder("s3://bucket/model/tracing")  # doctest: +SKIP
        >>> (output.local / "trace.json").write_text("{}")  # doctest: +SKIP
        >>> output.publish()  # doctest: +SKIP
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._is_local = is_local(location)
        self.local = Path(
            resolve(location)[1] if self._is_local else tempfile.mkdtemp(prefix="deeprec-tracing-")
        )
        self.local.mkdir(parents=True, exist_ok=True)
        self._published: dict[Path, tuple[int, int]] = {}

    def publish(self) -> None:
        """Bring the files to their folder; an OSError where that fails."""
        if self._is_local:
            return
        for file in sorted(path for path in self.local.rglob("*") if path.is_file()):
            status = file.stat()
            state = (status.st_size, status.st_mtime_ns)
            if self._published.get(file) == state:
                continue
            name = file.relative_to(self.local)
            filesystem, path = resolve(join(self.location, *name.parts))
            make_directory(filesystem, path.rpartition("/")[0])
            with open_output(filesystem, path) as stream:
                stream.write(file.read_bytes())
            self._published[file] = state

    def close(self) -> None:
        """`publish`, and remove the local copy of a folder that is elsewhere, also where it could not be published."""
        try:
            self.publish()
        finally:
            if not self._is_local:
                shutil.rmtree(self.local)
