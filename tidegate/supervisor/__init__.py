"""The local supervisor: what ``tidegate up`` runs, watches and takes down in order."""
