"""Speech recognition: utterances, audio, features and metrics, shared by every ASR model."""
