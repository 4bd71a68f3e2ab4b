"""How large the folder of a calibration gets: finished codes, and the rows of the one layer that is worked on."""

from __future__ import annotations

from itertools import chain

import torch

from memopt.compressor.calibrate.layer_sequence import LayerSequence, layer_sequence
from memopt.compressor.calibrate.layer_targets import NUM_ATTENTION_STAGES, LayerTargets, layer_targets
from memopt.compressor.calibration_options import CalibrationIdentity
from memopt.compressor.kv_scale_plan import brings_kv_scales
from memopt.compressor.plan import Plan
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import MlaConfig, ModelConfig

# Beside codes and rows, of every tensor: its place in a header, figures, digests in a layer's record.
BOOKKEEPING_BYTES_A_TENSOR = 1_024


def calibration_scratch_bytes(plan: Plan) -> int:
    """The most that OUT/.memopt/calibration holds at a time; 0 for a plan without calibration.

    Raises as `layer_targets` and `layer_sequence`.
    """
    data = plan.options.calibration
    if data is None:
        return 0
    config = parse_model_config(plan.source.config.raw)
    targets = layer_targets(plan.tensors, config.name_prefix)
    sequence = layer_sequence(config, targets, measures_kv=brings_kv_scales(plan.recipe))
    codes = most = 0
    for number in range(sequence.num_layers):
        layer = targets.get(number) or LayerTargets(number, (), None)
        codes += _codes_bytes(layer, has_next=number + 1 < sequence.num_layers)
        rows = data.num_samples * data.sample_tokens * _bytes_a_token(config, sequence, layer, data)
        most = max(most, codes + rows)
    return most + len(plan.tensors) * BOOKKEEPING_BYTES_A_TENSOR


def _codes_bytes(layer: LayerTargets, *, has_next: bool) -> int:
    """Of what the layer puts into the store: routed experts too that are rounded plainly, if a layer follows."""
    weights = [plan for target in layer.dense if target.form.is_calibrated for plan in target.weights]
    if layer.experts is not None and (layer.experts.is_calibrated or has_next):
        weights += [*chain.from_iterable(layer.experts.gate_up), *layer.experts.down]
    return sum(output.size_bytes for plan in weights for output in plan.outputs)


def _bytes_a_token(config: ModelConfig, sequence: LayerSequence, layer: LayerTargets, data: CalibrationIdentity) -> int:
    """Bytes of rows that `layer` has at its fullest: what comes in, and inputs of a stage or what follows."""
    rows = config.hidden_size * (torch.float32 if data.compute == "float32" else torch.bfloat16).itemsize
    is_mtp = layer.layer == sequence.num_decoder
    # The MTP layer's rows are made of the decoder's, which stay beside them.
    before = 2 * rows if is_mtp else rows
    after = rows if layer.layer + 1 < sequence.num_layers else 0
    inputs = {True: 0, False: 0}
    for target in layer.dense:
        if target.form.is_calibrated:
            width = target.weights[0].source.spec.shape[1] * torch.bfloat16.itemsize
            is_attention = target.stage < NUM_ATTENTION_STAGES
            inputs[is_attention] = max(inputs[is_attention], width)
    selected = _selection_bytes(config, data, layer.layer)
    follows = _selection_bytes(config, data, layer.layer + 1) if after else 0
    return before + selected + max(inputs[True], rows + follows + max(inputs[False], after))


def _selection_bytes(config: ModelConfig, data: CalibrationIdentity, layer: int) -> int:
    """Of a token's row of what a layer takes from the one before: int32 positions; 0 where it does not."""
    indexer = config.attention.indexer if isinstance(config.attention, MlaConfig) else None
    if indexer is None or config.has_indexer(layer) or data.sample_tokens <= indexer.top_k:
        return 0
    return indexer.top_k * torch.int32.itemsize
