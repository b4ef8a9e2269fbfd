"""What two processes must agree on: settings both read, records both exchange, errors both name.

Pure data. No I/O, no clients, no clock. A thing belongs here only if two processes exchange it.
"""
