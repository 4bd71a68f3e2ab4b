"""What an MTP layer starts from: the decoder's rows, each beside the token that follows (runtime/model/mtp.py)."""

from __future__ import annotations

import torch

from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.evaluate.token_windows import Window
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.vocabulary import Head
from memopt.runtime.weights.layer_builder import build_embedding, build_norm
from memopt.runtime.weights.linears import DenseLinear


def mtp_windows(run: CalibrationRun) -> list[Window]:
    """The samples without their first tokens: row i of a sample goes with its token i + 1."""
    windows = [window for batch in run.batches for window in batch.windows]
    return [Window(window.document, window.start + 1, window.ids[1:]) for window in windows]


def write_mtp_rows(
    run: CalibrationRun, mtp: CalibrationRun, number: int, hidden: RowFile, out: RowFile
) -> DecoderLayer:
    """Write projection(norm(embedding of the next token), norm(final norm of the row)) of this rank's samples.

    `hidden`: the decoder's rows, of `run`'s batches; `out`: of `mtp`'s, a row less a sample. Returns the MTP layer's
    decoder layer.
    """
    top = run.model.top_level()
    embedding = build_embedding(run.config, top, "model.embed_tokens.weight", run.load)
    norm = build_norm(run.config, top, "model.norm.weight", run.load)
    del top
    # No logits are computed: the embedding stands where a head has to be, which would be as large.
    layer = run.model.mtp_layer(number, run.load, embedding, Head(DenseLinear(embedding.weight), run.load.communicator))
    eps = run.config.rms_norm_eps
    for batch in mtp.own_batches:
        row = batch.first_row
        for offset, window in enumerate(batch.windows):
            num_tokens = len(window.ids)
            # Samples are equally long: each has one row more in `hidden`.
            first = (batch.first + offset) * (num_tokens + 1)
            rows = hidden.read(first, num_tokens).to(run.load.device)
            next_ids = torch.from_numpy(window.ids).to(run.load.device)
            embedded = rms_norm(layer.embedding(next_ids), layer.embedding_norm, eps)
            normed = rms_norm(rms_norm(rows, norm, eps), layer.hidden_norm, eps)
            out.write(row, layer.projection(torch.cat((embedded, normed), dim=-1)))
            row += num_tokens
    out.sync()
    return layer.layer
