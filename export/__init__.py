"""From a checkpoint to what is served, with a proof that it is the same model."""
