"""What builds roles and carries calls to them. The core brings the local runtime: everything in one process."""
