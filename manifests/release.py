"""A signed release, opened for use: whatever it hands out is the bytes that were signed, or it raises.

    >>> with open_release("GLM-5.2-INT4", policy="trust.json") as release:
    ...     weights = release.load(rank=3)

Nothing is mapped and nothing is lazy: a tensor that was handed out stays as it is, whoever writes to the files later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from memopt.errors import ContentError, LayoutError, MemoptError, MissingTensorError, UsageError
from memopt.manifests.code_check import check_code, config_names
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME
from memopt.manifests.file_roles import needed_files, ranks_of, role_of
from memopt.manifests.loader import Loader, check_destinations
from memopt.manifests.policy import TrustPolicy, load_policy, policy_for_key
from memopt.manifests.rank_folders import chosen_layout
from memopt.manifests.swapped_files import SwappedFiles
from memopt.manifests.tree import Tree, open_root, scan_tree
from memopt.manifests.trusted_release import TrustedRelease, check_tree, load_trusted
from memopt.manifests.weight_folders import WeightFolders, raise_first
from memopt.manifests.workers import default_jobs

if TYPE_CHECKING:
    import torch

    from memopt.manifests.keys import PublicKey
    from memopt.manifests.manifest import Manifest


def open_release(
    path: str | Path,
    *,
    policy: TrustPolicy | str | Path | None = None,
    key: PublicKey | str | Path | bytes | None = None,
    jobs: int | None = None,
    strict: bool = False,
    now: int | None = None,
    allow_linked_root: bool = False,
) -> Release:
    """Open the release in folder `path`: signatures, policy and layout are checked, and every file but the weights.

    Exactly one of `policy` (a TrustPolicy or the path of a trust.json) and `key` (a PublicKey, PEM bytes or the path of
    a PEM file). `jobs`: threads that read and hash (None: one a core). `strict`, `now`, `allow_linked_root`: as in
    VerifyOptions. Raises the first problem, of the kinds that `memopt verify` lists; UsageError for a wrong call.
    """
    trust = _policy(policy, key)
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} jobs do nothing", remedy="use 1 or more")
    root_fd = open_root(path, allow_link=allow_linked_root)
    try:
        trusted = load_trusted(root_fd, trust, int(time.time()) if now is None else now)
        tree = scan_tree(root_fd)
        with SwappedFiles(root_fd, trusted).named():
            raise_first(_layout_errors(tree, trusted, trust, strict=strict))
        release = Release(Path(path), root_fd, trusted, jobs or default_jobs())
        release.check_common_files(allow_code=trust.allow_code)
    except BaseException:
        os.close(root_fd)
        raise
    return release


def _policy(policy: TrustPolicy | str | Path | None, key: PublicKey | str | Path | bytes | None) -> TrustPolicy:
    if (policy is None) == (key is None):
        raise UsageError("give either a policy or a key", remedy="pass a trust.json, or the publisher's public key")
    if isinstance(policy, TrustPolicy):
        return policy
    if policy is not None:
        return load_policy(policy)
    from memopt.manifests.keys import PublicKey, load_public_key

    if key is None or isinstance(key, PublicKey):
        return policy_for_key(key) if key is not None else TrustPolicy(())
    return policy_for_key(load_public_key(key))


def _layout_errors(tree: Tree, trusted: TrustedRelease, policy: TrustPolicy, *, strict: bool) -> Iterator[MemoptError]:
    """All that is wrong before a file is opened, but for missing ones: which are needed, the caller of `load` says."""
    yield from check_tree(tree, trusted, policy)
    for name, size_bytes in trusted.sizes.items():
        status = tree.files.get(name)
        if status is not None and status.size_bytes != size_bytes:
            yield ContentError(
                f"the file has {status.size_bytes:,} bytes, {size_bytes:,} were signed",
                file=name,
                remedy="fetch the file again; if it still differs, somebody changed it",
            )
    if strict:
        for name in sorted(trusted.digests.keys() & tree.files.keys()):
            if tree.files[name].num_links > 1:
                yield LayoutError("has hard links: another name reaches the same file", file=name)
        for name in tree.empty_folders:
            if not policy.allows_extra(name):
                yield LayoutError("is an empty folder that nobody signed", file=name)


def _ranks_by_name(trusted: TrustedRelease) -> dict[str, tuple[int, ...] | None]:
    if trusted.manifest is None:
        return {name: ranks_of(name) for name in trusted.digests}
    listed = {file.path: file.ranks for file in trusted.manifest.files}
    return {name: listed.get(name) for name in trusted.digests}


class Release:
    """An open release; made by `open_release`, closed by `close` or at the end of a `with` block.

    Methods that read raise ContentError for bytes that are not the signed ones, LayoutError for files or tensors that
    are missing or do not belong there, MalformedError, MemoptIOError, and return nothing then.
    """

    def __init__(self, path: Path, root_fd: int, trusted: TrustedRelease, num_threads: int) -> None:
        self.path = path
        self._root_fd = root_fd
        self._trusted = trusted
        self._is_open = True
        self._loader = Loader(root_fd, trusted, num_threads)
        self._swapped = SwappedFiles(root_fd, trusted)
        self._ranks = _ranks_by_name(trusted)
        self._folders = WeightFolders(self._loader, self._ranks, num_threads)

    @property
    def manifest(self) -> Manifest | None:
        """The signed manifest; None for a release that another tool signed."""
        return self._trusted.manifest

    @property
    def root_digest(self) -> str:
        """SHA-256 (hex) that identifies the release: the OMS root digest."""
        return self._trusted.root_digest

    @property
    def signature_files(self) -> Mapping[str, bytes]:
        """The bytes of the signature files that were checked, by name."""
        return self._trusted.signatures

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have files of their own."""
        return self._folders.ranks

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of all tensors of the hub layout, sorted."""
        self._require_open()
        folder = self._folders.folder(None, None)
        with self._swapped.named():
            return tuple(sorted(self._folders.places(folder)))

    def load(
        self,
        rank: int | None = None,
        device: str | torch.device = "cpu",
        *,
        tensor_parallel: int | None = None,
        expert_parallel: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Every tensor of the hub layout, or of one rank; only that rank's files are read, others need not be there.

        All are verified before one is returned, on another `device` too. `tensor_parallel` or `expert_parallel` says
        which of several rank layouts is meant: the number of its ranks.
        """
        self._require_open()
        folder = self._folders.folder(rank, chosen_layout(tensor_parallel, expert_parallel))
        with self._swapped.named():
            return self._load(folder, device)

    def _load(self, folder: str, device: str | torch.device) -> dict[str, torch.Tensor]:
        files = self._folders.files(folder)
        # What the index names comes first: it costs nothing, and the reading may take an hour.
        self._folders.check_index(folder)
        tensors: dict[str, torch.Tensor] = {}
        if str(device) == "cpu":
            tensors = self._loader.load_files(files)
        else:
            for file in files:
                for group in self._loader.load_tensors(file):
                    tensors |= {name: tensor.to(device) for name, tensor in group.items()}
        self._folders.check_headers(files)
        return tensors

    def tensors(self, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """The tensors `names` of the hub layout; only the chunks that hold them, and headers, are read and verified.

        MissingTensorError for a name that the release does not have.
        """
        self._require_open()
        ordered = list(dict.fromkeys(names))
        found: dict[str, torch.Tensor] = {}
        folder = self._folders.folder(None, None)
        with self._swapped.named():
            for file, chosen in self._by_file(ordered, folder).items():
                for group in self._groups(file, chosen):
                    found |= {name: tensor.to(device) for name, tensor in group.items()}
        return {name: found[name] for name in ordered}

    def load_into(
        self,
        tensors: Mapping[str, torch.Tensor],
        rank: int | None = None,
        *,
        tensor_parallel: int | None = None,
        expert_parallel: int | None = None,
    ) -> None:
        """Fill a model's own tensors, by name: CPU memory is read into directly, other devices are copied to.

        Saves `load` its copy. UsageError, before anything is written, for a tensor of another type or shape or one
        that is not contiguous. If anything else is raised all of `tensors` are zeroed.
        """
        self._require_open()
        folder = self._folders.folder(rank, chosen_layout(tensor_parallel, expert_parallel))
        with self._swapped.named():
            self._fill(tensors, folder)

    def _fill(self, tensors: Mapping[str, torch.Tensor], folder: str) -> None:
        self._folders.check_index(folder)
        wanted = self._by_file(tensors, folder)
        self._folders.check_headers(list(wanted))
        for file, names in wanted.items():
            check_destinations(self._loader.header(file), {name: tensors[name] for name in names})
        plain = {name: tensor.detach() for name, tensor in tensors.items()}
        try:
            for file, names in wanted.items():
                self._loader.fill_tensors(file, {name: plain[name] for name in names})
        except BaseException:
            for tensor in plain.values():
                tensor.zero_()
            raise

    def iter_tensors(
        self, rank: int | None = None, *, tensor_parallel: int | None = None, expert_parallel: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) one after the other in file order, some 256 MiB at a time in memory (a file, if signed whole).

        What was yielded is verified; what comes later is not yet, and may raise.
        """
        self._require_open()
        folder = self._folders.folder(rank, chosen_layout(tensor_parallel, expert_parallel))
        with self._swapped.named():
            self._folders.check_index(folder)
            for file in self._folders.files(folder):
                for group in self._groups(file, None):
                    yield from group.items()

    def read_file(self, name: str) -> bytes:
        """The verified bytes of any signed file, read anew."""
        self._require_open()
        with self._swapped.named():
            return self._loader.read_file(name)

    def files_for(
        self, rank: int | None = None, *, tensor_parallel: int | None = None, expert_parallel: int | None = None
    ) -> tuple[str, ...]:
        """The signed files that `rank` needs (None: all files), sorted. UsageError for a rank without files.

        Those of every rank layout, or of the one that `tensor_parallel` or `expert_parallel` names.
        """
        layout = chosen_layout(tensor_parallel, expert_parallel)
        if rank is not None:
            self._folders.folders_of(rank, layout)
        elif layout is not None:
            raise UsageError(f"{layout} is a layout of ranks, and no rank is named", remedy="name a rank")
        return tuple(sorted(needed_files(self._ranks, None if rank is None else (rank,), layout)))

    def copy_files(self, copies: Collection[tuple[str, int]]) -> None:
        """Write verified files to open descriptors, (name, descriptor); throw the copies away if this raises."""
        self._require_open()
        with self._swapped.named():
            self._loader.copy_files(list(copies))

    def check_common_files(self, *, allow_code: bool) -> None:
        """Verify every file that all ranks need but weights and indexes, and that none of them brings code."""
        self._require_open()
        names = {name for name, ranks in self._ranks.items() if ranks is None}
        common = {name for name in names if role_of(name) not in {"weights", "index"}}
        with self._swapped.named():
            raise_first(check_code(self._trusted.digests, self._loader, config_names(common), allow_code=allow_code))
            # These two were checked when they were read.
            self._loader.check_files(common - {CHUNKS_NAME, MANIFEST_NAME})

    def close(self) -> None:
        """Close the folder; tensors that were handed out stay valid."""
        if self._is_open:
            self._is_open = False
            os.close(self._root_fd)

    def __enter__(self) -> Release:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError("the release is closed", file=str(self.path), remedy="open it again")

    def _by_file(self, names: Iterable[str], folder: str) -> dict[str, set[str]]:
        """The tensors `names` by the file that holds them; MissingTensorError for one that there is not."""
        places = self._folders.places(folder)
        wanted: dict[str, set[str]] = {}
        for name in names:
            if name not in places:
                raise MissingTensorError("the release has no such tensor", tensor=name, remedy="see tensor_names")
            wanted.setdefault(places[name], set()).add(name)
        return wanted

    def _groups(self, file: str, names: Collection[str] | None) -> Iterator[dict[str, torch.Tensor]]:
        for group in self._loader.load_tensors(file, names):
            self._folders.check_headers([file])
            yield group
            # The caller may have closed the release meanwhile; its descriptor may by now be another folder's.
            self._require_open()
