"""The checkpoint contract: a directory that explains itself and is either whole or absent."""
