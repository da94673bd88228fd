"""FunASR's Paraformer: the model, its features and its loss are FunASR's, the training is ours."""
