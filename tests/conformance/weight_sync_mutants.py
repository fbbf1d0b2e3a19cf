"""The template's transport with one fault each, as an author might make it, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

BITS = "test_every_tensor_arrives_bit_for_bit"
SPECIAL = "test_special_values_arrive_bit_for_bit"
MANIFEST = "test_a_stream_that_breaks_its_manifest_is_refused"
SENDER_FAILS = "test_a_failing_sender_reaches_the_receivers"
LEFT = "test_nothing_is_left_behind"
OPEN = "test_an_open_sync_is_cleaned_up_by_close"
DAMAGED = "test_corrupted_files_are_refused"
SEVERAL = "test_several_ranks_and_replicas"
COPY = 'shard.tensor.detach().to("cpu", copy=True).contiguous()'
READ = "bucket: Bucket = load(content)"


def _sender(name: str, old: str, new: str, caught_by: str, equivalent: str = "") -> SourceMutant:
    return SourceMutant("weight_sync", name, "sender.py", old, new, caught_by, equivalent=equivalent)


def _receiver(name: str, old: str, new: str, caught_by: str) -> SourceMutant:
    return SourceMutant("weight_sync", name, "receiver.py", old, new, caught_by)


def _buckets(name: str, old: str, new: str, caught_by: str) -> SourceMutant:
    return SourceMutant("weight_sync", name, "buckets.py", old, new, caught_by)


def _changed(name: str, value: str, caught_by: str = SPECIAL) -> SourceMutant:
    """Each tensor ``t`` is changed as it is read."""
    return _buckets(name, READ, f"bucket: Bucket = {{k: {value} for k, t in load(content).items()}}", caught_by)


def _through(dtype: str, by: str) -> SourceMutant:
    """Tensors of a dtype go through another one."""
    return _changed(f"{dtype}_through_{by}", f"t.to(torch.{by}).to(t.dtype) if t.dtype == torch.{dtype} else t")


MUTANTS = (
    # values
    _through("bfloat16", "float16"),
    _through("float32", "bfloat16"),
    _through("float32", "float16"),
    _through("float16", "bfloat16"),
    _through("float64", "float32"),
    _through("int64", "int32"),
    _through("int64", "float64"),
    _through("int32", "float32"),
    _changed("uint8_is_a_mask", "t.bool().to(t.dtype) if t.dtype == torch.uint8 else t"),
    _changed("nan_is_zero", "torch.nan_to_num(t) if t.is_floating_point() else t"),
    _changed("nan_payload_lost", "torch.where(t.isnan(), torch.nan, t).to(t.dtype) if t.is_floating_point() else t"),
    _changed("infinity_clipped", "t.clamp(-1e30, 1e30) if t.dtype == torch.float32 else t"),
    _changed("negative_zero_lost", "t + 0"),
    _changed("subnormals_flushed", "torch.where(t.abs() < 1e-38, 0 * t, t) if t.dtype == torch.float32 else t"),
    _changed("noise", "t + 1e-7 if t.dtype == torch.float32 else t", BITS),
    _changed("transposed_square", "t.t().contiguous() if t.dim() == 2 and t.shape[0] == t.shape[1] else t", SPECIAL),
    _changed("flipped", "t.flip(0) if t.dim() else t", BITS),
    _changed("flat", "t.reshape(-1)", BITS),
    _changed("scalar_has_a_dimension", "t.reshape(-1) if not t.dim() else t", BITS),
    _changed("all_double", "t.double()", BITS),
    _sender(
        "storage_instead_of_values",
        COPY,
        "torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)"
        ".copy_(shard.tensor.as_strided(shard.tensor.shape, torch.empty(shard.tensor.shape).stride()))",
        BITS,
    ),
    _sender(
        "empty_left_out",
        "            check_tensor(shard.name,",
        "            if not shard.tensor.numel():\n                continue\n            check_tensor(shard.name,",
        SPECIAL,
    ),
    _sender(
        "scalars_left_out",
        "            check_tensor(shard.name,",
        "            if not shard.tensor.dim():\n                continue\n            check_tensor(shard.name,",
        BITS,
    ),
    # names and completeness
    _sender("last_bucket_lost", "        if bucket:\n            yield bucket", "        return", BITS),
    _sender("owner_ignored", "if shard.owner_rank != self.endpoint.rank:", "if False:", SEVERAL),
    _sender(
        "everything_twice",
        "                yield bucket\n                bucket",
        "                yield bucket\n                yield bucket\n                bucket",
        BITS,
    ),
    _receiver(
        "missing_accepted",
        "if missing := sorted(plan.manifest.tensors.keys() - arrived):",
        "if missing := []:",
        MANIFEST,
    ),
    _buckets(
        "unknown_name_accepted",
        "if promised is None or (promised.shape, promised.dtype) != (shape, dtype):",
        "if promised is not None and (promised.shape, promised.dtype) != (shape, dtype):",
        MANIFEST,
    ),
    _buckets(
        "shape_not_checked", "(promised.shape, promised.dtype) != (shape, dtype)", "promised.dtype != dtype", MANIFEST
    ),
    _buckets(
        "dtype_not_checked", "(promised.shape, promised.dtype) != (shape, dtype)", "promised.shape != shape", MANIFEST
    ),
    _buckets(
        "names_in_lower_case",
        READ,
        "bucket: Bucket = {k.replace('proj', 'PROJ'): t for k, t in load(content).items()}",
        BITS,
    ),
    _receiver(
        "one_rank_is_enough",
        "                    del sources[rank]\n",
        "                    sources.clear()\n                    break\n",
        SEVERAL,
    ),
    # failures
    _sender("failure_not_told", "            if files.directory.exists():", "            if False:", SENDER_FAILS),
    _sender("failure_without_reason", 'f"{type(error).__name__}: {error}".encode()', 'b"it failed"', SENDER_FAILS),
    _sender(
        "failure_swallowed",
        '                raise WeightSyncError(f"{self._where(plan)}: {files.directory} cannot be'
        ' written: {error}") from error\n            raise\n',
        "                pass\n",
        SENDER_FAILS,
    ),
    _receiver("failure_noticed_late", "        if files.failed.exists():", "        if False:", SENDER_FAILS),
    _receiver(
        "load_errors_swallowed",
        "await loader.load_tensors(bucket.items())",
        "await asyncio.gather(loader.load_tensors(bucket.items()), return_exceptions=True)",
        "test_a_failing_loader_fails_its_replica_only",
    ),
    _receiver(
        "silence_is_success",
        "                raise BackendTimeoutError(",
        "                return received\n                raise BackendTimeoutError(",
        "test_a_silent_sender_is_a_timeout_that_names_it",
    ),
    _receiver(
        "silence_without_a_name",
        'f"{sorted(sources)} of role',
        'f"some ranks of role',
        "test_a_silent_sender_is_a_timeout_that_names_it",
    ),
    _receiver(
        "foreign_offer_is_raw",
        "if not isinstance(offer.content, FilesOffer):",
        "if False:",
        "test_a_foreign_offer_is_refused",
    ),
    _buckets("checksum_not_compared", 'if f"{zlib.crc32(content):08x}" != written:', "if False:", DAMAGED),
    _buckets(
        "checksum_of_the_head",
        "def publish_bucket(self, number: int, bucket: Bucket) -> None:",
        "def publish_bucket(self, number, bucket, zlib=type('z', (), {'crc32': lambda c: zlib.crc32(c[:64])})):",
        BITS,
    ),
    # state between syncs
    _sender("files_stay", "        if files is not None:\n            files.remove()", "        return", LEFT),
    _sender("close_keeps_open_syncs", "        while self._open:", "        while False:", OPEN),
    _sender(
        "close_forgets_files",
        "            _, files = self._open.popitem()\n            files.remove()",
        "            self._open.popitem()",
        OPEN,
    ),
    _receiver(
        "first_manifest_is_kept",
        "check_tensor(name, tensor, plan.manifest, self._where(plan))",
        "self._one = getattr(self, '_one', plan.manifest); check_tensor(name, tensor, self._one, self._where(plan))",
        "test_each_sync_has_a_manifest_of_its_own",
    ),
    _receiver(
        "arrived_is_kept",
        "        arrived: set[str] = set()",
        "        self._arrived = getattr(self, '_arrived', set())\n        arrived = self._arrived",
        "test_several_syncs_in_a_row",
    ),
    _receiver(
        "numbers_go_on",
        "        next_number = dict.fromkeys(sources, 0)",
        "        self._numbers = getattr(self,"
        " '_numbers', dict.fromkeys(sources, 0))\n        next_number = self._numbers",
        "test_several_syncs_in_a_row",
    ),
    _sender(
        "second_release_raises",
        "self._open.pop(plan.sync_id, None)",
        "self._open.pop(plan.sync_id)",
        "test_release_without_send_is_fine",
    ),
    # the loop and the caller
    _receiver(
        "blocks_while_it_waits",
        "await asyncio.sleep(self.options.poll_interval_s)",
        "time.sleep(2.5)",
        "test_a_slow_trainer_does_not_block_the_event_loop",
    ),
    _receiver(
        "calls_finish",
        "        return received\n\n    def close",
        "        await loader.finish()\n        return received\n\n    def close",
        BITS,
    ),
    _receiver(
        "calls_begin",
        "        next_number = dict",
        "        await loader.begin(plan.policy_version, plan.manifest)\n        next_number = dict",
        BITS,
    ),
    _receiver(
        "uses_another_channel",
        "await loader.load_tensors(bucket.items())",
        "await loader.load_boxes("
        "WeightShard(n, tuple(t.shape), tuple((0, x) for x in t.shape), 0, t) for n, t in bucket.items())",
        BITS,
    ),
    _receiver("counts_tensors", "sum(tensor.nbytes for tensor in bucket.values())", "len(bucket)", BITS),
    _sender("counts_buckets", "sent += sum(tensor.nbytes for tensor in bucket.values())", "sent += 1", BITS),
    # what record and protocol promise
    _sender("one_bucket", "limit = plan.bucket_bytes // COPIES", "limit = 2**40", "test_buckets_bound_the_memory"),
    _sender(
        "no_copy",
        COPY,
        'shard.tensor.detach().to("cpu").contiguous()',
        "test_what_was_sent_may_be_overwritten",
        "a sender may hold streamed tensors, within bucket_bytes, until they are written, which is before send returns",
    ),
    _sender(
        "holds_the_stream",
        "            check_tensor(shard.name,",
        "            self._held = [*getattr(self, '_held', []), shard.tensor]\n            check_tensor(shard.name,",
        "test_buckets_bound_the_memory",
    ),
    _sender(
        "holds_the_last_bucket",
        "        if bucket:\n            yield bucket",
        "        self._last = shard\n        if bucket:\n            yield bucket",
        "test_buckets_bound_the_memory",
    ),
    _sender(
        "end_comes_later",
        "            files.publish(files.end, str(count).encode())",
        "            import threading\n            threading.Timer(0.3, files.publish,"
        " (files.end, str(count).encode())).start()",
        "test_the_end_is_what_send_returns",
    ),
    _sender(
        "end_of_a_thread",
        "            files.publish(files.end, str(count).encode())",
        "            import threading, time\n            threading.Thread(target=lambda: (time.sleep(0.2),"
        " files.publish(files.end, str(count).encode()))).start()",
        "test_the_end_is_what_send_returns",
    ),
    _sender("bytes_of_the_last_bucket", "sent += sum(", "sent = sum(", "test_bytes_are_counted"),
    _sender("bytes_twice", "sent += sum(", "sent += 2 * sum(", "test_bytes_are_counted"),
    _receiver(
        "elements_counted", "received += sum(tensor.nbytes", "received += sum(tensor.numel()", "test_bytes_are_counted"
    ),
    _receiver(
        "bits_counted", "received += sum(tensor.nbytes", "received += sum(8 * tensor.nbytes", "test_bytes_are_counted"
    ),
    _receiver(
        "blocks_per_bucket",
        "bucket = await asyncio.to_thread(read_bucket, path)",
        "time.sleep(0.2); bucket = await asyncio.to_thread(read_bucket, path)",
        "test_the_event_loop_stays_free",
    ),
    _receiver(
        "cancellation_swallowed",
        "                await asyncio.sleep(self.options.poll_interval_s)",
        "                try:\n                    await asyncio.sleep(self.options.poll_interval_s)\n"
        "                except asyncio.CancelledError:\n                    return received",
        "test_a_cancelled_receiver_ends_as_cancelled",
    ),
    _receiver(
        "cancellation_is_an_error",
        "                await asyncio.sleep(self.options.poll_interval_s)",
        "                try:\n                    await asyncio.sleep(self.options.poll_interval_s)\n"
        "                except asyncio.CancelledError:\n                    raise WeightSyncError(self._where(plan))",
        "test_a_cancelled_receiver_ends_as_cancelled",
    ),
    SourceMutant(
        "weight_sync",
        "declares_adapters_and_deltas",
        "plugin.py",
        'reach="anywhere",',
        'reach="anywhere",\n            payloads=frozenset({"full", "adapter", "delta"}),',
        "test_declared_payloads_are_carried",
    ),
    SourceMutant(
        "weight_sync",
        "declares_deltas",
        "plugin.py",
        'reach="anywhere",',
        'reach="anywhere",\n            payloads=frozenset({"full", "delta"}),',
        "test_declared_payloads_are_carried",
    ),
    SourceMutant(
        "weight_sync",
        "declares_replays",
        "plugin.py",
        'reach="anywhere",',
        'reach="anywhere",\n            replayable=True,',
        "test_a_replica_that_missed_a_sync_takes_it_later",
    ),
    SourceMutant(
        "weight_sync",
        "global_of_the_process",
        "buckets.py",
        "        content = save(bucket)\n",
        "        SENT.setdefault(str(self.directory), {})[number] = bucket\n        content = save(bucket)\n",
        "test_another_process_is_reached",
        also=(
            (
                "Bucket = dict[str, Tensor]",
                "SENT: dict[str, dict[int, dict[str, Tensor]]] = {}\nBucket = dict[str, Tensor]",
            ),
            (
                "        bucket: Bucket = load(content)",
                "        bucket: Bucket = SENT[str(path.parent)][int(path.stem.split('-')[2])]",
            ),
        ),
    ),
    SourceMutant(
        "weight_sync",
        "shared_memory_of_the_host",
        "sender.py",
        "RankFiles(Path(plan.workspace) / plan.sync_id, self.endpoint.rank)",
        'RankFiles(Path("/dev/shm") / plan.sync_id, self.endpoint.rank)',
        "test_another_process_is_reached",
    ),
    _sender(
        "alias_is_sent",
        COPY,
        f"{COPY}\n            bucket.update({{a: bucket[n].clone() for a, n in"
        f" plan.manifest.aliases.items() if n == shard.name}})",
        "test_tied_names_are_not_sent",
    ),
    _sender(
        "close_raises_when_open",
        "        while self._open:",
        "        assert not self._open\n        while self._open:",
        OPEN,
    ),
    _receiver(
        "tensors_of_a_failed_sync",
        "await loader.load_tensors(bucket.items())",
        "self._old = {**bucket, **{k: t for k, t in getattr(self, '_old', {}).items() if k in bucket}};"
        " await loader.load_tensors(self._old.items() if len(self._old) == len(bucket) else bucket.items())",
        "test_a_failed_sync_leaves_nothing_for_the_next",
    ),
)
