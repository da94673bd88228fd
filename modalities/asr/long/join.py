"""Transcripts of the pieces of a recording as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ..metrics import Scored
from ..text import is_unsegmented

log = logging.getLogger(__name__)


def joined(records: Sequence[Scored]) -> list[Scored]:
    """Records of whole recordings; those of pieces have to be one after the other.

    A recording of which pieces are missing (unreadable, or left out by `evaluate.limit`) is left out.
    """
    groups: list[list[Scored]] = []
    for record in records:
        number, of = record.part
        if number and groups and groups[-1][0].where == record.where and groups[-1][0].part[1] == of:
            groups[-1].append(record)
        else:
            groups.append([record])
    whole = [group for group in groups if [record.part[0] for record in group] == list(range(group[0].part[1]))]
    if len(whole) < len(groups):
        log.warning("%d long recordings are not scored, as pieces of them are missing", len(groups) - len(whole))
    return [_one(group) for group in whole]


def _one(group: Sequence[Scored]) -> Scored:
    first = group[0]
    if len(group) == 1:
        return first
    glue = "" if is_unsegmented(first.language) else " "
    text = glue.join(record.hypothesis.strip() for record in group if record.hypothesis.strip())
    times = tuple(time for record in group for time in record.times)
    return replace(first, hypothesis=text, part=(0, 1), times=times)
