"""Speech recognition with transformers' encoder-decoder models: Moonshine, Canary, Speech2Text and others like them."""
