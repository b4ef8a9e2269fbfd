"""The Ray Serve application: the data plane callers talk to, and the control API. Only this room imports ``ray``."""
