"""The runtime ``ray``: roles as groups of Ray actors, on one machine or a cluster."""
