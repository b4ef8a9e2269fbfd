"""The Ray Serve application: the data plane callers talk to, and the control API. The only room that imports ``ray``."""
