"""Backups: a folder with a copy of files and databases that are in use, and the way back.

A backup is the folder `current` of its place: the files under their own names, and a manifest with their hashes. The
next one is made beside it, with hard links to what has not changed, and takes its place when it is whole. So an
interrupted backup changes nothing, and one that is restored is checked first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, Self, TypedDict

import msgspec

from flywheel import __version__
from flywheel.errors import LockedError, StoreError
from flywheel.secrets import masked_urls
from flywheel.store.kernel.database import READ_ATTEMPTS, STATE_FILE, copy_database, found_version
from flywheel.system.files import file_sha256, make_private, private, remove, sync, write_json
from flywheel.system.lock import INSTANCE_LOCK, STATE_LOCKS, instance_lock

CURRENT: Final = "current"
NEXT: Final = "next"
PREVIOUS: Final = "previous"
MANIFEST: Final = "manifest.json"
CONFIGURATION: Final = "configuration"
"""Folder of the configuration's files, which a restore leaves to the user."""
ERASURES: Final = "erasures.json"
"""What was erased since the backup, written beside it."""
FOLDERS_NOTE: Final = "backups"
"""Key of the note with the folders of all backups, as JSON."""
RESTORING: Final = ".restoring"
"""Folder in a state directory that is being restored."""

Mark = list[Sequence[int | None] | None]
"""By which it is known whether an original has changed: size in bytes and time of change of a file, the same of the
write-ahead log of a database, and how many bytes were to be copied."""


class _CopiedFile(TypedDict):
    sha256: str
    size: int
    mark: list[Any]


class Manifest(TypedDict):
    """What the manifest of a backup says. The names of files are relative paths."""

    made_at: str
    flywheel: str
    state_dir: str
    left_out: dict[str, str]
    files: dict[str, _CopiedFile]


class Erased(TypedDict):
    """A conversation or user that was erased, by pseudonym, or a recorded call, by its hash, and whether what comes
    of it later is refused."""

    kind: Literal["conversation", "service", "user", "call"]
    pseudonym: str
    blocks: bool


