"""The core that every modality shares. It imports nothing of ours outside this folder."""
