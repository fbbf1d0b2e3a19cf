"""What of ``hosting`` runs in the engine's interpreter: standard library only, and torch in ``blocks``."""
