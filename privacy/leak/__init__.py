"""What a model gives away of its training data: canaries are planted in the data, and drawn out of the model."""
