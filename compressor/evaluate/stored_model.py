"""A checkpoint or release on disk, read a layer at a time; every tensor that is read is hashed.

Import it where it is needed only: it needs torch and the runtime's blocks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from memopt.compressor.checkpoint.checkpoint import StoredTensor, open_checkpoint
from memopt.compressor.checkpoint.finite import first_non_finite
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.evaluate.quality import SOURCE_KIND, ModelIdentity
from memopt.compressor.evaluate.release_weights import digest_of_tensors, is_release, read_release_weights
from memopt.errors import ContentError, MissingTensorError, NonFiniteError
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.tensor_memory import new_memory, tensor_at
from memopt.runtime.kv.kv_scales import KvScales, kv_scales_of
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.mtp import MtpLayer
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.vocabulary import Embedding, Head
from memopt.runtime.weights.layer_builder import build_mtp_layer
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
        self._weights = read_release_weights(folder) if is_release(folder) else None
        self._read: dict[str, str] = {}
        self._reader = SourceReader(self._checkpoint, folder)

    @property
    def source_sha256(self) -> Mapping[str, str]:
        """Digests (hex) of a release's source tensors by name; none of a checkpoint."""
        return {} if self._weights is None else self._weights.sources

    @property
    def read_sha256(self) -> Mapping[str, str]:
        """Digests (hex) of the stored tensors that were read so far, by name."""
        return self._read

    def layer(self, number: int, options: LoadOptions) -> DecoderLayer:
        """Decoder layer `number`, built; raises as `build_layer`, and what reading raises."""
        tensors = self._layer_tensors(number, options)
        layer = build_layer(self.config, number, tensors, options)
        tensors.finish()
        return layer

    def mtp_layer(self, number: int, options: LoadOptions, embedding: Embedding, head: Head) -> MtpLayer:
        """MTP layer `number`, built; `embedding` and `head` of the decoder. Raises as `layer`."""
        tensors = self._layer_tensors(number, options)
        rotary = RotaryTable(self.config.rope, options.device)
        layer = build_mtp_layer(self.config, number, tensors, options, embedding, head, rotary)
        tensors.finish()
        return layer

    def _layer_tensors(self, number: int, options: LoadOptions) -> LayerTensors:
        prefix = f"{self.config.name_prefix}model.layers.{number}."
        tensors = LayerTensors(prefix, layer_names(self.config, number, options))
        for name, tensor in self._tensors(prefix):
            tensors.add(name.removeprefix(prefix), tensor)
        _require(tensors)
        return tensors

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
        """A release by all its tensors, a checkpoint by those that were read so far.

        `sources`: the digests of a release's source tensors by name; SOURCE_KIND if all that was read equals them. A
        release may be another one's source.
        """
        self._reader.require_unchanged()
        # A folder's name may hold bytes that are no text.
        name = self.folder.resolve().name.encode(errors="replace").decode()
        is_source = bool(sources) and all((sources or {}).get(name) == digest for name, digest in self._read.items())
        kind = SOURCE_KIND if is_source else "checkpoint" if self._weights is None else "release"
        return ModelIdentity(
            kind, name, digest_of_tensors(self._read) if self._weights is None else self._weights.sha256
        )

    def _tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Tensors whose names start with `prefix`, in file order."""
        stored = [tensor for name, tensor in self._checkpoint.tensors.items() if name.startswith(prefix)]
        for tensor in sorted(stored, key=lambda tensor: (tensor.file, tensor.start)):
            if not _NOT_WEIGHTS.fullmatch(tensor.name):
                yield tensor.name, self._tensor(tensor)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor's bytes in memory of its own, hashed. NonFiniteError naming it for NaN or infinity in it."""
        memory = new_memory(stored.size_bytes)
        self._reader.read_into(stored, 0, memory)
        digest = hashlib.sha256(memory).hexdigest()
        expected = digest if self._weights is None else self._weights.outputs.get(stored.name)
        if digest != expected:
            raise ContentError(
                "its bytes are not those of the ledger" if expected else "the ledger does not list it",
                tensor=stored.name,
                file=stored.file,
                remedy="compress again, or fetch the release again",
            )
        self._read[stored.name] = digest
        bad = first_non_finite(np.frombuffer(memory, np.uint8), stored.dtype)
        if bad is not None:
            raise NonFiniteError(
                f"element {bad:,} is not a finite number",
                tensor=stored.name,
                file=stored.file,
                remedy="compare the file's SHA-256 with the publisher's and download it again",
            )
        return tensor_at(memory, 0, TensorHeader(stored.name, stored.dtype, stored.shape, 0, stored.size_bytes))

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
