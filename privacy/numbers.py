"""Which value has which number, and how far a run has come: kept on disk beside the output while it is made.

Values are kept as keyed hashes only (HMAC-SHA256), and the file with its key goes when the output is whole.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sqlite3
from pathlib import Path
from typing import Any


class Numbers:
    """Numbers of values, and the state of the run at the last commit.

    Args:
        file: made if absent; what a killed run has left is taken up.
        settings: what the output depends on; what other settings have left is thrown away.
    """

    def __init__(self, file: Path, settings: dict[str, Any]):
        self.file = file
        wanted = json.dumps(settings, sort_keys=True)
        if file.exists() and _settings(file) != wanted:
            file.unlink()
        file.touch(mode=0o600)  # who has the key can try values out
        self._db = sqlite3.connect(file)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS numbers (kind TEXT, digest BLOB, number INT, PRIMARY KEY (kind, digest))"
        )
        self._db.execute("CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT)")
        self._db.execute("INSERT OR IGNORE INTO state VALUES ('settings', ?)", (wanted,))
        self._db.execute("INSERT OR IGNORE INTO state VALUES ('key', ?)", (secrets.token_hex(32),))
        self._db.commit()
        self._key = bytes.fromhex(str(self._get("key")))
        self._last = dict(self._db.execute("SELECT kind, MAX(number) FROM numbers GROUP BY kind"))

    def of(self, kind: str, value: str) -> int:
        """The number of a value, from 1; the same value of a kind always has the same one."""
        digest = hmac.digest(self._key, f"{kind}\0{value}".encode(), "sha256")
        found = self._db.execute("SELECT number FROM numbers WHERE kind = ? AND digest = ?", (kind, digest)).fetchone()
        if found is not None:
            return int(found[0])
        number: int = self._last.get(kind, 0) + 1
        self._last[kind] = number
        self._db.execute("INSERT INTO numbers VALUES (?, ?, ?)", (kind, digest, number))
        return number

    def distinct(self) -> dict[str, int]:
        """How many values of each kind there are."""
        return dict(sorted(self._last.items()))

    def commit(self, state: dict[str, Any]) -> None:
        """Keep the numbers and the state, both or neither."""
        self._db.execute("INSERT OR REPLACE INTO state VALUES ('state', ?)", (json.dumps(state),))
        self._db.commit()

    def state(self) -> dict[str, Any] | None:
        """The state at the last commit; None: nothing is done yet."""
        found = self._get("state")
        return None if found is None else dict(json.loads(found))

    def close(self) -> None:
        self._db.close()

    def forget(self) -> None:
        """Close, and delete the file."""
        self.close()
        self.file.unlink(missing_ok=True)

    def _get(self, name: str) -> str | None:
        found = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])


def _settings(file: Path) -> str | None:
    try:
        db = sqlite3.connect(file)
        try:
            found = db.execute("SELECT value FROM state WHERE name = 'settings'").fetchone()
        finally:
            db.close()
    except sqlite3.DatabaseError:
        return None
    return None if found is None else str(found[0])
