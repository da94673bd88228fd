"""One folder a modality. A modality imports `common` and never another modality."""
