"""Plugins: the records they return (``records``), the hooks they implement (``hookspec``), and discovery (``loader``).

A plugin is any distribution with an entry point in the group ``chatlearn``. The entry point names a module, which marks
functions with ``hookimpl`` and returns records. Importing this package imports pluggy and nothing else::

    from chatlearn_core.plugins import hookimpl
    from chatlearn_core.plugins.records import RewardSpec


    @hookimpl
    def chatlearn_rewards():
        return [RewardSpec(name="acme", factory="acme.reward:AcmeReward", options="acme.options:AcmeOptions")]
"""

from __future__ import annotations

from chatlearn_core.plugins.markers import hookimpl

__all__ = ["hookimpl"]
