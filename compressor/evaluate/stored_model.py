"""A checkpoint or release on disk, read a layer at a time; every tensor that is read is hashed.

Import it where it is needed only: it needs torch and the runtime's blocks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from memopt.compressor.checkpoint.checkpoint import StoredTensor, open_checkpoint
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.evaluate.quality import ModelIdentity
from memopt.errors import ContentError, MissingTensorError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.tensor_memory import new_memory, tensor_at
from memopt.runtime.kv.kv_scales import KvScales, kv_scales_of
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.weights.layer_names import layer_names, top_level_names
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.load_model import build_layer
from memopt.runtime.weights.load_options import LoadOptions

if TYPE_CHECKING:
    from torch import Tensor

_KV_SCALE = re.compile(r".*\.self_attn\.[kv]_scale")
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.self_attn\.[kv]_scale")


class StoredModel:
    """The text model in `folder`: `config` (memopt.runtime's), layers and top-level tensors on demand.

    A context manager. A release's tensors are compared with its ledger as they are read: ContentError names one that
    differs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint = open_checkpoint(folder)
        self.config = parse_model_config(self._checkpoint.config.raw)
        self._reader = SourceReader(self._checkpoint, folder)
        self._read: dict[str, str] = {}
        self._ledger_sha256: str | None = None
        self._output_sha256: dict[str, str] = {}
        self.source_sha256: dict[str, str] = {}
        if (folder / LEDGER_NAME).is_file() and (folder / RELEASE_NAME).is_file():
            self._read_ledger()

    @property
    def is_release(self) -> bool:
        """Whether memopt made it: it has a release.json and a ledger."""
        return self._ledger_sha256 is not None

    def layer(self, number: int, options: LoadOptions) -> DecoderLayer:
        """Decoder layer `number`, built; raises as `build_layer`, and what reading raises."""
        prefix = f"{self.config.name_prefix}model.layers.{number}."
        tensors = LayerTensors(prefix, layer_names(self.config, number, options))
        for name, tensor in self._tensors(prefix):
            tensors.add(name.removeprefix(prefix), tensor)
        _require(tensors)
        layer = build_layer(self.config, number, tensors, options)
        tensors.finish()
        return layer

    def top_level(self) -> LayerTensors:
        """Embedding, final norm and head as stored; the caller takes them."""
        tensors = LayerTensors(self.config.name_prefix, top_level_names(self.config))
        for local in ("model.embed_tokens", "model.norm", "lm_head"):
            if local == "lm_head" and self.config.is_embedding_tied:
                continue
            for name, tensor in self._tensors(f"{self.config.name_prefix}{local}."):
                tensors.add(name.removeprefix(self.config.name_prefix), tensor)
        _require(tensors)
        return tensors

    def kv_scales(self) -> KvScales:
        """The calibrated scales that the release brings; unit ones without them."""
        names = [name for name in self._checkpoint.tensors if _KV_SCALE.fullmatch(name)]
        return kv_scales_of(
            self.config, [(name, self._tensor(self._checkpoint.tensors[name])) for name in sorted(names)]
        )

    def identity(self, sources: Mapping[str, str] | None = None) -> ModelIdentity:
        """What was read so far: a release by its ledger's digest, a checkpoint by a digest over its tensors' ones.

        `sources`: the digests of a release's source tensors by name; kind "source" if all that was read equals them.
        """
        self._reader.require_unchanged()
        name = self.folder.resolve().name
        if self._ledger_sha256 is not None:
            return ModelIdentity("release", name, self._ledger_sha256)
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._read.items()))
        is_source = bool(sources) and all((sources or {}).get(name) == digest for name, digest in self._read.items())
        return ModelIdentity("source" if is_source else "checkpoint", name, hashlib.sha256(lines.encode()).hexdigest())

    def _tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Tensors whose names start with `prefix`, in file order."""
        stored = [tensor for name, tensor in self._checkpoint.tensors.items() if name.startswith(prefix)]
        for tensor in sorted(stored, key=lambda tensor: (tensor.file, tensor.start)):
            if not _NOT_WEIGHTS.fullmatch(tensor.name):
                yield tensor.name, self._tensor(tensor)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor's bytes in memory of its own, hashed."""
        memory = new_memory(stored.size_bytes)
        self._reader.read_into(stored, 0, memory)
        digest = hashlib.sha256(memory).hexdigest()
        expected = self._output_sha256.get(stored.name) if self.is_release else digest
        if digest != expected:
            raise ContentError(
                "its bytes are not those of the ledger" if expected else "the ledger does not list it",
                tensor=stored.name,
                file=stored.file,
                remedy="compress again, or fetch the release again",
            )
        self._read[stored.name] = digest
        return tensor_at(memory, 0, TensorHeader(stored.name, stored.dtype, stored.shape, 0, stored.size_bytes))

    def _read_ledger(self) -> None:
        """Digests of stored and of source tensors, a line at a time; ContentError if release.json names another."""
        digest = hashlib.sha256()
        with open(self.folder / LEDGER_NAME, "rb") as stream:
            for line in stream:
                digest.update(line)
                row = json.loads(line)
                self._output_sha256 |= {output["name"]: output["sha256"] for output in row["outputs"]}
                self.source_sha256 |= {part["name"]: part["sha256"] for part in row["sources"] if part["sha256"]}
        self._ledger_sha256 = digest.hexdigest()
        named = json.loads((self.folder / RELEASE_NAME).read_bytes())["ledger"]["sha256"]
        if named != self._ledger_sha256:
            raise ContentError("is not the ledger that release.json names", file=LEDGER_NAME, remedy="compress again")

    def close(self) -> None:
        """Close its files."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require(tensors: LayerTensors) -> None:
    """MissingTensorError naming the first tensor that a layer lacks."""
    missing = tensors.missing()
    if missing:
        raise MissingTensorError(
            "the model needs this tensor, and the weights lack it",
            tensor=missing[0],
            remedy="check that config.json belongs to these weights",
        )
