"""`luthier estimate`: what a run will need, before there is one."""

from .run import estimate as estimate
