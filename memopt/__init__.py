"""memopt: FP8 GLM and Kimi checkpoints become INT4 releases that a serving fleet can trust.

    >>> import memopt
    >>> memopt.inspect("GLM-5.2-FP8").family
    >>> memopt.plan("GLM-5.2-FP8", "glm-5.2-int4").weights_size_bytes
    >>> memopt.compress("GLM-5.2-FP8", "GLM-5.2-INT4", recipe="glm-5.2-int4")
    >>> memopt.open_release("GLM-5.2-INT4", policy="trust.json").load(rank=3)
    >>> memopt.Engine("GLM-5.2-INT4", policy="trust.json").generate(["def "], memopt.SamplingParams(max_tokens=64))

Names are loaded on first use, so that `import memopt` costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memopt.errors import ExitCode, MemoptError
from memopt.version import __version__

if TYPE_CHECKING:
    from memopt.compressor.api import compress, dequantize, inspect, plan, plan_config
    from memopt.compressor.calibration_options import CalibrationOptions
    from memopt.compressor.evaluate.gated_signing import sign_release
    from memopt.compressor.fetch_release import PullOptions, PullResult, pull_release
    from memopt.compressor.inspection import Inspection
    from memopt.compressor.pipeline import RunResult
    from memopt.compressor.plan import Plan, PlanOptions
    from memopt.compressor.progress import Progress
    from memopt.compressor.publish import PushOptions, PushResult, push_release
    from memopt.compressor.ranks.api import merge, shard
    from memopt.compressor.recipe import Recipe, load_recipe
    from memopt.manifests.release import Release, open_release
    from memopt.manifests.sign import SignOptions, SignResult
    from memopt.manifests.stage import stage
    from memopt.manifests.verdict import Verdict
    from memopt.manifests.verify import VerifyOptions, verify_release
    from memopt.runtime.engine.engine import Engine
    from memopt.runtime.engine.events import Completion, TokenEvent
    from memopt.runtime.engine.metrics import EngineMetrics
    from memopt.runtime.engine.sampling_params import SamplingParams


_HOMES = {
    "compress": "memopt.compressor.api",
    "dequantize": "memopt.compressor.api",
    "inspect": "memopt.compressor.api",
    "plan": "memopt.compressor.api",
    "plan_config": "memopt.compressor.api",
    "CalibrationOptions": "memopt.compressor.calibration_options",
    "Inspection": "memopt.compressor.inspection",
    "RunResult": "memopt.compressor.pipeline",
    "Plan": "memopt.compressor.plan",
    "PlanOptions": "memopt.compressor.plan",
    "Progress": "memopt.compressor.progress",
    "PullOptions": "memopt.compressor.fetch_release",
    "PullResult": "memopt.compressor.fetch_release",
    "pull_release": "memopt.compressor.fetch_release",
    "PushOptions": "memopt.compressor.publish",
    "PushResult": "memopt.compressor.publish",
    "push_release": "memopt.compressor.publish",
    "merge": "memopt.compressor.ranks.api",
    "shard": "memopt.compressor.ranks.api",
    "Recipe": "memopt.compressor.recipe",
    "load_recipe": "memopt.compressor.recipe",
    "Release": "memopt.manifests.release",
    "open_release": "memopt.manifests.release",
    "stage": "memopt.manifests.stage",
    "SignOptions": "memopt.manifests.sign",
    "SignResult": "memopt.manifests.sign",
    "sign_release": "memopt.compressor.evaluate.gated_signing",
    "Verdict": "memopt.manifests.verdict",
    "VerifyOptions": "memopt.manifests.verify",
    "verify_release": "memopt.manifests.verify",
    "Engine": "memopt.runtime.engine.engine",
    "Completion": "memopt.runtime.engine.events",
    "TokenEvent": "memopt.runtime.engine.events",
    "EngineMetrics": "memopt.runtime.engine.metrics",
    "SamplingParams": "memopt.runtime.engine.sampling_params",
}

__all__ = [
    "CalibrationOptions",
    "Completion",
    "Engine",
    "EngineMetrics",
    "ExitCode",
    "Inspection",
    "MemoptError",
    "Plan",
    "PlanOptions",
    "Progress",
    "PullOptions",
    "PullResult",
    "PushOptions",
    "PushResult",
    "Recipe",
    "Release",
    "RunResult",
    "SamplingParams",
    "SignOptions",
    "SignResult",
    "TokenEvent",
    "Verdict",
    "VerifyOptions",
    "__version__",
    "compress",
    "dequantize",
    "inspect",
    "load_recipe",
    "merge",
    "open_release",
    "plan",
    "plan_config",
    "pull_release",
    "push_release",
    "shard",
    "sign_release",
    "stage",
    "verify_release",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memopt' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
