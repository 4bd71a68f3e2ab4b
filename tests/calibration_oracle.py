"""What a model's projections multiply, by transformers in float32, with weights put in one after the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from differential.reference_weights import read_config, read_tensors
from differential.transformers_models import load_model, loaded_weights
from differential.transformers_runs import lower_position_wins
from torch import Tensor, nn

# Modules whose inputs are there together, in the order in which they are quantized.
STAGES = (
    ("self_attn.q_a_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attn.q_b_proj",),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ("mlp.down_proj", "mlp.shared_experts.down_proj"),
)


class Inputs:
    """What the modules of one layer multiply, in one pass over all samples."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self.expert_ids = torch.empty(0, 0, dtype=torch.int64)

    def of_expert(self, expert: int) -> Tensor:
        """Rows of the layer that chose `expert`, in the order of the samples."""
        return self.rows["mlp.experts"][(self.expert_ids == expert).any(dim=1)]


class OracleModel:
    """transformers' model in float32, whose weights are put in one after the other; an MTP layer is its last layer."""

    def __init__(self, export: Path, folder: Path, ids: Tensor) -> None:
        table = read_config(export)
        text = table.get("text_config", table)
        self.num_layers = int(text["num_hidden_layers"])
        self.num_mtp_layers = int(text.get("num_nextn_predict_layers") or 0)
        shutil.copytree(export, folder)
        # transformers leaves MTP layers out, unless they are layers like others.
        text["num_hidden_layers"] = self.num_layers + self.num_mtp_layers
        text["num_nextn_predict_layers"] = 0
        if text.get("indexer_types"):
            text["indexer_types"] = text["indexer_types"] + ["full"] * self.num_mtp_layers
        (folder / "config.json").write_text(json.dumps(table))
        self.model = load_model(folder, dequantize=False).float()
        self.model.set_attn_implementation("eager")
        self.weights = loaded_weights(self.model)
        self.stored = read_tensors(export)
        self.ids = ids
        decoder: Any = self.model.get_decoder()
        self._decoder, self._layers = decoder, list(decoder.layers)

    def put(self, name: str, values: Tensor) -> None:
        """Give the weight `name` other values."""
        self.weights[name].copy_(values)

    @torch.inference_mode()
    def inputs(self, layer: int) -> Inputs:
        """What layer `layer` multiplies with the weights as they are now."""
        found = Inputs()
        handles = []

        def keep(name: str) -> Any:
            def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
                found.rows[name] = arguments[0].flatten(0, -2).clone()
                if name == "mlp.experts":
                    found.expert_ids = arguments[1]

            return hook

        for name, module in self._layers[layer].named_modules():
            if isinstance(module, nn.Linear) or name == "mlp.experts":
                handles.append(module.register_forward_pre_hook(keep(name)))
        try:
            with lower_position_wins():
                self._run(layer)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _run(self, layer: int) -> None:
        normed = self._pass(self._layers[: min(layer + 1, self.num_layers)], input_ids=self.ids)
        if layer < self.num_layers:
            return
        prefix = f"model.layers.{layer}."
        own = self.stored.get(f"{prefix}embed_tokens.weight")
        embedding = self._decoder.embed_tokens.weight if own is None else own.float()
        embedded = nn.functional.embedding(self.ids[:, 1:], embedding)
        both = (self._norm(embedded, prefix + "enorm"), self._norm(normed[:, :-1], prefix + "hnorm"))
        x = torch.cat(both, dim=2) @ self.stored[f"{prefix}eh_proj.weight"].float().T
        self._pass([self._layers[layer]], inputs_embeds=x)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.get_text_config().rms_norm_eps
        return self.stored[f"{name}.weight"].float() * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    def _pass(self, layers: list[nn.Module], **what: Tensor) -> Tensor:
        self._decoder.layers = nn.ModuleList(layers)
        try:
            return self._decoder(**what, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
        finally:
            self._decoder.layers = nn.ModuleList(self._layers)
