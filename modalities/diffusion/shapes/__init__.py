"""An example that needs no downloads: drawn shapes, a small pipeline that learns to draw them, and an adapter that
teaches it pastel colours.

`python -m luthier.modalities.diffusion.shapes FOLDER` does it all.
"""
