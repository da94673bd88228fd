"""Personal data and secrets: taken out of data before a training, and looked for in a model after it."""
