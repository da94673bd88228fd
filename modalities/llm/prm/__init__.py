"""Process reward models: a language model with a head that scores every step of a solution."""
