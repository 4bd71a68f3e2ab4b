"""The ledger's digests of tensors, for comparing hub and rank files with them in the pass that hashes the files."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.errors import LayoutError
from memopt.manifests.digest import LEAF_SIZE_BYTES
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.hashing import WatchCallback
from memopt.manifests.ledger_output import LedgerOutput
from memopt.manifests.rank_folders import RankFolder, RankLayout, rank_folder_of
from memopt.manifests.signed_files import FileSource
from memopt.manifests.tensor_digests import TensorDigests, TensorSpan


class LedgerDigests:
    """The digests of every output, packed: of the whole tensor, then one a rank where the ranks differ.

    180,000 outputs on eight ranks take some 100 MB; places are read from a file's header when its turn comes.
    """

    def __init__(self, outputs: Iterable[LedgerOutput]) -> None:
        self._layout: RankLayout | None = None
        self._has_hub = False
        self._packed: dict[str, bytes] = {}
        for output in outputs:
            slices = () if output.ranks is None or len(output.ranks.sha256) == 1 else output.ranks.sha256
            self._packed[output.tensor.name] = bytes.fromhex("".join((output.sha256, *slices)))
            self._layout = output.layout
            self._has_hub = output.file is not None

    def watch(self, file: str, source: FileSource) -> WatchCallback | None:
        """What compares the bytes of `file`, fed from first to last, with the ledger; None where it says nothing.

        The callback raises ContentError naming the tensor, LayoutError for a tensor that the ledger lacks, and what
        `source.header` raises.
        """
        place = rank_folder_of(file)
        if place is None:
            is_known = self._has_hub and "/" not in file
        else:
            is_known = place.layout == self._layout and place.rank < place.layout.num_ranks
        if not is_known:
            return None
        digests: TensorDigests | None = None

        def update(piece: memoryview, offset: int) -> None:
            nonlocal digests
            if digests is None:
                digests = TensorDigests(
                    file, self._spans(file, place, source), lambda span, sha256: self._rank_with(span, sha256, place)
                )
            digests.update(piece, offset)

        return update

    def _digest(self, tensor: str, place: RankFolder | None) -> bytes | None:
        packed = self._packed.get(tensor)
        if packed is None:
            return None
        # What is not cut has no digests of its own for the ranks.
        start = 0 if place is None or len(packed) == LEAF_SIZE_BYTES else LEAF_SIZE_BYTES * (1 + place.rank)
        return packed[start : start + LEAF_SIZE_BYTES]

    def _spans(self, file: str, place: RankFolder | None, source: FileSource) -> list[TensorSpan]:
        header = source.header(file)
        spans: list[TensorSpan] = []
        for tensor in header.tensors:
            digest = self._digest(tensor.name, place)
            if digest is None:
                fault = f"{tensor.name[:200]!a} is not in {LEDGER_NAME}"
                raise LayoutError(fault, file=file, remedy="compress again")
            start = header.data_start
            spans.append(TensorSpan(tensor.name, start + tensor.start, start + tensor.end, digest.hex()))
        return spans

    def _rank_with(self, span: TensorSpan, sha256: str, place: RankFolder | None) -> str | None:
        """The other rank whose bytes these are."""
        if place is None:
            return None
        for rank in range(place.layout.num_ranks):
            other = RankFolder(place.layout, rank)
            digest = self._digest(span.name, other)
            if digest is not None and digest.hex() == sha256:
                return f"they are those of rank {rank}: rank files were swapped"
        return None
