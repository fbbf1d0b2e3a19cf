"""Plans each sync: its payload and receivers, based on what every end confirmed before. Used by all runtimes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chatlearn_core.plugins.records import Channel
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Endpoint, SyncReceipt, SyncRequest, WeightManifest


class SyncPlanner:
    """Makes the plans of one weight route.

    ``delta`` replaces ``full`` if the transport supports it and both ends hold the last version: the same senders
    streamed the same tensors, and every receiver of the new plan confirmed it.
    """

    def __init__(self, flow: WeightRoute, workspace: Path) -> None:
        self.flow = flow
        self._workspace = str(workspace.absolute())
        self._last: SyncRequest | None = None
        self._confirmed: dict[Endpoint, int] = {}
        """Receiver -> version that it holds."""

    def make(
        self, policy_version: int, manifest: WeightManifest, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
    ) -> SyncRequest:
        """The plan that brings these receivers to ``policy_version``."""
        flow = self.flow
        plan = SyncRequest(
            sync_id=f"v{policy_version}-{uuid.uuid4().hex[:8]}",
            policy_version=policy_version,
            base_version=None,
            payload=flow.payload,
            channel=self._channel(senders, receivers),
            export=flow.export,
            manifest=manifest,
            senders=tuple(senders),
            receivers=tuple(receivers),
            fleet_rule=flow.fleet_rule,
            bucket_bytes=flow.bucket_bytes,
            timeout_s=flow.timeout_s,
            workspace=self._workspace,
        )
        base = self._last
        if base is not None and self._can_build_on(base, plan):
            return replace(plan, payload="delta", base_version=base.policy_version)
        return plan

    def _channel(self, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]) -> Channel:
        """The channel to use. Engines run one collective after another, so two engines with several collectives could
        run them in different orders and deadlock; then the receivers, which run all concurrently, join instead.
        """
        if self.flow.channel == "process_group" and len(senders) > 1 and len(receivers) > 1:
            return "tensors"
        return self.flow.channel

    def _can_build_on(self, base: SyncRequest, plan: SyncRequest) -> bool:
        return (
            plan.payload == "full"
            and "delta" in self.flow.record.payloads
            and base.policy_version < plan.policy_version
            and base.senders == plan.senders
            and base.manifest == plan.manifest
            and all(self._confirmed.get(receiver) == base.policy_version for receiver in plan.receivers)
        )

    def turns(self, indices: Sequence[int]) -> list[list[int]]:
        """Groups of replicas that load weights together: all, or ``max_loading`` at a time under ``rolling``."""
        size = self.flow.max_loading if self.flow.fleet_rule == "rolling" else max(1, len(indices))
        return [list(indices[start : start + size]) for start in range(0, len(indices), size)]

    @property
    def sends_ahead(self) -> bool:
        """Whether the trainer sends once, and replicas load the version in turns without the trainer."""
        return self.flow.fleet_rule == "rolling" and self.flow.record.replayable

    def sent(self, plan: SyncRequest) -> None:
        """Record that every sender has streamed this plan, which can now be replayed or be the base of a delta."""
        self._last = plan

    def confirm(self, plan: SyncRequest, receiver: Endpoint, receipt: SyncReceipt) -> None:
        """Record a replica's receipt: it holds the version or, after a failure, no usable version."""
        if receipt.state == "serving":
            self._confirmed[receiver] = plan.policy_version
        else:
            self._confirmed.pop(receiver, None)

    def replay(self, policy_version: int, receiver: Endpoint) -> SyncRequest | None:
        """The plan with which a replica loads ``policy_version`` without the trainer, if the transport keeps it."""
        if not self.keeps(policy_version):
            return None
        assert self._last is not None, "it keeps the last plan's version"
        return replace(self._last, receivers=(receiver,))

    def keeps(self, policy_version: int) -> bool:
        """Whether the transport keeps this version."""
        return self.flow.record.replayable and self._last is not None and self._last.policy_version == policy_version
