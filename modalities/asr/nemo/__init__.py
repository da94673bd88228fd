"""NeMo's speech recognisers: CTC, RNN-T, TDT, and a transducer with CTC together."""
