"""Text to tokens and back: tokenizer, chat template, streamed text, stop strings."""
