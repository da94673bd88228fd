"""Image generation: adapters for text-to-image models."""
