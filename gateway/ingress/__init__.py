"""The doors of the data plane. They translate protocols; they decide nothing."""
