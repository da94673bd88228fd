"""`luthier check`: what a careful engineer asks before a run is paid for."""

from .run import check as check
