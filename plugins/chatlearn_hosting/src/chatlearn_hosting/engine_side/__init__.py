"""What of ``chatlearn_hosting`` runs in the engine's interpreter: standard library only, and torch in ``blocks``."""
