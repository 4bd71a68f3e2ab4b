"""The folders of weights in a signed release: the hub layout at the top, and one for each rank of a rank layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from memopt.errors import IndexFileError, LayoutError, MemoptError, UsageError
from memopt.manifests.file_roles import LEDGER_NAME, is_of_layout, is_weights, known_ranks
from memopt.manifests.ledger_check import check_ledger
from memopt.manifests.loader import Loader
from memopt.manifests.safetensors_index import INDEX_NAME, MAX_INDEX_SIZE_BYTES, parse_index
from memopt.manifests.verdict import PRIORITY
from memopt.manifests.weights_check import check_weights

HUB_FOLDER = ""


def raise_first(problems: Iterable[MemoptError]) -> None:
    """Raise the problem that decides the exit code of `memopt verify`, if there is any."""
    ranks = {code: rank for rank, code in enumerate(PRIORITY)}
    first = min(problems, key=lambda problem: ranks.get(problem.exit_code, len(ranks)), default=None)
    if first is not None:
        raise first


def _folder_of(name: str) -> str:
    return name[: name.rfind("/") + 1]


class WeightFolders:
    """Finds weight files and checks that headers, index and ledger name the same tensors, each file once.

    A folder is "" for the top of the release, or ends with "/". `ranks`: file -> the ranks that need it, None for all.
    """

    def __init__(self, loader: Loader, ranks: Mapping[str, tuple[int, ...] | None], num_threads: int) -> None:
        self._loader = loader
        self._ranks = ranks
        self._num_threads = num_threads
        self._sound: set[str] = set()
        self._places: dict[str, dict[str, str]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have files of their own."""
        return tuple(sorted(known_ranks(self._ranks)))

    def folders_of(self, rank: int, layout: str | None = None) -> list[str]:
        """The folders with weights of `rank`, one for each rank layout. UsageError if there are none.

        `layout`: only that rank layout's ("tp8").
        """
        folders = {
            _folder_of(name)
            for name, ranks in self._ranks.items()
            if is_weights(name) and ranks is not None and rank in ranks
        }
        if not folders:
            have = f"files of ranks {', '.join(map(str, self.ranks))}" if self.ranks else "the hub layout only"
            raise UsageError(f"there are no files of rank {rank}", remedy=f"the release has {have}")
        chosen = sorted(folder for folder in folders if is_of_layout(folder, layout))
        if not chosen:
            raise UsageError(f"rank {rank} is not in {layout}/", remedy=f"it is in {', '.join(sorted(folders))}")
        return chosen

    def folder(self, rank: int | None, layout: str | None) -> str:
        """The one folder that is meant; UsageError if there is none, or more than one."""
        if rank is None:
            if layout is not None:
                raise UsageError(f"{layout} is a layout of ranks, and no rank is named", remedy="name a rank")
            if self.ranks and not self._has_hub:
                raise UsageError(
                    "the release has no hub layout", remedy=f"name one of ranks {', '.join(map(str, self.ranks))}"
                )
            return HUB_FOLDER
        folders = self.folders_of(rank, layout)
        if len(folders) != 1:
            raise UsageError(
                f"rank {rank} is in several layouts: {', '.join(folders)}",
                remedy="say which one with tensor_parallel or expert_parallel",
            )
        return folders[0]

    @property
    def _has_hub(self) -> bool:
        return any(is_weights(name) and _folder_of(name) == HUB_FOLDER for name in self._ranks)

    def files(self, folder: str) -> list[str]:
        """The weight files of `folder`, sorted; LayoutError if there are none."""
        files = sorted(name for name in self._ranks if is_weights(name) and _folder_of(name) == folder)
        if not files:
            raise LayoutError("holds no signed .safetensors file", file=folder or ".", remedy="fetch it again")
        return files

    def places(self, folder: str) -> dict[str, str]:
        """Tensor name -> file that holds it, as the checked index says; without one, as the header of the one file."""
        if folder not in self._places:
            index = folder + INDEX_NAME
            if index in self._ranks:
                self.check_index(folder)
                raw = self._loader.read(index, MAX_INDEX_SIZE_BYTES, IndexFileError)
                places = {tensor: folder + file for tensor, file in parse_index(raw, index).weight_map.items()}
            else:
                self.check_headers(self.files(folder))
                places = {t.name: file for file in self.files(folder) for t in self._loader.header(file).tensors}
            self._places[folder] = places
        return self._places[folder]

    def check_index(self, folder: str) -> None:
        """Refuse an index that names other files than were signed, before any of them is opened."""
        index = folder + INDEX_NAME
        raise_first(check_weights(self._ranks, self._loader, {index} & self._ranks.keys()).problems)

    def check_headers(self, files: Collection[str]) -> None:
        """Refuse files whose header is malformed, or names other tensors than index and ledger do; once for each file.

        Headers of neighbours come from their first chunk, so all are checked at once; where files were signed whole,
        only those of `files` are.
        """
        wanted = {
            neighbour
            for file in files
            for neighbour in (self.files(_folder_of(file)) if self._loader.is_in_chunks(file) else [file])
        } - self._sound
        if not wanted:
            return
        indexes = {_folder_of(file) + INDEX_NAME for file in wanted} & self._ranks.keys()
        report = check_weights(self._ranks, self._loader, wanted | indexes, self._num_threads)
        problems = report.problems
        if LEDGER_NAME in self._ranks:
            problems += check_ledger(self._loader, report.tensors, [name for name in self._ranks if is_weights(name)])
        raise_first(problems)
        self._sound |= wanted
