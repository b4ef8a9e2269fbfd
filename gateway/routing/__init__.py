"""Where a request goes: who may have it, who gets it, and what it waits for until then."""
