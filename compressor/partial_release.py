"""DEST.partial: a release on its way, which takes its name DEST only when it is whole and verified.

`state.json` says which digest each file must get, so that a file is only ever continued with bytes of the same content;
`release/` is the tree that becomes DEST by one rename; `lock` keeps a second pull out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from memopt.compressor.checkpoint.disk_errors import disk_errors
from memopt.errors import DiskFullError, InterruptedRunError, MalformedError, MissingFileError, OutputError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.strict_json import parse_json_object, read_capped

_STATE_FORMAT = "memopt.pull/1"
_MAX_STATE_SIZE_BYTES = 256 * 2**20


class PartialRelease:
    """The folder beside `dest` that a pull works in; use it inside `locked()`."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.root = dest.with_name(dest.name + ".partial")
        self.tree = self.root / "release"
        self._state = self.root / "state.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other pulls to the same place out; OutputError if one is running.

        Ctrl-C inside becomes InterruptedRunError.
        """
        check_dest(self.dest)
        with disk_errors(f"cannot use {self.root}"):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise OutputError(f"{self.root} is a link, somebody else's, or open to others", remedy="remove it")
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                if problem.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                    raise OutputError(
                        f"another pull is writing to {self.root}", remedy="wait for it, or name another DEST"
                    ) from None
                # A file system without locks: nobody is kept out, and the digests show what two writers spoil.
            try:
                yield
            except KeyboardInterrupt:
                raise InterruptedRunError(
                    f"stopped; what came so far is kept in {self.root}", remedy="run the same command again"
                ) from None
            finally:
                if not self.tree.exists():
                    # Finished, or refused before anything worth keeping came.
                    shutil.rmtree(self.root, ignore_errors=True)
        finally:
            os.close(descriptor)

    def expect(self, digests: Mapping[str, str]) -> None:
        """Keep what an earlier run brought of files with these digests (hex), remove everything else."""
        with disk_errors(f"cannot use {self.root}"):
            if self.tree.is_symlink():
                self.tree.unlink()
            self.tree.mkdir(exist_ok=True)
            earlier = self._read_state()
            for folder, folders, names in os.walk(self.tree, topdown=False):
                for path in (Path(folder, name) for name in (*folders, *names)):
                    name = path.relative_to(self.tree).as_posix()
                    is_ours = path.is_file() and name in digests and digests[name] == earlier.get(name)
                    # A link to a folder would lead the download out of the tree.
                    if path.is_symlink() or not (is_ours or path.is_dir()):
                        path.unlink(missing_ok=True)
                with suppress(OSError):
                    # Goes if nothing is left in it.
                    os.rmdir(folder)
            self.tree.mkdir(exist_ok=True)
            for parent in sorted({(self.tree / name).parent for name in digests}):
                parent.mkdir(parents=True, exist_ok=True)
            new = self._state.with_suffix(".new")
            new.write_text(json.dumps({"format": _STATE_FORMAT, "digests": dict(digests)}))
            new.replace(self._state)

    def path(self, name: str) -> Path:
        """Where the file `name`, a checked name, lies until the end."""
        return self.tree / name

    def check_space(self, sizes: Mapping[str, int]) -> None:
        """DiskFullError unless what is still missing of files of these sizes (bytes) fits."""
        needed = 0
        for name, size in sizes.items():
            path = self.path(name)
            needed += size - min(size, path.stat().st_size if path.exists() else 0)
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise DiskFullError(
                f"{needed:,} bytes ({needed / 2**30:.1f} GiB) are still to download, {self.root} has {free:,} free",
                remedy="free some space, then run the same command again",
            )

    def remove(self, name: str) -> None:
        """Forget a file whose content is wrong, so that the next run fetches it anew."""
        with suppress(OSError):
            self.path(name).unlink()

    def finish(self) -> None:
        """Give the verified tree its name, in one step; OutputError if DEST is taken meanwhile."""
        with disk_errors(f"cannot finish {self.dest}"):
            try:
                os.rename(self.tree, self.dest)
            except OSError as problem:
                if problem.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise OutputError(f"{self.dest} was made meanwhile", remedy="name another DEST") from None
                raise
            sync(self.dest.parent)

    def _read_state(self) -> dict[str, str]:
        """The digests that the files on disk were fetched for; nothing if the state is damaged."""
        try:
            table = parse_json_object(
                read_capped(self._state, _MAX_STATE_SIZE_BYTES, MalformedError), self._state.name, MalformedError
            )
        except (MalformedError, MissingFileError):
            return {}
        digests = table.get("digests")
        if table.get("format") != _STATE_FORMAT or not isinstance(digests, dict):
            return {}
        return {name: digest for name, digest in digests.items() if is_hex_digest(digest)}


def check_dest(dest: Path) -> None:
    """OutputError unless `dest` is free: absent, or an empty folder."""
    with disk_errors(f"cannot use {dest}"):
        if not os.path.lexists(dest):
            return
        if dest.is_symlink() or not dest.is_dir():
            raise OutputError(f"{dest} is there and is no folder", remedy="name a new folder")
        if any(dest.iterdir()):
            raise OutputError(
                f"{dest} is not empty", remedy="name a new folder; `memopt verify` checks what is there already"
            )


def sync(path: Path) -> None:
    """Bring a file or folder to the disk, so that a power cut cannot leave a named release with holes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
