"""What starts and stops replicas: processes on this machine, or pods."""
