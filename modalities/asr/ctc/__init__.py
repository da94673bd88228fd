"""Speech recognition with transformers' CTC models: wav2vec 2.0, HuBERT, WavLM, w2v-BERT, MMS, Parakeet and others."""
