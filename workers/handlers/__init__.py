"""What is done with a job: pre-process, call the gateway, post-process."""
