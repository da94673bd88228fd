"""Language models: examples, chat templates, loss masks, lengths and packing, shared by every LLM task."""
