"""Text to image: Stable Diffusion, SDXL, Stable Diffusion 3 and Flux, by adapter or whole."""
