"""Speech recognition with speech-LLMs (Qwen2-Audio): a recording is a chat message, and its transcript the answer."""
