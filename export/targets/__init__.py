"""One module for each way of writing a model: `write` makes the files, `runner` asks them in their runtime."""
