"""What a quantized KV cache costs a model: `python -m benchmarks.kv_quality.main`."""
