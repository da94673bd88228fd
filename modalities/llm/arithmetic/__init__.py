"""An exercise that needs no downloads: dialogues of sums made on the spot, and a small Llama to train on them.

`prepare(folder)` in `prepare.py`, or `python -m luthier.modalities.llm.arithmetic FOLDER`, makes both; called again
after the first training, it makes pairs of answers for a second one, which corrects the mistakes of the first.
"""
