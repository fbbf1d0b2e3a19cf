"""The thin core of ChatLearn: contracts, plugins, configuration, flow and executor.

Importing this package imports nothing else; take what you need from its rooms (``chatlearn_core.types``,
``chatlearn_core.protocols``, ``chatlearn_core.plugins`` and so on).
"""

__version__ = "0.1.0"