@dataclass(slots=True)
class Backup:
    """A backup that is being made.

    `files` has of each file its hash, its size in bytes and the mark of its original. `copied` are the bytes that
    were written, `left_out` what could not be copied, with the reason.
    """

    folder: Path
    state_dir: Path
    files: dict[str, _CopiedFile] = field(default_factory=dict)
    copied: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    _before: dict[str, _CopiedFile] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def into(cls, folder: Path, state_dir: Path) -> Iterator[Self]:
        """Make a backup in a folder, which takes the place of an earlier one at the end of the context.

        Raises StoreError, also for a folder with anything else, and LockedError during another backup.
        """
        attempted = f"make a backup in {folder}"
        if folder.resolve().is_relative_to(state_dir.resolve()):
            raise StoreError(attempted, "it is in the state directory", "Name a folder elsewhere.")
        if folder.is_dir() and (
            foreign := {each.name for each in folder.iterdir()} - {CURRENT, NEXT, PREVIOUS, INSTANCE_LOCK, ERASURES}
        ):
            why = f"it has other files, such as {min(foreign)}"
            raise StoreError(attempted, why, "Name an empty folder, or that of an earlier backup.")
        try:
            with instance_lock(folder):
                before: dict[str, _CopiedFile] = {}
                if (found := found_in(folder)) is not None:
                    with contextlib.suppress(StoreError):  # a damaged one is replaced as a whole
                        before = _manifest(found.rename(folder / CURRENT), attempted)["files"]
                shutil.rmtree(folder / NEXT, ignore_errors=True)
                make_private(folder / NEXT)
                made = cls(folder, state_dir, _before=before)
                yield made
                made._finish()
        except (OSError, sqlite3.Error) as error:
            hint = "Free some space there, or name another folder; an earlier backup is unchanged."
            name, failure = getattr(error, "filename", None) or folder, getattr(error, "strerror", None) or error
            raise StoreError(attempted, f"{name}: {failure}", hint) from error

    @property
    def copy_of_state(self) -> Path:
        """The directory with the copy of the state's database, once it was added."""
        return self.folder / NEXT

    def add(self, name: str, path: Path, size: int | None = None, *, masks: bool = False) -> None:
        """Copy a file, or its first `size` bytes; with `masks`, without names and passwords in URLs. One that is not
        there any more is left out."""

        def copy(target: Path) -> None:
            if masks:
                target.write_bytes(masked_urls(path.read_bytes()))
                return
            shutil.copyfile(path, target)
            if size is not None:
                os.truncate(target, size)

        self._add(name, (path,), copy, size)

    def add_tree(self, name: str, folder: Path) -> None:
        """Copy all files below a folder."""
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            self.add(f"{name}/{path.relative_to(folder).as_posix()}", path)

    def add_database(self, name: str, path: Path) -> None:
        """Copy an SQLite database as it is at one moment, beside a process that writes it."""
        self._add(name, (path, path.with_name(f"{path.name}-wal")), partial(_dump, path))

    def _add(
        self, name: str, originals: Sequence[Path], copy: Callable[[Path], object], size: int | None = None
    ) -> None:
        """Copy a file, the first of the `originals`, which is known to be unchanged if all of them are."""
        target, before = self.folder / NEXT / name, self._before.get(name)
        make_private(target.parent)
        try:
            mark = [*_mark(*originals), [size]]
            if before is not None and before["mark"] == mark:
                with contextlib.suppress(OSError):  # not every file system has hard links
                    os.link(self.folder / CURRENT / name, target)
                    self.files[name] = before
                    return
            os.close(private(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            copy(target)
        except FileNotFoundError:
            target.unlink(missing_ok=True)
            self.left_out[name] = "it was removed meanwhile"
            return
        sync(target)
        length = target.stat().st_size
        self.files[name] = {"sha256": file_sha256(target), "size": length, "mark": mark}
        self.copied += length

    def _finish(self) -> None:
        new, current, previous = (self.folder / name for name in (NEXT, CURRENT, PREVIOUS))
        manifest: Manifest = {
            "made_at": datetime.now(UTC).isoformat(),
            "flywheel": __version__,
            "state_dir": str(self.state_dir),
            "left_out": self.left_out,
            "files": self.files,
        }
        write_json(new / MANIFEST, manifest, mode=0o600)
        for folder in {new, *(path.parent for path in new.rglob("*"))}:
            sync(folder)
        if current.is_dir():
            shutil.rmtree(previous, ignore_errors=True)
            current.rename(previous)
        new.rename(current)
        sync(self.folder)
        shutil.rmtree(previous, ignore_errors=True)


def tell(folders: Sequence[str], erasures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write beside each backup what was erased, so that a restore does not bring it back; the folders that cannot be
    written, or have no backup any more."""
    unreached = []
    for name in folders:
        folder = Path(name)
        try:
            if found_in(folder) is None:
                raise FileNotFoundError
            write_json(folder / ERASURES, list(erasures), mode=0o600)
            with contextlib.suppress(LockedError), instance_lock(folder):
                # Of one that was interrupted: nobody restores it.
                shutil.rmtree(folder / NEXT, ignore_errors=True)
        except OSError:
            unreached.append(name)
    return unreached


def erased_since(folder: Path) -> list[Erased]:
    """What was written beside a backup by `tell`. Raises StoreError."""
    path = folder / ERASURES
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Erased])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        why = f"it is damaged or cannot be read ({error})"
        hint = "Texts erased since the backup would come back. Repair the file, or move it away to accept that."
        raise StoreError(f"read {path}", why, hint) from error


def found_in(folder: Path) -> Path | None:
    """The whole backup in a folder, if there is one."""
    # The second, if a backup was interrupted between the two renamings at its end.
    return next((folder / name for name in (CURRENT, PREVIOUS) if (folder / name).is_dir()), None)


def restore(folder: Path, state_dir: Path) -> tuple[Path, Manifest]:
    """Put the backup in a folder into an empty state directory; where it is, and its manifest.

    Nothing is in its place before all files are known to be whole. An interrupted restore is done again by the next.
    No link is followed below the state directory, which may be one itself. Raises StoreError, also for a damaged
    backup or one of another state directory, and LockedError.
    """
    attempted = f"restore the backup in {folder}"
    try:
        if (found := found_in(folder)) is None:
            raise StoreError(attempted, "there is none", "Name the folder that was given to `flywheel backup`.")
        manifest = _manifest(found, attempted)
        if os.path.realpath(made_of := manifest["state_dir"]) != os.path.realpath(state_dir):
            why = f"it is of the state {made_of}, whose paths are in it, and the configuration has {state_dir}"
            raise StoreError(attempted, why, "Set state.dir to that path, or make that path a symbolic link.")
        erased, staging = erased_since(folder), state_dir / RESTORING
        if link := next((each for each in state_dir.glob("*") if each.is_symlink()), None):
            raise StoreError(attempted, f"{link} is a symbolic link", "Move it away: nothing is written over links.")
        with instance_lock(state_dir):
            others = {each.name for each in state_dir.iterdir()} - STATE_LOCKS - {RESTORING}
            if STATE_FILE in others or (others and not staging.is_dir()):
                why = f"the state directory {state_dir} is not empty: it has {min(others)}"
                raise StoreError(attempted, why, "Stop the daemon and the servers, and move the directory away.")
            make_private(staging)
            _empty(staging)
            _stage(found, manifest, staging, attempted)
            if erased:
                # It is in its place before the state is.
                write_json(staging / ERASURES, erased, mode=0o600)
            found_version(staging)
            for path in sorted(staging.iterdir(), key=lambda each: each.name == STATE_FILE):
                if (target := state_dir / path.name).is_dir():
                    remove(target)
                path.rename(target)
            sync(state_dir)
            staging.rmdir()
    except OSError as error:
        why = f"{error.filename or state_dir}: {error.strerror or error}"
        raise StoreError(attempted, why, "Mend that, and restore again.") from error
    return found, manifest


def _manifest(found: Path, attempted: str) -> Manifest:
    try:
        read = msgspec.json.decode((found / MANIFEST).read_bytes(), type=Manifest)
        for name in read["files"]:
            path = PurePosixPath(name)
            is_own = path.parts[:1] and path.parts[0] not in {*STATE_LOCKS, ERASURES, RESTORING}
            is_below = str(path) == name and not path.is_absolute() and ".." not in path.parts
            if not (is_own and is_below and (found / path).resolve().is_relative_to(found.resolve())):
                raise ValueError(f"{name!r} is no name of a file in it")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        why = f"its {MANIFEST} is damaged or missing ({error})"
        raise StoreError(attempted, why, "Restore another backup.") from error
    return read


def _stage(found: Path, manifest: Manifest, staging: Path, attempted: str) -> None:
    """Copy the files of the state to `staging`. Raises StoreError with those that are not as they were written."""
    damaged = []
    for name, about in manifest["files"].items():
        if name.startswith(f"{CONFIGURATION}/"):
            continue
        target = staging / name
        make_private(target.parent)
        os.close(private(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(found / name, target)
        sync(target)
        if file_sha256(target) != about["sha256"]:
            damaged.append(name)
    for folder in {staging, *(path.parent for path in staging.rglob("*"))}:
        sync(folder)
    if damaged:
        _empty(staging)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        why = f"{found / damaged[0]}{more} is missing or not as it was written"
        raise StoreError(attempted, why, "Restore another backup; nothing was changed.")


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        remove(each)


def _mark(path: Path, *beside: Path) -> Mark:
    """Raises FileNotFoundError for `path` alone."""
    found: Mark = [[(about := path.stat()).st_size, about.st_mtime_ns]]
    for each in beside:
        try:
            found.append([(about := each.stat()).st_size, about.st_mtime_ns])
        except FileNotFoundError:
            found.append(None)
    return found


def _dump(path: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(target)) as connection:
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                copy_database(path, connection)
                break
            except StoreError as error:
                # A process began or ended to write it meanwhile.
                if not error.retryable or attempt == READ_ATTEMPTS:
                    raise
    with contextlib.closing(sqlite3.connect(f"{target.absolute().as_uri()}?immutable=1", uri=True)) as connection:
        if (said := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            why = f"SQLite finds it damaged: {said}"
            raise StoreError(f"copy the database {path}", why, "Restore it from an earlier backup.")
