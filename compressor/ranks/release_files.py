"""Which small files of a release come along when it is sharded or merged, and which are about itself alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.small_files import (
    CODE_SUFFIX,
    FOLDER_MARK,
    SourceFile,
    is_made_anew,
    is_of_repository,
    sort_small_files,
)
from memopt.compressor.metadata_files import list_folder
from memopt.compressor.output_folder import MOUNT_ROOT_FOLDER, STATE_FOLDER
from memopt.errors import LayoutError
from memopt.manifests.file_roles import QUALITY_NAMES
from memopt.manifests.rank_folders import parse_layout


@dataclass(frozen=True)
class ReleaseFiles:
    """Names, sorted. `copied`: byte for byte. `left_behind`: what is about the release alone, or was never signed."""

    copied: tuple[str, ...]
    left_behind: tuple[str, ...]


def sort_release_files(
    folder: Path, *, weights: Collection[str], code_files: object, signed_names: frozenset[str] | None
) -> ReleaseFiles:
    """Sort what lies beside the `weights` at the top of a release; what memopt makes anew is in neither list.

    `code_files`: the `.py` files that its release.json lists. `signed_names`: of a release that was verified: nobody
    vouches for what else its policy lets lie there. LayoutError for a file that nothing of memopt put there, and for a
    release that is not finished.
    """
    listed = list_folder(folder)
    unsigned = {file.name for file in listed if signed_names is not None and not _is_signed(file, signed_names)}
    left_behind = [name for name in unsigned if not is_made_anew(name)]
    listed = tuple(file for file in listed if file.name not in unsigned)
    copied, skipped = sort_small_files(listed, weights=weights, allow_code=True)
    allowed_code = code_files if isinstance(code_files, list) else []
    odd = [file.name for file in copied if file.name.endswith(CODE_SUFFIX) and file.name not in allowed_code]
    left_behind += [file.name for file in listed if file.name in QUALITY_NAMES]
    for skip in skipped:
        name = skip.name.removesuffix(FOLDER_MARK)
        if name == STATE_FOLDER:
            raise LayoutError(
                "is the state of a run that has not finished this release",
                file=skip.name,
                remedy="run its command again, then this one",
            )
        if is_of_repository(skip.name):
            left_behind.append(skip.name)
        elif parse_layout(name) is None and name != MOUNT_ROOT_FOLDER:
            odd.append(skip.name)
    if odd:
        raise LayoutError(
            "lies in the release, but nothing of memopt made it", file=odd[0], remedy=f"move it out of {folder}"
        )
    return ReleaseFiles(tuple(file.name for file in copied), tuple(sorted(left_behind)))


def _is_signed(file: SourceFile, signed_names: frozenset[str]) -> bool:
    if file.name.endswith(FOLDER_MARK):
        return any(name.startswith(file.name) for name in signed_names)
    return file.name in signed_names
