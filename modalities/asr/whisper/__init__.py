"""Whisper: speech recognition with transformers' WhisperForConditionalGeneration."""
