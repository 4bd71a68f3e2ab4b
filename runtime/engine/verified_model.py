"""A model, its tokenizer and its KV scales out of a signed release; nothing of them from anywhere else.

Whatever is wrong with the release is raised here, before an engine exists: signature, policy, layout and the small
files when it is opened, every weight's bytes when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from memopt.errors import ConfigError, SignatureError, UnsignedError, UnsupportedError, UsageError
from memopt.manifests.keys import PublicKey
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.release import Release, open_release
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.kv.kv_scales import KvScaleFilter, KvScales
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.parallel.agreement import all_ranks_or_none, require_equal
from memopt.runtime.parallel.communicator import Communicator
from memopt.runtime.text.tokenizer import TextTokenizer, load_tokenizer
from memopt.runtime.weights.load_model import load_decoder
from memopt.runtime.weights.load_options import LoadOptions

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class VerifiedModel:
    """`tokenizer` is None when the release has none that memopt reads: `no_tokenizer` then says why.

    `root_digest`: SHA-256 (hex) that identifies the release.
    """

    decoder: Decoder
    scales: KvScales
    tokenizer: TextTokenizer | None
    no_tokenizer: UnsupportedError | None
    root_digest: str


def load_verified(
    folder: str | Path,
    policy: TrustPolicy | str | Path | None,
    key: PublicKey | str | Path | bytes | None,
    options: EngineOptions,
    communicator: Communicator,
) -> VerifiedModel:
    """Open, verify and load; of several ranks each its own files, and all of them or none.

    Raises UsageError on every rank unless all have the same options, devices aside; what `open_release` and
    `Release.iter_tensors` raise, on every rank when it concerns any; then what is wrong with config.json, tokenizer or
    tensors. The release is closed again.
    """
    # Ranks of different options would wait for each other's sums, or take one thing for another.
    asked = repr(replace(options, device="cpu")).encode()
    require_equal(communicator, "the set of options", asked, UsageError)
    model = all_ranks_or_none(communicator, lambda: _load(folder, policy, key, options, communicator))
    require_equal(communicator, "the release", model.root_digest.encode())
    return model


def _load(
    folder: str | Path,
    policy: TrustPolicy | str | Path | None,
    key: PublicKey | str | Path | bytes | None,
    options: EngineOptions,
    communicator: Communicator,
) -> VerifiedModel:
    try:
        opened = open_release(folder, policy=policy, key=key)
    except UnsignedError as problem:
        # `memopt verify` calls it malformed; who runs a model is told that nobody vouches for it.
        raise SignatureError(problem.message, file=problem.file, remedy=problem.remedy) from None
    with opened as release:
        names = release.files_for()
        config = parse_model_config(parse_json_object(release.read_file(CONFIG_NAME), CONFIG_NAME, ConfigError))
        tokenizer, no_tokenizer = _tokenizer(release, names)
        found = KvScaleFilter(config)
        load_options = LoadOptions(
            compute=options.compute,
            weights=options.weights,
            device=options.device,
            communicator=communicator,
            use_mtp=options.speculative,
        )
        if communicator.num_ranks > 1:
            stream = release.iter_tensors(communicator.rank, tensor_parallel=communicator.num_ranks)
        else:
            stream = release.iter_tensors()
        decoder = load_decoder(config, found.rest(stream), load_options)
        return VerifiedModel(decoder, found.scales(), tokenizer, no_tokenizer, release.root_digest)


def _tokenizer(release: Release, names: tuple[str, ...]) -> tuple[TextTokenizer | None, UnsupportedError | None]:
    """A release without a tokenizer that memopt reads still takes token ids; a broken tokenizer is refused."""
    try:
        return load_tokenizer(release.read_file, names), None
    except UnsupportedError as problem:
        return None, problem
