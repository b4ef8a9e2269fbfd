"""CPU-only queue consumers and their handlers. They never load a model; they call the gateway."""
