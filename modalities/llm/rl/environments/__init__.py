"""Environments: what answers the policy turn by turn, such as tools, and what its turns become as tokens."""
