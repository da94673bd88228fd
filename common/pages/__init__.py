"""HTML pages that need nothing but themselves: no network, no file beside them; whatever is put in is escaped."""
